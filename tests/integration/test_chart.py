"""The Helm chart: rendered by Helm, and its command lines run."""

import http.client
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from psctl.folders import write_private
from pswire.exit_codes import ExitCode
from pswire.security.roles import Role
from tests.doubles.children import Nursery
from tests.doubles.free_addresses import free_ports
from tests.doubles.installed import HEAVY, need
from tests.doubles.job_tokens import JobTokens
from tests.integration.crd_shapes import Manifest, check_shape, is_extension
from tests.integration.deploy_files import Container, check_command_line
from tests.integration.processes import Processes
from tests.integration.test_deploy import STOP_TIMEOUT_S

need("helm_python", HEAVY)
import helm_python  # noqa: E402
import kubernetes_validate  # noqa: E402

CHECKOUT = Path(__file__).resolve().parents[2]
CHART = CHECKOUT / "deploy" / "helm" / "paramserver"
VALUES = sorted((CHART / "ci").glob("*.yaml"))
KUBERNETES_VERSIONS = ("1.29", "1.37")
"""The oldest that the chart allows, and the newest whose schemas are at hand."""

HOST = "team.svc.cluster.local"


@pytest.fixture(scope="module")
def chart() -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(CHART) as loaded:
        yield loaded


def values_of(path: Path) -> Manifest:
    values: Manifest = yaml.safe_load(path.read_text())
    return values


