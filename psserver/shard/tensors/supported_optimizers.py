"""Makes the optimizers that a shard runs, with the kernels that suit it."""

from typing import Final

import torch

from pswire.optimizer_classes import OWN, class_named
from pswire.optimizers import check_supported
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType

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
    made = class_named(class_name)
    if made is None:
        raise Refusal(
            ErrorReason.OPTIMIZER_UNSUPPORTED,
            f"the shard's torch {torch.__version__} has no optimizer {class_name}",
        )
    fused = class_name in FUSED and element_type in _FUSED_TYPES
    switches = {"fused": True} if fused else {"foreach": False}
    if class_name == "SparseAdam" or class_name in OWN:
        switches = {}  # has one implementation
    optimizer: torch.optim.Optimizer = made([{"params": []}], **switches)
    return optimizer


def load_optimizers() -> None:
    """Has torch load what its first optimizer needs, more than a second of imports.

    For a daemon to call before it serves, so that no call waits for it.
    """
    make_optimizer("SGD", ElementType.FLOAT32)
