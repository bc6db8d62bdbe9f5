"""What `deploy/` uses of kinds that clusters get by extensions, by a schema each.

By the models of their own projects where those are on PyPI: JobSet, Kubeflow Trainer
and Argo Workflows. Those ignore unknown fields, so that what they have read is written
again and compared. cert-manager and the Prometheus Operator have none there: for these
it is a schema of what we use, by their documentation.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import jsonschema
from hera.workflows import models as argo
from kubeflow_trainer_api import models as trainer

Manifest = dict[str, Any]


def _object(required: Mapping[str, Any], **optional: Any) -> Manifest:  # noqa: ANN401
    """Schema of an object without other keys than these."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Manifest) -> Manifest:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT: Final[Manifest] = {"type": "string", "minLength": 1}
_DURATION: Final[Manifest] = {"type": "string", "pattern": "^([0-9]+(h|m|s|ms))+$"}
_KEY: Final = _object({"name": _TEXT, "key": _TEXT})
_META: Final[Manifest] = {
    "type": "object",
    "required": ["name", "labels"],
    "properties": {
        "name": {"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
    },
}
_ISSUER: Final = _object(
    {"name": _TEXT, "kind": {"enum": ["Issuer", "ClusterIssuer"]}},
    group={"const": "cert-manager.io"},
)
_CERTIFICATE: Final = _object(
    {"secretName": _TEXT, "issuerRef": _ISSUER},
    isCA={"type": "boolean"},
    commonName={"type": "string", "maxLength": 64},
    duration=_DURATION,
    renewBefore=_DURATION,
    dnsNames=_list(_TEXT),
    uris=_list({"type": "string", "format": "uri"}),
    usages=_list({"enum": ["digital signature", "server auth", "client auth"]}),
    privateKey=_object(
        {"algorithm": {"const": "ECDSA"}, "size": {"enum": [256, 384, 521]}},
        rotationPolicy={"enum": ["Never", "Always"]},
    ),
)
_ENDPOINT: Final = _object(
    {"port": _TEXT, "path": _TEXT, "scheme": {"enum": ["http", "https"]}},
    interval=_DURATION,
    tlsConfig=_object({"ca": _object({"secret": _KEY}), "serverName": _TEXT}),
    authorization=_object({"type": _TEXT, "credentials": _KEY}),
)
_SPECS: Final = {
    ("cert-manager.io/v1", "Certificate"): _CERTIFICATE,
    ("cert-manager.io/v1", "Issuer"): {
        "oneOf": [
            _object({"selfSigned": _object({})}),
            _object({"ca": _object({"secretName": _TEXT})}),
        ]
    },
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _object(
        {
            "selector": _object({"matchLabels": {"type": "object"}}),
            "endpoints": _list(_ENDPOINT),
        },
        jobLabel=_TEXT,
    ),
}


def _trainer_model(name: str) -> Callable[[Manifest], Any]:
    model: Callable[[Manifest], Any] = getattr(trainer, name).from_dict
    return lambda manifest: model(manifest).to_dict()


def _workflow(manifest: Manifest) -> Manifest:
    read = argo.Workflow.model_validate(manifest)
    written: Manifest = read.model_dump(by_alias=True, exclude_unset=True, mode="json")
    return written


_MODELS: Final[dict[tuple[str, str], Callable[[Manifest], Any]]] = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _trainer_model("JobsetV1alpha2JobSet"),
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): _trainer_model(
        "TrainerV1alpha1ClusterTrainingRuntime"
    ),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): _trainer_model(
        "TrainerV1alpha1TrainJob"
    ),
    ("argoproj.io/v1alpha1", "Workflow"): _workflow,
}


def is_extension(manifest: Manifest) -> bool:
    """Whether Kubernetes itself does not have this kind."""
    kind = manifest["apiVersion"], manifest["kind"]
    return kind in _SPECS or kind in _MODELS


def check_shape(manifest: Manifest) -> None:
    """Checks a manifest of one of these kinds.

    Raises:
        jsonschema.ValidationError: It is not of that shape.
        ValueError: Its project's own model does not take it.
    """
    kind = manifest["apiVersion"], manifest["kind"]
    if kind in _SPECS:
        required = {"apiVersion": {}, "kind": {}, "metadata": _META}
        schema = _object({**required, "spec": _SPECS[kind]})
        jsonschema.validate(manifest, schema)
    else:
        assert _is_kept(manifest, _MODELS[kind](manifest)), "a field its model lacks"


def _is_kept(given: object, written: object) -> bool:
    """Whether all of it is there; a model may add what it takes by default."""
    if isinstance(given, dict) and isinstance(written, dict):
        return all(k in written and _is_kept(v, written[k]) for k, v in given.items())
    if isinstance(given, list) and isinstance(written, list):
        return len(given) == len(written) and all(map(_is_kept, given, written))
    return given == written
