"""A job's terms and settings as JSON, for files that outlive its processes.

JSON and not protobuf, so that they can be read with a text editor.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pswire.aggregation import Aggregation
from pswire.compression import Compression
from pswire.job_settings import JobSettings
from pswire.job_terms import JobTerms
from pswire.membership import LabelledEnum
from pswire.object_marks import ObjectMark
from pswire.privacy import Privacy
from pswire.schema import (
    ElementType,
    EntryKind,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)


def _fields_of(
    value: SchemaEntry | ObjectMark | OptimizerSpec | ParameterGroup | Privacy,
) -> dict[str, Any]:
    # `asdict` copies each value: three times as long for a model of 200,000 tensors.
    return {each: getattr(value, each) for each in value.__slots__}


def dump_terms(terms: JobTerms) -> dict[str, Any]:
    return {
        "schema": {
            "entries": [_fields_of(entry) for entry in terms.schema.entries],
            "marks": [_fields_of(mark) for mark in terms.schema.marks],
        },
        "optimizers": [
            _fields_of(optimizer)
            | {"groups": [_fields_of(group) for group in optimizer.groups]}
            for optimizer in terms.optimizers
        ],
        "clip_grad_norm": terms.clip_grad_norm,
        "compression": str(terms.compression),
        "privacy": None if terms.privacy is None else _fields_of(terms.privacy),
        "strategy": terms.strategy,
    }


def load_terms(data: Mapping[str, Any]) -> JobTerms:
    """Reads what `dump_terms` wrote, as JSON returns it."""
    entries = tuple(
        SchemaEntry(
            model=entry["model"],
            name=entry["name"],
            shape=tuple(entry["shape"]),
            element_type=ElementType(entry["element_type"]),
            kind=EntryKind(entry["kind"]),
            tied_names=tuple(entry["tied_names"]),
            trainable=entry["trainable"],
        )
        for entry in data["schema"]["entries"]
    )
    optimizers = tuple(
        OptimizerSpec(
            name=optimizer["name"],
            class_name=optimizer["class_name"],
            hyperparameter_names=tuple(optimizer["hyperparameter_names"]),
            groups=tuple(
                ParameterGroup(
                    tuple(group["entry_indexes"]), tuple(group["hyperparameters"])
                )
                for group in optimizer["groups"]
            ),
            exchange_count=optimizer.get("exchange_count", 0),
            loss_is_sum=optimizer.get("loss_is_sum", False),
        )
        for optimizer in data["optimizers"]
    )
    # A file of an earlier release has no marks.
    marks = tuple(ObjectMark(**mark) for mark in data["schema"].get("marks", []))
    privacy = data.get("privacy")
    return JobTerms(
        schema=ModelSchema(entries, marks),
        optimizers=optimizers,
        clip_grad_norm=data.get("clip_grad_norm", 0.0),
        compression=Compression.parse(data.get("compression", "")),
        privacy=privacy
        and Privacy(**{**privacy, "epsilons": tuple(privacy["epsilons"])}),
        strategy=data.get("strategy", ""),
    )


def dump_settings(settings: JobSettings) -> dict[str, Any]:
    found = {each.name: getattr(settings, each.name) for each in fields(JobSettings)}
    return {name: _plain(value) for name, value in found.items()}


def load_settings(data: Mapping[str, Any]) -> JobSettings:
    """Reads what `dump_settings` wrote, as JSON returns it."""
    known = {each.name: each.default for each in fields(JobSettings)}
    return JobSettings(
        **{name: _as_default(value, known[name]) for name, value in data.items()}
    )


def _plain(value: object) -> object:
    if isinstance(value, LabelledEnum):
        return value.label
    return str(value) if isinstance(value, Aggregation) else value


def _as_default(value: Any, default: object) -> Any:  # noqa: ANN401, of any field
    if isinstance(default, LabelledEnum):
        return type(default).labelled(value)
    return Aggregation.parse(value) if isinstance(default, Aggregation) else value
