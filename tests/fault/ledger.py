"""Whether the values of a job are what its workers were told of their pushes.

Every push has a slot of its own for a while, see `training.py`: the slot holds the sum
of the shares that its pushes had in their clocks. What the histories say is only used
for how many contributors a clock had; that a push counts is read from the values.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tests.doubles.children import Child

TOLERANCE: Final = 1e-4

Shares = Mapping[tuple[str, int], tuple[float, float]]


@dataclass
class Slot:
    """What a slot may hold.

    Attributes:
        low: If nothing of unknown pushes counts.
        high: If all of them do.
    """

    low: float = 0.0
    high: float = 0.0


def check_values(
    values: Sequence[torch.Tensor],
    workers: Mapping[str, Child],
    history: Path,
    *,
    torn: int,
) -> None:
    """Fails unless every slot holds its pushes, once each, in every tensor.

    Args:
        values: The job's tensors at its end.
        workers: All worker processes, in the order of their positions.
        history: Folder of the histories.
        torn: Pushes of evicted workers of which a part may be there.
    """
    slots = expected_slots(workers, shares_of(history))
    whole = torch.stack([tensor.double() for tensor in values])
    for index in range(whole.shape[1]):
        slot = slots.get(index, Slot())
        found = whole[:, index]
        low, high = float(found.min()), float(found.max())
        assert slot.low - TOLERANCE <= high, f"slot {index}: {high} < {slot.low}, lost"
        assert low <= slot.high + TOLERANCE, f"slot {index}: {low} > {slot.high}, twice"
        if not torn:
            assert slot.low - TOLERANCE <= low, f"slot {index}: {low} < {slot.low}"
            assert high <= slot.high + TOLERANCE, f"slot {index}: {high} > {slot.high}"
            assert high - low <= TOLERANCE, f"slot {index} differs: {found.tolist()}"


def shares_of(history: Path) -> Shares:
    """Of each worker and clock, the smallest and largest share a push had in it."""
    shares: dict[tuple[str, int], tuple[float, float]] = {}
    for path in history.glob("shard-*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if line["type"] != "applied":
                continue
            share = 1 / len(line["pushes"])
            for worker_id, _, _ in line["pushes"]:
                key = (worker_id, line["clock"])
                low, high = shares.get(key, (share, share))
                shares[key] = (min(low, share), max(high, share))
    return shares


def expected_slots(workers: Mapping[str, Child], shares: Shares) -> dict[int, Slot]:
    """What each slot may hold, by what workers were told."""
    slots: dict[int, Slot] = {}
    for worker in workers.values():
        joined = worker.events("joined")
        steps = worker.events("step")
        for step in steps:
            slot = slots.setdefault(step["slot"], Slot())
            if step["outcome"] in ("dropped", "skipped"):
                continue
            key = (joined[0]["worker_id"], step["clock"])
            # A worker that was evicted and is back is told another clock.
            low, high = (
                shares.get(key, (0.0, 1.0)) if not step["rejoined"] else (0.0, 1.0)
            )
            slot.low += low
            slot.high += high
        begun = worker.events("begins")
        for begins in begun[len(steps) :]:
            slots.setdefault(begins["slot"], Slot()).high += 1.0
    return slots
