"""What torchrun tells the processes that it starts.

Source: https://pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunProcess:
    """One process of a torchrun group.

    Attributes:
        rank: Of 0 .. `process_count` - 1, over all machines of the group.
        process_count: Processes of the group, over all its machines.
        restart_count: How often torchrun has started the whole group again.
    """

    rank: int
    process_count: int
    restart_count: int = 0


def find_torchrun(environ: Mapping[str, str] | None = None) -> TorchrunProcess | None:
    """This process's place in a torchrun group; `None` outside of any."""
    variables = os.environ if environ is None else environ
    numbers = [variables.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    if not all(number.isdecimal() for number in numbers):
        return None
    rank, process_count = map(int, numbers)
    restarts = variables.get("TORCHELASTIC_RESTART_COUNT", "")
    return TorchrunProcess(
        rank=rank,
        process_count=process_count,
        restart_count=int(restarts) if restarts.isdecimal() else 0,
    )