def rendered(chart: helm_python.Chart, values: Mapping[str, Any]) -> list[Manifest]:
    files = chart.render(dict(values), name="job", namespace="team")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (
        each
        for each in manifests
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def pod_of(manifest: Manifest) -> Manifest | None:
    """The template of pods that a manifest has."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "JobSet":
        (job,) = spec["replicatedJobs"]
        spec = job["template"]["spec"]
    template: Manifest | None = spec.get("template")
    return template


def containers(manifests: list[Manifest]) -> list[Container]:
    """The container of the second pod of each kind that has two, else of the first."""
    found = []
    for manifest in manifests:
        if (pod := pod_of(manifest)) is not None:
            (spec,) = pod["spec"]["containers"]
            index = int(manifest["spec"].get("replicas", 2) > 1)
            name = f"{manifest['metadata']['name']}-{index}"
            found.append(Container(spec, name, index))
    return found


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_kubernetes_takes_what_the_chart_makes(
    chart: helm_python.Chart, path: Path
) -> None:
    manifests = rendered(chart, values_of(path))
    assert {"Service", "StatefulSet"} <= {each["kind"] for each in manifests}
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(names) == len(set(names))
    for manifest in manifests:
        if is_extension(manifest):
            check_shape(manifest)
            continue
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
    report = helm_python.lint(CHART, values_of(path), strict=True)
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_our_commands_take_the_options_of_the_chart(
    chart: helm_python.Chart, path: Path
) -> None:
    found = containers(rendered(chart, values_of(path)))
    assert {each.spec["name"] for each in found} >= {"coordinator", "shard"}
    for each in found:
        check_command_line(each.command)


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_pods_have_no_rights(chart: helm_python.Chart, path: Path) -> None:
    """What Kubernetes' pod security standard `restricted` asks, and a bit more."""
    pods = [pod for each in rendered(chart, values_of(path)) if (pod := pod_of(each))]
    for pod in pods:
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {each["name"] for each in container["volumeMounts"]}
        volumes = {each["name"] for each in spec["volumes"]}
        assert mounted - volumes <= {"state"}
        assert "tmp" in mounted, "the rest is read-only"


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_parts_of_the_chart_find_each_other(
    chart: helm_python.Chart, path: Path
) -> None:
    manifests = rendered(chart, values_of(path))
    labels = [pod["metadata"]["labels"] for each in manifests if (pod := pod_of(each))]
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            chosen = [each for each in labels if wanted.items() <= each.items()]
            assert len(chosen) == 1, manifest["metadata"]["name"]
    for component, port in (("coordinator", 7070), ("shard", 7071)):
        service = one(manifests, "Service", f"job-{component}")
        (container,) = (c for c in containers(manifests) if c.spec["name"] == component)
        ports = {
            each["name"]: each["containerPort"] for each in container.spec["ports"]
        }
        assert ports == {
            each["targetPort"]: each["port"] for each in service["spec"]["ports"]
        }
        assert ports["grpc"] == port
        stateful = one(manifests, "StatefulSet", f"job-{component}")["spec"]
        assert stateful["serviceName"] == f"job-{component}"
    for each in containers(manifests):
        for word in each.command:
            if word.startswith("--coordinator="):
                assert word == f"--coordinator=job-coordinator.{HOST}:7070"
            if word.startswith("--advertise="):
                assert word == f"--advertise={each.pod}.job-shard.{HOST}:7071"


def test_certificates_are_for_the_names_that_are_called(
    chart: helm_python.Chart,
) -> None:
    manifests = rendered(chart, values_of(CHART / "ci" / "protected.yaml"))
    for component in ("coordinator", "shard", "worker"):
        spec = one(manifests, "Certificate", f"job-{component}")["spec"]
        pods = [pod for each in manifests if (pod := pod_of(each))]
        (pod,) = (p for p in pods if p["spec"]["containers"][0]["name"] == component)
        secrets = [
            v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v
        ]
        assert secrets == [spec["secretName"], "job-tokens"]
    names = one(manifests, "Certificate", "job-shard")["spec"]["dnsNames"]
    assert f"*.job-shard.{HOST}" in names
    monitor = one(manifests, "ServiceMonitor", "job-shard")["spec"]["endpoints"][0]
    assert monitor["tlsConfig"]["serverName"] in names


@pytest.mark.parametrize("checkpoints", [{}, {"url": "s3://a"}], ids=["none", "some"])
def test_a_shard_is_moved_where_a_checkpoint_is(
    chart: helm_python.Chart, checkpoints: Manifest
) -> None:
    """Without one a drain of its node would end the job."""
    values = {"workers": {"kind": "none"}, "checkpoints": checkpoints}
    budget = one(rendered(chart, values), "PodDisruptionBudget", "job-shard")
    assert budget["spec"]["maxUnavailable"] == len(checkpoints)


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_refused_script_fails_the_job(chart: helm_python.Chart, kind: str) -> None:
    values = {"workers": {"kind": kind, "script": ["/app/train.py"]}}
    manifests = rendered(chart, values)
    (job,) = (each for each in manifests if each["kind"] in ("Job", "JobSet"))
    spec = job["spec"]
    if kind == "jobset":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    assert spec["podFailurePolicy"]["rules"][1] == {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": "worker",
            "operator": "In",
            "values": [
                ExitCode.USAGE,
                ExitCode.INCOMPATIBLE_VERSION,
                ExitCode.BAD_CONFIGURATION,
            ],
        },
    }


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "workers.script is empty"),
        ({"workers": {"scirpt": ["/a.py"]}}, "scirpt"),
        ({"shards": {"count": 0}}, "minimum"),
        ({"coordinator": {"options": {"--mode": "bsp"}}}, "--mode"),
        (
            {
                "workers": {"kind": "none"},
                "checkpoints": {"url": "s3://a", "existingClaim": "b"},
            },
            "give one",
        ),
    ],
    ids=["no script", "unknown key", "no shard", "dashes", "two places"],
)
def test_wrong_values_are_refused(
    chart: helm_python.Chart, values: Manifest, reason: str
) -> None:
    with pytest.raises(helm_python.HelmError, match=reason):
        rendered(chart, values)


class Authority:
    """Makes certificates as cert-manager would."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        self._certificate = self._signed(self._name, self._key, [(constraints, True)])

    def issue(self, spec: Mapping[str, Any], folder: Path) -> None:
        """Writes the Secret of a Certificate into a folder."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = {
            "server auth": ExtendedKeyUsageOID.SERVER_AUTH,
            "client auth": ExtendedKeyUsageOID.CLIENT_AUTH,
        }
        names: list[x509.GeneralName] = [
            *map(x509.DNSName, spec.get("dnsNames", ())),
            *map(x509.UniformResourceIdentifier, spec.get("uris", ())),
        ]
        asked = [usages[each] for each in spec["usages"] if each in usages]
        made = self._signed(
            x509.Name([]),
            key,
            [
                (x509.SubjectAlternativeName(names), True),
                (x509.ExtendedKeyUsage(asked), False),
            ],
        )
        pem = serialization.Encoding.PEM
        folder.mkdir()
        write_private(folder / "ca.crt", self._certificate.public_bytes(pem))
        write_private(folder / "tls.crt", made.public_bytes(pem))
        private = key.private_bytes(
            pem,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        write_private(folder / "tls.key", private)

    def _signed(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        extensions: list[tuple[x509.ExtensionType, bool]],
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=name,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(hours=1),
            not_valid_after=now + timedelta(days=1),
        )
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, critical=is_critical)
        return builder.sign(self._key, hashes.SHA256())


