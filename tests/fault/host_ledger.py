"""Whether the values of a job are what the processes of a host group were told.

Each step of the group adds 1 to the sum over all slots, shared out among those whose
gradients it holds: a step that is lost or doubled, and one that counts a gradient that
it should not, show in the values alone.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from tests.doubles.children import Child
from tests.fault.ledger import TOLERANCE

COUNTED = ("applied", "duplicate")


def check_values(
    values: Sequence[torch.Tensor], workers: Mapping[str, Child], clock_count: int
) -> None:
    """Fails unless the values hold every step once, of those who were told so.

    Args:
        values: The job's tensors at its end.
        workers: All processes that ever were in the group, the job's only worker.
        clock_count: Steps that the job has done.
    """
    told: dict[int, list[int]] = defaultdict(list)
    unsure: set[int] = set()
    for worker in workers.values():
        steps = worker.events("step")
        for step in steps:
            if step["outcome"] in COUNTED and not step["rejoined"]:
                told[step["clock"]].append(step["slot"])
            else:
                unsure.add(step["slot"])
        unsure |= {e["slot"] for e in worker.events("begins")[len(steps) :]}
    assert sorted(told) == list(range(1, clock_count + 1)), "a step that nobody made"
    low: dict[int, float] = defaultdict(float)
    high: dict[int, float] = defaultdict(float)
    for slots in told.values():
        for slot in slots:
            high[slot] += 1 / len(slots)
            low[slot] += 1 / (len(slots) + len(unsure))
    for tensor in values:
        found = tensor.double()
        assert abs(float(found.sum()) - clock_count) < TOLERANCE, "lost or doubled"
        for slot in range(len(found)):
            if slot not in unsure:
                assert low[slot] - TOLERANCE <= float(found[slot])
                assert float(found[slot]) <= high[slot] + TOLERANCE
