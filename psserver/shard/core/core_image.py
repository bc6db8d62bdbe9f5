"""What of a shard's protocol is in a checkpoint, as JSON. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from psserver.edge.fence_report import WorkerHolding, newest_ranges
from psserver.shard.core.clock_table import ClockTable
from psserver.shard.core.member_on_shard import MembersOnShard
from psserver.shard.core.push import PushWindow, Trailer
from pswire.checkpoint.errors import UNREADABLE
from pswire.leased_data import DataRange
from pswire.membership import Outcome, WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowImage:
    """Pushes of a worker that are in a cut.

    Attributes:
        worker: Whose they are.
        done_sequence: The last of them.
        outcomes: What became of those whose answers the worker may lack.
        ranges: Data of them, oldest first, as `PushWindow` keeps it.
    """

    worker: WorkerKey
    done_sequence: int
    outcomes: tuple[tuple[int, Outcome], ...] = ()
    ranges: tuple[tuple[int, DataRange], ...] = ()

    @classmethod
    def of(cls, window: PushWindow) -> Self:
        """Pushes that are done: what is staged of a next one is not in the cut."""
        return cls(
            worker=window.worker,
            done_sequence=window.done_sequence,
            outcomes=tuple(
                (sequence, entry.outcome)
                for sequence, entry in window.entries.items()
                if entry.outcome is not None
            ),
            ranges=tuple(window.ranges),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreImage:
    """A shard's protocol as of a cut.

    Attributes:
        version: Steps of all workers ever that are in the values.
        applied_clock: As in `ClockTable`.
        frontier: Smallest clock over the members.
        windows: Pushes of each member.
        used: By optimizer the settings of its newest update: hyperparameters, steps of
            schedulers, and the declaration that these are of.
        paces: As in `ShardState`.
    """

    version: int
    applied_clock: int
    frontier: int
    windows: tuple[WindowImage, ...]
    used: Mapping[str, Trailer]
    paces: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        clocks: ClockTable,
        on_shard: MembersOnShard,
        used: Mapping[str, Trailer],
        paces: Mapping[str, tuple[int, ...]],
    ) -> Self:
        """As a shard stands now."""
        return cls(
            version=clocks.version,
            applied_clock=clocks.applied_clock,
            frontier=clocks.frontier,
            windows=tuple(
                WindowImage.of(on_shard.window_of(member.worker))
                for member in clocks.members
            ),
            used={
                name: Trailer(
                    optimizer=name,
                    weight=0.0,
                    hyperparameters=trailer.hyperparameters,
                    scheduler_steps=trailer.scheduler_steps,
                    spec_digest=trailer.spec_digest,
                )
                for name, trailer in used.items()
            },
            paces=dict(paces),
        )

    @property
    def holdings(self) -> tuple[WorkerHolding, ...]:
        """What is reported of the members, with their newest ranges."""
        return tuple(
            WorkerHolding(
                worker=window.worker,
                complete_sequence=window.done_sequence,
                trailer_sequence=window.done_sequence,
                touched_sequence=window.done_sequence,
                ranges=newest_ranges(window.ranges, len(self.windows)),
            )
            for window in self.windows
        )

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": self.version,
                "applied_clock": self.applied_clock,
                "frontier": self.frontier,
                "windows": [
                    {
                        "worker": window.worker,
                        "done_sequence": window.done_sequence,
                        "outcomes": window.outcomes,
                        "ranges": window.ranges,
                    }
                    for window in self.windows
                ],
                "used": {
                    name: {
                        "hyperparameters": trailer.hyperparameters,
                        "scheduler_steps": trailer.scheduler_steps,
                        "spec_digest": trailer.spec_digest,
                    }
                    for name, trailer in self.used.items()
                },
                "paces": self.paces,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: It is something else.
        """
        try:
            data = json.loads(text)
            return cls(
                version=int(data["version"]),
                applied_clock=int(data["applied_clock"]),
                frontier=int(data["frontier"]),
                windows=tuple(_window(each) for each in data["windows"]),
                used={name: _used(name, each) for name, each in data["used"].items()},
                paces={
                    name: tuple(int(pace) for pace in paces)
                    for name, paces in data["paces"].items()
                },
            )
        except UNREADABLE as error:
            problem = f"{type(error).__name__} {error}"
            raise ValueError(f"no state of a shard's protocol: {problem:.96}") from None


def _window(data: dict[str, Any]) -> WindowImage:
    worker_id, incarnation = data["worker"]
    return WindowImage(
        worker=WorkerKey(str(worker_id), int(incarnation)),
        done_sequence=int(data["done_sequence"]),
        outcomes=tuple(
            (int(sequence), Outcome(outcome)) for sequence, outcome in data["outcomes"]
        ),
        ranges=tuple(
            (int(sequence), DataRange(str(loader), int(epoch), int(start), int(stop)))
            for sequence, (loader, epoch, start, stop) in data["ranges"]
        ),
    )


def _used(optimizer: str, data: dict[str, Any]) -> Trailer:
    return Trailer(
        optimizer=optimizer,
        weight=0.0,
        hyperparameters=tuple(
            tuple(float(value) for value in group) for group in data["hyperparameters"]
        ),
        scheduler_steps=tuple(int(steps) for steps in data["scheduler_steps"]),
        spec_digest=str(data["spec_digest"]),
    )
