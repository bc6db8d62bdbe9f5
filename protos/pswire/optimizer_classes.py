"""The classes behind the names of `pswire.optimizers`, on both sides alike.

Those of `torch.optim` are looked up there; those that this project adds are the table
below. A name on the wire chooses among them, and nothing else is ever loaded.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from pswire.delayed_nesterov import DelayedNesterov

OWN: Final[Mapping[str, type[torch.optim.Optimizer]]] = MappingProxyType(
    {"DelayedNesterov": DelayedNesterov}
)
"""Classes that torch does not have. Each has one implementation, and no `foreach`."""


def class_named(class_name: str) -> Any:  # noqa: ANN401
    """The class of this name, or None if this torch lacks it."""
    return OWN.get(class_name) or getattr(torch.optim, class_name, None)
