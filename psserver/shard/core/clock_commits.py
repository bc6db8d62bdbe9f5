"""Two-phase steps of BSP: who has heard `staged`, who is chosen, what is committed.

A clock is committed by its contributors, once every shard holds all of it; see
`docs/decisions/0006-two-phase-steps.md`. When the job clips, `staged` comes with the
sum of squares of the shard's part of the mean gradient, and the commit with the scale
that follows from all of them.
"""

from psserver.shard.core.apply_orders import (
    contributions_to,
    kind_of_mixed,
    of_kind,
    source_of,
    trailers_of,
)
from psserver.shard.core.dedupe import PushEntry
from psserver.shard.core.effects import MeasureClock, Staged
from psserver.shard.core.push import PushId
from psserver.shard.core.shard_state import ShardState
from pswire.clipping import gradient_scale, norm_of
from pswire.membership import ClockChoice, Member, WorkerKey
from pswire.reasons import ErrorReason, Refusal

Contributions = dict[WorkerKey, PushEntry]


class ClockCommits:
    """Commits of the clock that is worked on.

    Attributes:
        chosen: On shard 0 with backup workers, the newest choice.
        measure: When the job clips, the norm of the clock.
        standing: When the job clips and has backup workers, the newest choice that a
            driver or a record has named, to be measured.
    """

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._ready_count = 0
        self.chosen: ClockChoice | None = None
        self.measure = ClockMeasure(state)
        self.standing: ClockChoice | None = None

    def committed(self, clock: int) -> ClockChoice | None:
        """What a clock consists of, if it is committed."""
        known = self._state.committed
        return known if known is not None and known.clock == clock else None

    def settle(
        self, clock: int, contributors: tuple[Member, ...], entries: Contributions
    ) -> ClockChoice | None:
        """Finds what a clock consists of, or sends `staged` to whom it concerns.

        Args:
            clock: The next clock.
            contributors: Its contributors.
            entries: Those of their pushes of which anything is here.

        Returns:
            The commit, None while there is none.
        """
        complete = [
            member.worker
            for member in contributors
            if member.worker in entries and entries[member.worker].is_complete
        ]
        known = self.committed(clock)
        if known is not None:
            return known
        members = [m for m in contributors if self._state.clocks.member_of(m.worker)]
        is_clipped = self._state.rules.is_clipped
        if contributors and not members and not is_clipped:
            # All have ended, and of those that have every shard holds all: there is
            # nobody to drive the commit, and nothing left that could differ. When the
            # job clips the scale could: a record has it, by the sums of all shards.
            self._state.committed = ClockChoice(clock, tuple(complete))
            return self._state.committed
        if self._state.rules.has_backups:
            if contributors and not members:
                self.stand(ClockChoice(clock, tuple(complete)))
            self._choose(clock, contributors, entries)
            self._send_own(clock, contributors, entries)
        elif len(complete) == len(contributors):
            choice = ClockChoice(clock, tuple(complete))
            named = self.measure.of(choice, entries) if is_clipped else choice
            if named is not None and members:
                for worker in complete:
                    self._send_staged(worker, contributors, named)
        return None

    def measured(
        self, clock: int, contributors: tuple[Member, ...]
    ) -> ClockChoice | None:
        """The sum of squares of a clock as it consists now, if it is known."""
        choice = ClockChoice(clock, tuple(member.worker for member in contributors))
        if self._state.rules.has_backups:
            standing = self._standing(clock)
            return None if standing is None else self.measure.known(standing)
        return self.measure.known(choice)

    def stand(self, choice: ClockChoice) -> None:
        """Whose pushes a clock consists of is certain; its scale is to follow."""
        if self._standing(choice.clock) is None:
            self.standing = choice._replace(gradient_scale=0.0)

    def send_again(self, worker: WorkerKey) -> None:
        """The worker's call is a new one: it may not have heard."""
        self._state.of(worker).staged = None

    def commit(self, choice: ClockChoice, contributors: tuple[Member, ...]) -> bool:
        """A driver says that every shard holds all of the next clock.

        Returns:
            Whether it is committed; False when its contributors are others.

        Raises:
            Refusal: `MALFORMED_MESSAGE` for a scale that can't be; no state changed.
        """
        known = self.committed(choice.clock)
        if known is not None:
            check_repeated(known, choice)
            return True
        own = tuple(member.worker for member in contributors)
        if self._state.rules.has_backups:
            is_right = bool(choice.workers) and set(choice.workers) <= set(own)
            is_right = is_right and all(
                self._is_complete(member, choice.clock)
                for member in contributors
                if member.worker in choice.workers
            )
        else:
            is_right = choice.workers == own and all(
                self._is_complete(member, choice.clock) for member in contributors
            )
        rules = self._state.rules
        if is_right and not choice.is_scaled and rules.is_clipped and rules.has_backups:
            self.stand(choice)
            return False
        if not (choice.is_scaled or rules.is_clipped):
            choice = choice._replace(gradient_scale=1.0)
        if is_right and self.measure.admits_commit(choice):
            self._state.committed = choice
            return True
        for each in self._state.on_shard:
            each.staged = None
        return False

    def note_ready(self, worker: WorkerKey, sequence: int) -> None:
        """Every shard holds all of a worker's push, as the worker says."""
        known = self._state.of(worker)
        if known.ready[0] < sequence:
            self._ready_count += 1
            known.ready = sequence, self._ready_count

    # Inside

    def _standing(self, clock: int) -> ClockChoice | None:
        known = self.standing
        return known if known is not None and known.clock == clock else None

    def _send_own(
        self, clock: int, contributors: tuple[Member, ...], entries: Contributions
    ) -> None:
        """With backup workers: each hears that its push is complete.

        When the job clips, those that were chosen hear in its place what the clock
        measures, once that is known.
        """
        standing = self._standing(clock)
        if standing is not None:
            standing = self.measure.of(standing, entries)
        for member in contributors:
            worker = member.worker
            entry = entries.get(worker)
            if entry is None or not entry.is_complete:
                continue
            is_chosen = standing is not None and worker in standing.workers
            if is_chosen and standing is not None:
                self._send_staged(worker, contributors, standing)
            else:
                self._send_staged(worker, contributors, ClockChoice(clock, ()))

    def _send_staged(
        self,
        worker: WorkerKey,
        contributors: tuple[Member, ...],
        choice: ClockChoice,
    ) -> None:
        known = self._state.of(worker)
        if known.staged == choice:
            return
        known.staged = choice
        member = next(m for m in contributors if m.worker == worker)
        push = PushId(worker, member.sequence_of(choice.clock))
        self._state.effects.append(Staged(push=push, choice=choice))

    def _is_complete(self, member: Member, clock: int) -> bool:
        push = PushId(member.worker, member.sequence_of(clock))
        entry = self._state.entry_of(push)
        return entry is not None and entry.is_complete

    def _choose(
        self, clock: int, contributors: tuple[Member, ...], entries: Contributions
    ) -> None:
        """Fixes once and for all whose pushes count, on shard 0.

        Of a worker that has ended every shard holds all, as if it had said so. One of
        those chosen must be left, to drive the commit.
        """
        rules = self._state.rules
        is_chosen = self.chosen is not None and self.chosen.clock >= clock
        if not rules.is_first or is_chosen:
            return
        said = [(self._state.of(m.worker).ready, m) for m in contributors]
        said = [each for each in said if each[0][0] == each[1].sequence_of(clock)]
        ready = [m.worker for _, m in sorted(said, key=lambda each: each[0][1])]
        ready += [
            member.worker
            for member in contributors
            if self._state.clocks.member_of(member.worker) is None
        ]
        weights = {worker: _weight(entries.get(worker)) for worker in ready}
        idle = [worker for worker, weight in weights.items() if weight == 0]
        active = len(contributors) - len(idle)
        count = max(1, active - rules.backup_worker_count)
        weighty = [worker for worker in weights if worker not in idle]
        if active > 0 and len(weighty) < count:
            return
        chosen = (*weighty[:count], *idle)
        if any(self._state.clocks.member_of(worker) for worker in chosen):
            self.chosen = ClockChoice(
                clock,
                tuple(sorted(chosen)),
                gradient_scale=0.0 if rules.is_clipped else 1.0,
            )


def _weight(entry: PushEntry | None) -> float:
    return entry.trailer.weight if entry is not None and entry.trailer else 0.0


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
