"""How much memory a shard may use, as it reports it. Pure."""

from typing import Final, NamedTuple


class MemoryGrant(NamedTuple):
    """Memory that a process may use.

    Attributes:
        byte_count: How much, 0 if it is not known.
        scope: Names the machine and control group: processes of one scope share it.
    """

    byte_count: int = 0
    scope: str = ""


NO_GRANT: Final = MemoryGrant()
