"""Torchrun's variables in the processes that it starts, and what others leave behind.

`RANK` and `WORLD_SIZE` stay in a shell, and are the same for all that is started from
there. They count where torchrun has started this process, or where `torch.distributed`
has made a group by them.
Source: https://pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

RUN_ID_VARIABLE: Final = "TORCHELASTIC_RUN_ID"
"""Set by torchrun alone, for each process that it starts."""

_COUNT_VARIABLES: Final = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
"""In which launchers set the number of processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunProcess:
    """One process of a torchrun group.

    Attributes:
        rank: Of 0 .. `process_count` - 1, over all machines of the group.
        process_count: Processes of the group, over all its machines.
    """

    rank: int
    process_count: int


def find_torchrun(environ: Mapping[str, str] | None = None) -> TorchrunProcess | None:
    """This process's place in a torchrun group; `None` outside of any."""
    variables = os.environ if environ is None else environ
    named = _named(variables)
    if named is None or not (variables.get(RUN_ID_VARIABLE) or _is_connected(*named)):
        return None
    rank, process_count = named
    return TorchrunProcess(rank=rank, process_count=process_count)


def rank_text(environ: Mapping[str, str] | None = None) -> str:
    """Whether the rank in the environment counts, for the log; empty without any."""
    variables = os.environ if environ is None else environ
    named = _named(variables)
    if named is None or named[1] == 1:
        return ""
    variables_text = f"RANK={named[0]} and WORLD_SIZE={named[1]}"
    if find_torchrun(environ) is not None:
        return f"this process is one of a group by {variables_text}, which name it"
    return (
        f"{variables_text} are in the environment and do not count: neither has "
        "torchrun started this process nor is torch.distributed set up; where another "
        "launcher has set them for it, name workers by PS_WORKER_ID=r$RANK"
    )


def count_text(environ: Mapping[str, str] | None = None) -> str:
    """Which variable says that this is one of several processes; empty if none does."""
    variables = os.environ if environ is None else environ
    for name in _COUNT_VARIABLES:
        value = variables.get(name, "")
        if _is_number(value) and int(value) > 1:
            return f"{name}={value}"
    return ""


def _named(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and number of processes, as the environment has them."""
    rank, count = (variables.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not (_is_number(rank) and _is_number(count)):
        return None
    return int(rank), int(count)


def _is_number(value: str) -> bool:
    """Whether it may number processes: Python refuses to read thousands of digits."""
    return value.isdecimal() and len(value) < 10


def _is_connected(rank: int, process_count: int) -> bool:
    """Whether `torch.distributed` has made a group in which this is that process."""
    dist = sys.modules.get("torch.distributed")  # else nobody has made any
    return (
        dist is not None
        and dist.is_available()
        and dist.is_initialized()
        and (dist.get_rank(), dist.get_world_size()) == (rank, process_count)
    )
