{{- define "paramserver.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "paramserver.selector" -}}
app.kubernetes.io/name: paramserver
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "paramserver.labels" -}}
{{ include "paramserver.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* The domain of a headless service: its pods are POD.SERVICE.NAMESPACE.svc.DOMAIN. */}}
{{- define "paramserver.host" -}}
{{- printf "%s-%s.%s.svc.%s" (include "paramserver.name" .root) .component .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end }}

{{- define "paramserver.coordinator" -}}
{{- printf "%s:7070" (include "paramserver.host" (dict "root" . "component" "coordinator")) -}}
{{- end }}

{{- define "paramserver.image" -}}
{{- $image := ternary .own .root.Values.image (not (empty .own.repository)) -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) }}
{{- end -}}
{{- end }}

{{/* Options of a command line. Helm reads all numbers as floating point. */}}
{{- define "paramserver.options" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- {{ printf "--%s" $name | quote }}
{{- end }}
{{- else if and (kindIs "float64" $value) (eq (float64 (int64 $value)) $value) }}
- {{ printf "--%s=%d" $name (int64 $value) | quote }}
{{- else }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "paramserver.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "paramserver.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "paramserver.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* What a process proves itself with: variables, mounts and volumes. */}}
{{- define "paramserver.credentialEnv" -}}
{{- if ne .root.Values.tls.mode "none" }}
- {name: PS_TLS_CA, value: /tls/ca.crt}
- {name: PS_TLS_CERT, value: /tls/tls.crt}
- {name: PS_TLS_KEY, value: /tls/tls.key}
{{- end }}
{{- if and .root.Values.tokens.secretName .token }}
- {name: PS_TOKEN_FILE, value: /tokens/{{ .token }}}
{{- end }}
{{- end }}

{{- define "paramserver.credentialMounts" -}}
{{- if ne .root.Values.tls.mode "none" }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- if .root.Values.tokens.secretName }}
- {name: tokens, mountPath: /tokens, readOnly: true}
{{- end }}
{{- end }}

{{- define "paramserver.credentialVolumes" -}}
{{- if ne .root.Values.tls.mode "none" }}
- name: tls
  secret:
    secretName: {{ include "paramserver.name" .root }}-{{ .component }}-tls
    defaultMode: 0440
{{- end }}
{{- if .root.Values.tokens.secretName }}
- name: tokens
  secret:
    secretName: {{ .root.Values.tokens.secretName }}
    defaultMode: 0440
    items:
      {{- range .tokens }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}
{{- end }}

{{/* How a daemon listens beyond its pod, and where it can be asked how it is. */}}
{{- define "paramserver.listening" -}}
- "--state-dir=/state"
- "--admin-listen=0.0.0.0:{{ .Values.admin.port | int }}"
{{- if .Values.tokens.secretName }}
- "--tokens=/tokens/tokens.json"
{{- end }}
{{- if eq .Values.tls.mode "none" }}
- "--insecure"
{{- end }}
{{- end }}

{{- define "paramserver.probes" -}}
{{- $scheme := ternary "HTTP" "HTTPS" (eq .Values.tls.mode "none") }}
readinessProbe:
  httpGet: {path: /readyz, port: admin, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
livenessProbe:
  httpGet: {path: /healthz, port: admin, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
startupProbe:
  httpGet: {path: /healthz, port: admin, scheme: {{ $scheme }}}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 150
{{- end }}

{{- define "paramserver.checkpointMounts" -}}
{{- if .Values.checkpoints.existingClaim }}
- {name: checkpoints, mountPath: /checkpoints}
{{- end }}
{{- end }}

{{- define "paramserver.checkpointVolumes" -}}
{{- with .Values.checkpoints.existingClaim }}
- name: checkpoints
  persistentVolumeClaim: {claimName: {{ . }}}
{{- end }}
{{- end }}

{{- define "paramserver.checkpointEnv" -}}
{{- with .Values.checkpoints.secretName }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end }}

{{- define "paramserver.stateVolume" -}}
persistentVolumeClaimRetentionPolicy:
  whenDeleted: {{ .Values.state.whenDeleted }}
  whenScaled: Retain
volumeClaimTemplates:
  - metadata:
      name: state
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .Values.state.storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ .Values.state.size }}
{{- end }}
