"""All readers of bytes from outside, in one table."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from psserver.shard.tensors.supported_optimizers import load_optimizers
from psworker.data.split_rules import library
from tests.fuzz.files import FILES
from tests.fuzz.local import LOCAL
from tests.fuzz.target import Target
from tests.fuzz.wire import WIRE

TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {target.name: target for target in (*WIRE, *FILES, *LOCAL)}
)
"""By name, in the order in which they run."""


def load() -> None:
    """Imports what readers import when they first need it: it would be counted."""
    load_optimizers()
    library("folds=")
