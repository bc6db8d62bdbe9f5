"""How many pushes a shard takes in a second, beside calls that do nothing."""

from typing import Final

from psctl.bench.workload import Entry, Ground, Workload, rate_at_least
from psctl.bench.workloads.small_model import (
    empty_calls,
    small_steps,
    start_small,
)

_WORKER_COUNT: Final = 4


def _start(ground: Ground) -> dict[str, str]:
    return start_small(ground, worker_count=_WORKER_COUNT, mode="asp")


RATE: Final = Workload(
    name="rate",
    about_s=20,
    title="pushes in ASP of a model of 10,000 parameters, 4 worker processes, 1 shard",
    entries=(
        Entry("pushes", "optimizer.step() of prepared optimizers", small_steps),
        Entry("empty_calls", "blocking health checks of the same server", empty_calls),
    ),
    targets=(rate_at_least("pushes", 0.8, "empty_calls"),),
    start=_start,
    member_count=_WORKER_COUNT,
    thread_count=1,
)
