"""Classes of `torch.optim` behind the names in `pswire.optimizers`."""

from collections.abc import Sequence
from typing import Any, Final

import torch

from pswire.optimizers import SUPPORTED, check_supported, check_values
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, EntryKind, ModelSchema, OptimizerSpec

FUSED: Final = frozenset({"SGD", "Adam", "AdamW", "Adagrad"})
"""Classes with one kernel for a whole update on the CPU."""

_FUSED_TYPES: Final = frozenset({ElementType.FLOAT32, ElementType.FLOAT64})
"""Types whose fused update agrees with torch's default one. That of 16-bit types
rounds in other places."""


def make_optimizer(class_name: str, element_type: ElementType) -> torch.optim.Optimizer:
    """An optimizer of a supported class without parameters, for a CPU.

    Raises:
        Refusal: `OPTIMIZER_UNSUPPORTED`, also when this torch lacks the class.
    """
    check_supported(class_name)
    made: Any = getattr(torch.optim, class_name, None)
    if made is None:
        raise Refusal(
            ErrorReason.OPTIMIZER_UNSUPPORTED,
            f"the shard's torch {torch.__version__} has no optimizer {class_name}",
        )
    fused = class_name in FUSED and element_type in _FUSED_TYPES
    switches = {"fused": True} if fused else {"foreach": False}
    if class_name == "SparseAdam":
        switches = {}  # has one implementation
    optimizer: torch.optim.Optimizer = made([{"params": []}], **switches)
    return optimizer


def check_hyperparameters(
    spec: OptimizerSpec, hyperparameters: Sequence[Sequence[float]]
) -> None:
    """Checks the hyperparameters of all groups of a push.

    Raises:
        Refusal: `HYPERPARAMETER_INVALID` naming the group and value, or
            `OPTIMIZER_MISMATCH` for another number of groups.
    """
    if len(hyperparameters) != len(spec.groups):
        raise Refusal(
            ErrorReason.OPTIMIZER_MISMATCH,
            f"{spec.name!r} has {len(spec.groups)} parameter groups, the push names "
            f"{len(hyperparameters)}",
        )
    for group, values in zip(spec.groups, hyperparameters, strict=True):
        check_values(
            spec.class_name,
            spec.hyperparameter_names,
            values,
            declared=group.hyperparameters,
        )


def check_optimizer(spec: OptimizerSpec) -> None:
    """Checks that this shard's torch can run an optimizer as declared.

    Raises:
        Refusal: `OPTIMIZER_UNSUPPORTED` or `HYPERPARAMETER_INVALID`.
    """
    known = make_optimizer(spec.class_name, ElementType.FLOAT32).defaults
    check_hyperparameters(spec, [group.hyperparameters for group in spec.groups])
    for position, each in enumerate(SUPPORTED[spec.class_name].hyperparameters):
        if each.name.partition(".")[0] in known:
            continue
        for group in spec.groups:
            if group.hyperparameters[position] != each.neutral:
                raise Refusal(
                    ErrorReason.OPTIMIZER_UNSUPPORTED,
                    f"the shard's torch {torch.__version__} has no {each.name} of "
                    f"{spec.class_name}",
                )


def check_entries(schema: ModelSchema, spec: OptimizerSpec) -> None:
    """Checks that an optimizer updates only parameters that there are, of floats.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    for group in spec.groups:
        for entry_index in group.entry_indexes:
            if not 0 <= entry_index < len(schema.entries):
                raise Refusal(
                    ErrorReason.MALFORMED_MESSAGE,
                    f"{spec.name[:64]!r} names tensor {entry_index}, the model has "
                    f"{len(schema.entries)}",
                )
            entry = schema.entries[entry_index]
            if entry.kind is EntryKind.BUFFER or not entry.element_type.is_floating:
                raise Refusal(
                    ErrorReason.MALFORMED_MESSAGE,
                    f"{spec.name[:64]!r} updates {entry.name[:64]!r}, which is "
                    f"{entry.described}",
                )


def load_optimizers() -> None:
    """Has torch load what its first optimizer needs, more than a second of imports.

    For a daemon to call before it serves, so that no call waits for it.
    """
    make_optimizer("SGD", ElementType.FLOAT32)
