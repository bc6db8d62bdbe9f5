"""When a clock of mode quorum closes, as shard 0 decides it.

A clock is one merge. It closes when so many have pushed for it as the quorum says, or
as many as have data, and its grace window is over: at once when nobody is left who
could still come. The window ends before the first of those that came would notice
that its answer is missing. The last push of a worker without further data is waited
for, within a limit. Pure: times come with what is told.
Source: Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training",
arXiv 2604.21428, 2026, whose syncer does this for each fragment.
"""

from collections.abc import Collection
from typing import Final, NamedTuple

from psserver.shard.core.push import PushId
from pswire.membership import ModeTerms

LAST_PUSH_WAIT_MS: Final = 120_000
"""How long clocks wait for the last push of a worker that has no data for another one:
at 50 Mbit/s it brings 750 MB. Its round would be lost else, and merges that are quicker
than its link would leave it out for ever. As much time has to pass before they wait as
long for it again: one that calls each push its last takes half of the time at most."""


class Arrival(NamedTuple):
    """A push for a clock of which every shard holds all, and which has weight.

    Attributes:
        push: Which one.
        weight: What it counts.
        at_ms: Since when every shard holds it.
        slack_ms: How long after that its worker would notice that the answer is
            missing; None if it has not said.
    """

    push: PushId
    weight: float
    at_ms: int
    slack_ms: int | None = None


class Merge(NamedTuple):
    """How a clock was closed, for the history.

    Attributes:
        clock: The clock.
        quorum: Pushes that close a clock.
        needed_count: Of these as many as had data to push.
        active_count: Workers that had.
        window_ms: How much longer it waits for more, at most.
        closed_ms: When it was closed.
        arrivals: Those that it consists of, but for pushes without weight.
    """

    clock: int
    quorum: int
    needed_count: int
    active_count: int
    window_ms: int
    closed_ms: int
    arrivals: tuple[Arrival, ...]


def needed_of(terms: ModeTerms, active_count: int) -> int:
    """Pushes that a clock needs: the last worker that has data needs no other."""
    return max(1, min(terms.quorum, active_count))


def closes_at_ms(
    terms: ModeTerms, arrivals: Collection[Arrival], active_count: int
) -> int | None:
    """When a clock closes, as far as is known.

    Args:
        terms: The quorum and its window.
        arrivals: Pushes with weight that are there.
        active_count: Workers that have pushed for it with weight, or still may.

    Returns:
        None while too few are there.
    """
    times = sorted(arrival.at_ms for arrival in arrivals)
    needed = needed_of(terms, active_count)
    if len(times) < needed:
        return None
    quorum_ms = times[needed - 1]
    if len(times) >= active_count:
        return times[-1]
    noticed = (a.at_ms + a.slack_ms for a in arrivals if a.slack_ms is not None)
    window_ms = quorum_ms + terms.grace_window_ms
    return max(quorum_ms, min((window_ms, *noticed)))
