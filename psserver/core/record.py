"""Membership, and the records that change it.

A record holds the whole membership, so that the newest one is all a process needs.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

NAME_CHARACTERS_SHOWN: Final = 64
"""Of a name that somebody else chose, in a text for people."""


class WorkerKey(NamedTuple):
    """One start of one worker."""

    worker_id: str
    incarnation: int

    def __str__(self) -> str:
        """For logs and texts; escaped if a terminal would do more than print it."""
        name = self.worker_id
        shown = name if name.isprintable() else ascii(name)
        return f"{shown[:NAME_CHARACTERS_SHOWN]}/{self.incarnation}"


class Mode(IntEnum):
    """How workers keep together; mirrors `pswire.v1.Mode`."""

    BSP = 1
    SSP = 2
    ASP = 3


class FenceKind(IntEnum):
    """What a fence is for; mirrors `pswire.v1.FenceKind`."""

    START = 1
    MEMBERSHIP = 2
    MODE = 3
    CUT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of a generation.

    Attributes:
        worker: Which start of which worker.
        rank: Dense index, as of joining.
        base_clock: Clock it joined at; its push `s` is of clock `base_clock + s`.
    """

    worker: WorkerKey
    rank: int
    base_clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A member that a record ends.

    Attributes:
        member: The member.
        last_clock: Its last clock that counts.
        evicted: Whether it was evicted rather than left.
    """

    member: Member
    last_clock: int
    evicted: bool

    @property
    def step_count(self) -> int:
        """Steps it adds to the version for ever."""
        return max(0, self.last_clock - self.member.base_clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a fence decided.

    Attributes:
        fence_number: Number of the fence.
        generation: Grows with every record.
        kind: What the fence was for.
        members: Members from now on.
        departures: Members that this record ends, and those of earlier records whose
            last clock was not complete on every shard.
        departed_step_count: Steps of all members that ever ended.
        skipped_clocks: Open clocks that every shard skips.
        mode: Mode from now on.
        staleness_bound: Staleness bound from now on, in clocks.
    """

    fence_number: int
    generation: int
    kind: FenceKind
    members: tuple[Member, ...]
    departures: tuple[Departure, ...] = ()
    departed_step_count: int = 0
    skipped_clocks: tuple[int, ...] = ()
    mode: Mode = Mode.BSP
    staleness_bound: int = 0

    def member_of(self, worker: WorkerKey) -> Member | None:
        """The member that is this start of this worker, if there is one."""
        return next((m for m in self.members if m.worker == worker), None)

    def version_at(self, clock: int) -> int:
        """Steps of all workers ever up to `clock`, in BSP.

        A departed member whose last clock is still ahead of `clock` counts with
        what it has in it, so that a version never runs ahead of its values.
        """
        ahead = sum(
            max(0, end.last_clock - max(clock, end.member.base_clock))
            for end in self.departures
        )
        present = sum(max(0, clock - m.base_clock) for m in self.members)
        return self.departed_step_count - ahead + present
