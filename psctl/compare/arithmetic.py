"""What the modes must give when nothing but the workers' own steps takes time.

Times are in undisturbed steps. Pure. `docs/modes.md` derives the closed forms.
"""

import heapq
import math
from collections.abc import Iterator, Sequence

from psctl.compare.loads import (
    HICCUP_FACTOR,
    HICCUP_PROBABILITY,
    STRAGGLER_FACTOR,
    Load,
    step_factors,
)
from psctl.compare.modes import ComparedMode


def rate_limit(mode: ComparedMode, load: Load, worker_count: int) -> float:
    """Most gradients in updates for each undisturbed step, in the long run.

    Exact for BSP and ASP under any load, and for all modes under a straggler. Under
    hiccups a bound or backup workers can only come close to it.
    """
    if load is Load.EVEN:
        cost, slowest = 1.0, 1.0
    elif load is Load.HICCUPS:
        cost = 1 + (HICCUP_FACTOR - 1) * HICCUP_PROBABILITY
        slowest = cost
    else:
        cost, slowest = 1.0, STRAGGLER_FACTOR
    if mode.is_synchronous:
        return mode.gradients_per_update(worker_count) / _clock_cost(
            load, worker_count, mode.backup_worker_count
        )
    if mode.mode == "ssp":
        # Everybody is at most a few clocks ahead of the slowest, so has its pace.
        return worker_count / slowest
    return (worker_count - 1) / cost + 1 / slowest


def _clock_cost(load: Load, worker_count: int, backup_worker_count: int) -> float:
    """A clock that waits for all but the slowest `backup_worker_count`."""
    if load is Load.EVEN:
        return 1.0
    if load is Load.STRAGGLER:
        return 1.0 if backup_worker_count else STRAGGLER_FACTOR
    probability = HICCUP_PROBABILITY
    few_enough = sum(
        math.comb(worker_count, count)
        * probability**count
        * (1 - probability) ** (worker_count - count)
        for count in range(backup_worker_count + 1)
    )
    return 1 + (HICCUP_FACTOR - 1) * (1 - few_enough)


def ideal_duration(
    mode: ComparedMode,
    load: Load,
    *,
    worker_count: int,
    gradient_count: int,
    seed: int,
) -> float:
    """When so many gradients are in updates, with the very delays that are drawn."""
    factors = [
        step_factors(load, worker_index=index, worker_count=worker_count, seed=seed)
        for index in range(worker_count)
    ]
    if mode.is_synchronous:
        needed = mode.gradients_per_update(worker_count)
        return _synchronous_duration(factors, needed, gradient_count)
    bound = mode.staleness_bound if mode.mode == "ssp" else math.inf
    return _asynchronous_duration(factors, bound, gradient_count)


def _synchronous_duration(
    factors: Sequence[Iterator[float]], needed: int, gradient_count: int
) -> float:
    """A clock closes with its first `needed` gradients; later ones are dropped."""
    closed = 0
    clocks = [1] * len(factors)
    staged: list[int] = []
    ends = [(next(drawn), index) for index, drawn in enumerate(factors)]
    heapq.heapify(ends)
    while True:
        now, index = heapq.heappop(ends)
        if clocks[index] > closed:
            staged.append(index)
            if len(staged) < needed:
                continue
            closed += 1
            if closed * needed >= gradient_count:
                return now
            free, staged = staged, []
        else:
            free = [index]
        for each in free:
            clocks[each] = closed + 1
            heapq.heappush(ends, (now + next(factors[each]), each))


def _asynchronous_duration(
    factors: Sequence[Iterator[float]], bound: float, gradient_count: int
) -> float:
    """Who is more than `bound` clocks ahead of the slowest waits for it."""
    clocks = [0] * len(factors)
    waiting: set[int] = set()
    ends = [(next(drawn), index) for index, drawn in enumerate(factors)]
    heapq.heapify(ends)
    while True:
        now, index = heapq.heappop(ends)
        clocks[index] += 1
        if sum(clocks) >= gradient_count:
            return now
        waiting.add(index)
        free = {each for each in waiting if clocks[each] - min(clocks) <= bound}
        waiting -= free
        for each in sorted(free):
            heapq.heappush(ends, (now + next(factors[each]), each))
