"""The norm of a clock's mean gradient, for a job that clips by the global norm.

The owner computes; here is decided of what. What was measured is of one set of
contributors: when a record changes them, it is measured anew.
"""

from psserver.edge.record import ClockChoice, Member, WorkerKey
from psserver.shard.core.dedupe import PushEntry
from psserver.shard.core.effects import MeasureClock
from psserver.shard.core.hyperparameters import source_of
from psserver.shard.core.release import (
    contributions_to,
    kind_of_mixed,
    of_kind,
    trailers_of,
)
from psserver.shard.core.shard_state import ShardState
from pswire.clipping import gradient_scale, norm_of
from pswire.reasons import ErrorReason, Refusal


class ClockMeasure:
    """What the mean gradient of the clock that is worked on measures on this shard."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._ordered: ClockChoice | None = None
        self._known: ClockChoice | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the owner is measuring."""
        return self._ordered is not None

    def of(
        self, choice: ClockChoice, entries: dict[WorkerKey, PushEntry]
    ) -> ClockChoice | None:
        """A choice with the sum of squares of this shard's part.

        Of a clock that will be skipped it is 0, without asking the owner.

        Args:
            choice: A clock with its contributors.
            entries: Their pushes, which are complete.

        Returns:
            None while it is not known; then it is ordered, once.
        """
        known = self.known(choice)
        if known is not None or self._ordered == choice:
            return known
        chosen = {worker: entries[worker] for worker in choice.workers}
        if not all(trailer.finite for trailer in trailers_of(chosen).values()):
            self._known = choice._replace(sum_of_squares=0.0)
            return self._known
        self._ordered = choice
        members = self._state.clocks.contributors(choice.clock)
        self._state.effects.append(_order(choice, members, chosen))
        return None

    def known(self, choice: ClockChoice) -> ClockChoice | None:
        """What was measured of these contributors to this clock."""
        known = self._known
        return known if known is not None and known[:2] == choice[:2] else None

    def note(self, choice: ClockChoice, sum_of_squares: float) -> None:
        """The owner has measured; of other contributors than now it says nothing."""
        if self._ordered == choice:
            self._ordered = None
            self._known = choice._replace(sum_of_squares=sum_of_squares)

    def admits_commit(self, choice: ClockChoice) -> bool:
        """Whether the contributors of a commit are those that were measured.

        Raises:
            Refusal: `MALFORMED_MESSAGE` for a scale that does not follow from the norm;
                no state changed.
        """
        norm = norm_of(choice.sum_of_squares)
        limit = self._state.rules.clip_grad_norm
        expected = gradient_scale(norm, limit)
        if choice.gradient_scale != expected:
            clipping = (
                f"clipped to {limit}" if limit else "which this job does not clip"
            )
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"a commit of clock {choice.clock} says gradient scale "
                f"{choice.gradient_scale}: the norm {norm} that it names, {clipping}, "
                f"makes {expected}",
            )
        measured = self.known(choice) if limit else choice
        if measured is None:
            return False
        if choice.sum_of_squares < measured.sum_of_squares:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"a commit of clock {choice.clock} says that the gradient's norm is "
                f"{norm}: the part on this shard alone has "
                f"{norm_of(measured.sum_of_squares)}",
            )
        return True


def check_repeated(known: ClockChoice | None, choice: ClockChoice) -> None:
    """Refuses another scale for what is committed already.

    Drivers have the same sums from the same shards, so that none is honest.

    Raises:
        Refusal: `MALFORMED_MESSAGE`; no state changed.
    """
    if known is None or known[:2] != choice[:2]:
        return
    if choice.is_scaled and known.gradient_scale != choice.gradient_scale:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"a commit of clock {choice.clock} says gradient scale "
            f"{choice.gradient_scale}: it is committed with {known.gradient_scale}",
        )


def _order(
    choice: ClockChoice,
    contributors: tuple[Member, ...],
    chosen: dict[WorkerKey, PushEntry],
) -> MeasureClock:
    chosen = of_kind(chosen, kind_of_mixed(contributors, chosen))
    trailers = trailers_of(chosen)
    members = tuple(member for member in contributors if member.worker in chosen)
    source = trailers[source_of(members, trailers)]
    indexes = {index for entry in chosen.values() for index in entry.staged}
    parts = ((index, contributions_to(index, chosen)) for index in sorted(indexes))
    return MeasureClock(
        choice=choice,
        chunks=tuple(part for part in parts if part[1]),
        total_weight=sum(trailer.weight for trailer in trailers.values()),
        optimizer=source.optimizer,
        spec_digest=source.spec_digest,
    )
