"""A step of a small model, beside a call that does nothing."""

from typing import Final

from psctl.bench.workload import Entry, Ground, Workload, time_at_most
from psctl.bench.workloads.small_model import (
    empty_calls,
    empty_loop_calls,
    small_steps,
    start_small,
)


def _start(ground: Ground) -> dict[str, str]:
    return start_small(ground, worker_count=1, mode="bsp")


SMALL: Final = Workload(
    name="small",
    about_s=10,
    title="BSP step of a model of 10,000 parameters, 1 worker, 1 shard",
    entries=(
        Entry("step", "optimizer.step() of a prepared optimizer", small_steps),
        Entry("empty_call", "blocking health check of the same server", empty_calls),
        Entry(
            "empty_loop_call",
            "the same from psworker's event loop, which the caller waits for",
            empty_loop_calls,
        ),
    ),
    targets=(time_at_most("step", 3.0, "empty_call"),),
    start=_start,
)
