"""`--kill ROLE-INDEX@STEP`: which process of the demo dies, and when. Pure."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

EXAMPLES: Final = (
    "--kill worker-1@40 (the second worker, in its 40th step), --kill coordinator@40 "
    "or --kill shard-0@40 (when the job reaches step 40)"
)

_TEXT: Final = re.compile(r"(?P<role>[a-z]+)(-(?P<index>\d{1,4}))?@(?P<step>\d{1,9})")


class Role(StrEnum):
    """Roles of processes."""

    WORKER = "worker"
    COORDINATOR = "coordinator"
    SHARD = "shard"


@dataclass(frozen=True, slots=True)
class Kill:
    """A process to kill.

    Attributes:
        role: What it is.
        index: Which one, from 0.
        step: A worker dies in this step of its own, any other process when the job
            has reached it.
    """

    role: Role
    index: int
    step: int

    @property
    def process_name(self) -> str:
        """Name of the process among the demo's children."""
        if self.role is Role.WORKER:
            return worker_name(self.index)
        return "coordinator" if self.role is Role.COORDINATOR else f"shard {self.index}"


def worker_name(index: int) -> str:
    """Id of a worker of the demo."""
    return f"w{index}"


def parse_kill(text: str, *, worker_count: int, shard_count: int) -> Kill:
    """Reads the option.

    Raises:
        ValueError: It says nothing that could be done; the text has examples.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None or found["role"] not in list(Role):
        raise ValueError(f"{text!r} is not ROLE-INDEX@STEP; {EXAMPLES}")
    role, step = Role(found["role"]), int(found["step"])
    if found["index"] is None and role is not Role.COORDINATOR:
        raise ValueError(f"{text!r} does not say which {role}; {EXAMPLES}")
    index = int(found["index"] or 0)
    count = {Role.WORKER: worker_count, Role.SHARD: shard_count, Role.COORDINATOR: 1}
    if index >= count[role]:
        raise ValueError(
            f"there is no {role}-{index}: of {count[role]} the last one is "
            f"{role}-{count[role] - 1}"
        )
    if step < 1:
        raise ValueError(f"{text!r}: steps count from 1; {EXAMPLES}")
    if role is Role.WORKER and worker_count == 1:
        raise ValueError(
            "with one worker nobody is left to go on without it: say --workers 2 or "
            "more"
        )
    return Kill(role, index, step)