def asked(
    port: int, path: str, endpoint: Mapping[str, Any], ca: Path, token: str | None
) -> tuple[int, str]:
    """What Prometheus gets from an endpoint of a ServiceMonitor."""
    context = ssl.create_default_context(cafile=ca)
    server_name = endpoint["tlsConfig"]["serverName"]
    with (
        socket.create_connection(("127.0.0.1", port), 60) as plain,
        context.wrap_socket(plain, server_hostname=server_name) as protected,
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.sock = protected
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_command_lines_train_with_certificates_and_tokens(
    chart: helm_python.Chart, nursery: Nursery, tmp_path: Path
) -> None:
    values = values_of(CHART / "ci" / "protected.yaml")
    values["checkpoints"] = {"existingClaim": "checkpoints"}
    values["coordinator"]["options"] = {"min-workers": 2, "checkpoint-every": "10min"}
    values["shards"] = {"count": 2}
    values["workers"] = {"count": 2, "script": ["/scripts/digits_after.py"]}
    manifests = rendered(chart, values)
    authority = Authority()
    pods = {
        f"{name}-{index}": Container(each.spec, f"{each.pod[:-1]}{index}", index)
        for each in containers(manifests)
        for name in [each.spec["name"]]
        for index in range(1 if name == "coordinator" else 2)
    }
    ports = dict(zip(pods, free_ports(len(pods)), strict=True))
    admin_ports = dict(zip(pods, free_ports(len(pods)), strict=True))
    (tmp_path / "tokens").mkdir()
    (tmp_path / "checkpoints").mkdir()
    tokens = JobTokens(tmp_path / "tokens")
    for role in Role:
        shutil.copy2(
            tokens.path(role.value), tmp_path / "tokens" / f"{role.value}.token"
        )
    with Processes(tmp_path, nursery, launches=True) as processes:
        for name, pod in pods.items():
            component = name.rpartition("-")[0]
            secret = one(manifests, "Certificate", f"job-{component}")["spec"]
            authority.issue(secret, tmp_path / f"{name}-tls")
            here = {
                f"job-coordinator.{HOST}:7070": f"localhost:{ports['coordinator-0']}",
                f"{pod.pod}.job-shard.{HOST}:7071": f"localhost:{ports[name]}",
                "0.0.0.0:7070": f"0.0.0.0:{ports[name]}",
                "0.0.0.0:7071": f"0.0.0.0:{ports[name]}",
                "0.0.0.0:9090": f"0.0.0.0:{admin_ports[name]}",
                "/state": str(tmp_path / f"{name}-state"),
                "/tls/": f"{tmp_path / f'{name}-tls'}/",
                "/tokens/": f"{tmp_path / 'tokens'}/",
                "/checkpoints": str(tmp_path / "checkpoints"),
                "/scripts/": f"{CHECKOUT / 'examples'}/",
            }

            def localized(text: str, here: Mapping[str, str] = here) -> str:
                for there, place in here.items():
                    text = text.replace(there, place)
                return text

            command, *arguments = map(localized, pod.command)
            environment = {k: localized(v) for k, v in pod.environment.items()}
            processes.start(name, "-m", command, *arguments, **environment)
        for name in ("worker-0", "worker-1"):
            assert processes.code(name, 200) == 0, processes.logs()
            assert "test accuracy 0.9" in "".join(processes.rest(name))
        token = tokens.path("reader").read_text().strip()
        for name in ("coordinator-0", "shard-0", "shard-1"):
            component = name.rpartition("-")[0]
            monitor = one(manifests, "ServiceMonitor", f"job-{component}")["spec"]
            (endpoint,) = monitor["endpoints"]
            ca = tmp_path / f"{name}-tls" / "ca.crt"
            port = admin_ports[name]
            assert asked(port, "/readyz", endpoint, ca, None)[0] == 200
            assert asked(port, endpoint["path"], endpoint, ca, None)[0] == 401
            code, text = asked(port, endpoint["path"], endpoint, ca, token)
            assert (code, "ps_ready 1.0" in text) == (200, True)
        for name in ("coordinator-0", "shard-0", "shard-1"):
            processes.send(name, signal.SIGTERM)
            assert processes.code(name, STOP_TIMEOUT_S) == 0, processes.logs()
    assert list((tmp_path / "checkpoints").glob("step-*")), "the last one"
