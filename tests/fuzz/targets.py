"""All readers of bytes from outside, in one table."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tests.fuzz.files import FILES
from tests.fuzz.local import LOCAL
from tests.fuzz.target import Target
from tests.fuzz.wire import WIRE

TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {target.name: target for target in (*WIRE, *FILES, *LOCAL)}
)
"""By name, in the order in which they run."""
