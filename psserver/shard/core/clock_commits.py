"""Two-phase steps of BSP: who has heard `staged`, who is chosen, what is committed.

A clock is committed by its contributors, once every shard holds all of it; see
`docs/decisions/0006-two-phase-steps.md`. When clocks are measured, `staged` comes with
what the shard has measured of its part, and the commit with what follows from all of
them and with all of them: each shard proves its own, since a driver may lie. So does
shard 0 prove whose pushes it has chosen, where clocks may close without some.
"""

import hmac
from typing import Final

from psserver.shard.core.apply_orders import (
    contributions_to,
    kind_of_mixed,
    of_kind,
    source_of,
    total_weight_of,
    trailers_of,
)
from psserver.shard.core.effects import ClockClosed, MeasureClock, Staged, WakeAt
from psserver.shard.core.push import PushEntry, PushId
from psserver.shard.core.quorum import Arrival, Merge, closes_at_ms, needed_of
from psserver.shard.core.shard_state import ShardState
from pswire.aggregation import UpdateRules, proof_of, with_nonfinite
from pswire.clipping import norm_of
from pswire.membership import ClockChoice, Member, WorkerKey
from pswire.reasons import ErrorReason, Refusal

Contributions = dict[WorkerKey, PushEntry]

_OF_CHOICE: Final = -1
"""In the proof of a choice, where that of a measure has the index of its shard: neither
can be taken for the other."""


class ClockCommits:
    """Commits of the clock that is worked on.

    Attributes:
        chosen: On shard 0, the newest choice, where clocks may close without some.
        measure: Where clocks are measured, what this one measures.
        standing: Where they are and may close without some, the newest choice that a
            driver or a record has named, to be measured.
    """

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._ready_count = 0
        self.chosen: ClockChoice | None = None
        self.measure = ClockMeasure(state)
        self.standing: ClockChoice | None = None
        self._wake_ms: int | None = None

    def committed(self, clock: int) -> ClockChoice | None:
        """What a clock consists of, if it is committed."""
        known = self._state.committed
        return known if known is not None and known.clock == clock else None

    def say_committed(self, push: PushId, clock: int) -> None:
        """Says `staged` of a clock that is committed, as it was said to its driver.

        Nothing is said where clocks are measured and this shard has not measured this
        one: a record has committed it then, on all shards.
        """
        known = self.committed(clock)
        if known is not None and self._state.rules.update.is_measured:
            known = self.measure.known(known)
        if known is not None:
            self._state.effects.append(Staged(push=push, choice=known))

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
        is_measured = self._state.rules.update.is_measured
        if contributors and not members and not is_measured:
            # All have ended, and of those that have every shard holds all: there is
            # nobody to drive the commit, and nothing left that could differ. What
            # follows from measures could: a record has it, by those of all shards.
            self._state.committed = ClockChoice(clock, tuple(complete))
            return self._state.committed
        if self._state.closes_early(clock):
            if contributors and not members:
                self.stand(ClockChoice(clock, tuple(complete)))
            self._choose(clock, contributors, entries)
            self._send_own(clock, contributors, entries)
        elif len(complete) == len(contributors):
            choice = ClockChoice(clock, tuple(complete))
            named = self.measure.of(choice, entries) if is_measured else choice
            if named is not None and members:
                for worker in complete:
                    self._send_staged(worker, contributors, named)
        return None

    def measured(
        self, clock: int, contributors: tuple[Member, ...]
    ) -> ClockChoice | None:
        """What a clock measures as it consists now, if it is known."""
        choice = ClockChoice(clock, tuple(member.worker for member in contributors))
        if self._state.closes_early(clock):
            standing = self._standing(clock)
            return None if standing is None else self.measure.known(standing)
        return self.measure.known(choice)

    def stand(self, choice: ClockChoice) -> None:
        """Whose pushes a clock consists of is certain; its scale is to follow."""
        if self._standing(choice.clock) is None:
            self.standing = choice._replace(gradient_scale=0.0, proof=b"")

    def send_again(self, worker: WorkerKey) -> None:
        """The worker's call is a new one: it may not have heard."""
        self._state.of(worker).staged = None

    def commit(self, choice: ClockChoice, contributors: tuple[Member, ...]) -> bool:
        """A driver says that every shard holds all of the next clock.

        Returns:
            Whether it is committed; False when its contributors are others.

        Raises:
            Refusal: `MALFORMED_MESSAGE` for what does not follow from what the shards
                have measured; no state changed.
        """
        known = self.committed(choice.clock)
        if known is not None:
            check_repeated(known, choice)
            return True
        own = tuple(member.worker for member in contributors)
        closes_early = self._state.closes_early(choice.clock)
        named = [each for each in contributors if each.worker in choice.workers]
        if closes_early:
            is_known = 0 < len(named) == len(choice.workers)
            is_right = is_known and self._is_chosen(choice)
        else:
            is_right = choice.workers == own
        is_right = is_right and all(self._is_complete(m, choice.clock) for m in named)
        rules = self._state.rules
        is_measured = rules.update.is_measured
        if is_right and not choice.is_scaled and is_measured and closes_early:
            self.stand(choice)
            return False
        if not (choice.is_scaled or is_measured):
            choice = choice._replace(gradient_scale=1.0)
        if is_right and self.measure.admits_commit(choice):
            self._state.committed = choice._replace(parts=(), proof=b"")
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
            known.ready_ms = self._state.now_ms

    def wake(self) -> None:
        """The time is over for which it was asked to be woken, or nearly."""
        self._wake_ms = None

    # Inside

    def _standing(self, clock: int) -> ClockChoice | None:
        known = self.standing
        return known if known is not None and known.clock == clock else None

    def _send_own(
        self, clock: int, contributors: tuple[Member, ...], entries: Contributions
    ) -> None:
        """Each hears that its push is complete, where clocks may close without some.

        Where clocks are measured, those that were chosen hear in its place what this
        one measures, once that is known. In mode quorum the others hear it too: any of
        them may commit, since those that were chosen may all be stopped.
        """
        has_quorum = self._state.clocks.has_quorum(clock)
        standing = self._standing(clock)
        if standing is not None:
            standing = self.measure.of(standing, entries)
        for member in contributors:
            worker = member.worker
            entry = entries.get(worker)
            if entry is None or not entry.is_complete:
                continue
            if standing is not None and (has_quorum or worker in standing.workers):
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
        weighty = [worker for worker in weights if worker not in idle]
        merge = None
        if self._state.clocks.has_quorum(clock):
            pushes = (
                PushId(member.worker, member.sequence_of(clock))
                for member in contributors
                if member.worker in weighty
            )
            arrivals = [self._arrival(push, entries[push.worker]) for push in pushes]
            merge = self._merge(clock, contributors, arrivals, len(idle))
            if merge is None:
                return
            count = len(weighty)
        else:
            active = len(contributors) - len(idle)
            count = max(1, active - rules.backup_worker_count)
            if active > 0 and len(weighty) < count:
                return
        chosen = (*weighty[:count], *idle)
        if any(self._state.clocks.member_of(worker) for worker in chosen):
            if merge is not None:
                self._state.effects.append(ClockClosed(merge=merge))
            choice = ClockChoice(clock, tuple(sorted(chosen)))
            self.chosen = choice._replace(
                gradient_scale=0.0 if rules.update.is_measured else 1.0,
                proof=proof_of_choice(self._state.measure_key, choice),
            )

    def _is_chosen(self, choice: ClockChoice) -> bool:
        """Whether shard 0 has chosen these contributors, as a driver says.

        What follows from measures needs no proof: each shard has proven its own, which
        it measures of those that were chosen.
        """
        if self._state.rules.update.is_measured and choice.is_scaled:
            return True
        expected = proof_of_choice(self._state.measure_key, choice)
        return hmac.compare_digest(choice.proof, expected)

    def _arrival(self, push: PushId, entry: PushEntry) -> Arrival:
        """A push with weight of which every shard holds all.

        One that has ended has perhaps not said so, and can't be kept waiting.
        """
        trailer, known = entry.trailer, self._state.of(push.worker)
        assert trailer is not None, "it has weight"
        has_ended = self._state.clocks.member_of(push.worker) is None
        at_ms = 0 if has_ended else known.ready_ms
        slack_ms = None if has_ended else trailer.slack_ms
        return Arrival(push, trailer.weight, at_ms, slack_ms)

    def _merge(
        self,
        clock: int,
        contributors: tuple[Member, ...],
        arrivals: list[Arrival],
        weightless_count: int,
    ) -> Merge | None:
        """How a clock of mode quorum closes now; None if not yet, and when is ordered.

        Workers that have no data are not waited for, nor asked.
        """
        here = {arrival.push for arrival in arrivals}
        pushes = (PushId(m.worker, m.sequence_of(clock)) for m in contributors)
        waiting_count = sum(
            self._state.on_shard.is_idle(push) for push in pushes if push not in here
        )
        active_count = len(contributors) - weightless_count - waiting_count
        terms, now_ms = self._state.clocks.terms_of(clock), self._state.now_ms
        if active_count > 0:
            closes_ms = closes_at_ms(terms, arrivals, active_count)
            if closes_ms is None:
                return None
            closes_ms = max(closes_ms, self._last_pushes_ms(clock, contributors))
            if closes_ms > now_ms:
                if self._wake_ms is None or closes_ms < self._wake_ms:
                    self._wake_ms = closes_ms
                    self._state.effects.append(WakeAt(at_ms=closes_ms))
                return None
        return Merge(
            clock=clock,
            quorum=terms.quorum,
            needed_count=needed_of(terms, active_count),
            active_count=active_count,
            window_ms=terms.grace_window_ms,
            closed_ms=now_ms,
            arrivals=tuple(arrivals),
        )

    def _last_pushes_ms(self, clock: int, contributors: tuple[Member, ...]) -> int:
        """Until when a clock waits for last pushes that are on their way."""
        until_ms = 0
        for member in contributors:
            push = PushId(member.worker, member.sequence_of(clock))
            known = self._state.of(member.worker)
            if known.last_until_ms is None or known.ready[0] >= push.sequence:
                continue
            is_here = self._state.clocks.member_of(member.worker) is not None
            if is_here and not self._state.on_shard.is_idle(push):
                until_ms = max(until_ms, known.last_until_ms)
        return until_ms


def proof_of_choice(key: bytes, choice: ClockChoice) -> bytes:
    """Shows that shard 0 has chosen these contributors to a clock; see `proof_of`."""
    return proof_of(key, _OF_CHOICE, ClockChoice(choice.clock, choice.workers))


def _weight(entry: PushEntry | None) -> float:
    return entry.trailer.weight if entry is not None and entry.trailer else 0.0


class ClockMeasure:
    """What the gradients of the clock that is worked on measure on this shard."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._ordered: ClockChoice | None = None
        self._known: ClockChoice | None = None
        self._nonfinite: frozenset[int] = frozenset()

    @property
    def is_under_way(self) -> bool:
        """Whether the owner is measuring."""
        return self._ordered is not None

    def of(
        self, choice: ClockChoice, entries: dict[WorkerKey, PushEntry]
    ) -> ClockChoice | None:
        """A choice with what this shard's part measures.

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
        trailers = trailers_of(chosen)
        rules = self._state.rules.update
        if rules.measures_each:
            weights = tuple(trailers[worker].weight for worker in choice.workers)
            choice = choice._replace(weights=weights)
            if self._ordered == choice:
                return None
        elif rules.skips_bad and not all(t.finite for t in trailers.values()):
            self._known = self._proven(choice._replace(sum_of_squares=0.0))
            return self._known
        self._ordered = choice
        # Whose verdict is that its gradient is not finite has it: on every shard alike,
        # whatever it tells the others.
        self._nonfinite = frozenset(
            place
            for place, worker in enumerate(choice.workers)
            if not trailers[worker].finite
        )
        finite = {w: entry for w, entry in chosen.items() if trailers[w].finite}
        members = self._state.clocks.contributors(choice.clock)
        order = _order(choice, members, finite, rules) if finite else None
        if order is None:
            self.note(choice, 0.0, (0.0,) * rules.product_count(len(choice.workers)))
            return self._known
        self._state.effects.append(order)
        return None

    def known(self, choice: ClockChoice) -> ClockChoice | None:
        """What was measured of these contributors to this clock."""
        known = self._known
        return known if known is not None and known[:2] == choice[:2] else None

    def note(
        self,
        choice: ClockChoice,
        sum_of_squares: float,
        products: tuple[float, ...] = (),
    ) -> None:
        """The owner has measured; of other contributors than now it says nothing."""
        if self._ordered != choice:
            return
        self._ordered = None
        if self._nonfinite and products:
            products = with_nonfinite(products, len(choice.workers), self._nonfinite)
        self._known = self._proven(
            choice._replace(sum_of_squares=sum_of_squares, products=products)
        )

    def _proven(self, part: ClockChoice) -> ClockChoice:
        key, index = self._state.measure_key, self._state.rules.shard_index
        return part._replace(proof=proof_of(key, index, part))

    def admits_commit(self, choice: ClockChoice) -> bool:
        """Whether the contributors of a commit are those that were measured.

        Raises:
            Refusal: `MALFORMED_MESSAGE` for what does not follow from the parts that
                it brings, or parts that the shards have not said; no state changed.
        """
        rules = self._state.rules
        if not rules.update.is_measured:
            self._check(choice, ClockChoice(choice.clock, choice.workers))
            return True
        if self.known(choice) is None:
            return False
        key = self._state.measure_key
        if len(choice.parts) != rules.shard_count:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"a commit of clock {choice.clock} brings what {len(choice.parts)} "
                f"shards have measured, the job has {rules.shard_count}",
            )
        for index, part in enumerate(choice.parts):
            is_proven = hmac.compare_digest(part.proof, proof_of(key, index, part))
            if not is_proven or part[:2] != choice[:2]:
                raise Refusal(
                    ErrorReason.MALFORMED_MESSAGE,
                    f"a commit of clock {choice.clock} brings what shard {index} has "
                    "not measured of it",
                )
        self._check(choice, rules.update.decided(choice.parts))
        return True

    @staticmethod
    def _check(choice: ClockChoice, expected: ClockChoice) -> None:
        if choice.decision != expected.decision:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"a commit of clock {choice.clock} says {_decision(choice)}: what the "
                f"shards have measured makes {_decision(expected)}",
            )


def _decision(choice: ClockChoice) -> str:
    norm = norm_of(choice.sum_of_squares)
    text = f"gradient scale {choice.gradient_scale} of norm {norm}"
    if not choice.factors:
        return text
    return f"{text}, factors {choice.factors} without {choice.left_out}"


def check_repeated(known: ClockChoice | None, choice: ClockChoice) -> None:
    """Refuses another decision for what is committed already.

    Drivers have the same measures from the same shards, so that none is honest.

    Raises:
        Refusal: `MALFORMED_MESSAGE`; no state changed.
    """
    if known is None or known[:2] != choice[:2]:
        return
    if choice.is_scaled and known[3:6] != choice[3:6]:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"a commit of clock {choice.clock} says {_decision(choice)}: it is "
            f"committed with {_decision(known)}",
        )


def _order(
    choice: ClockChoice,
    contributors: tuple[Member, ...],
    chosen: dict[WorkerKey, PushEntry],
    rules: UpdateRules,
) -> MeasureClock:
    by_majority = rules.aggregation.is_robust
    kind = kind_of_mixed(contributors, chosen, by_majority=by_majority)
    chosen = of_kind(chosen, kind)
    trailers = trailers_of(chosen)
    members = tuple(member for member in contributors if member.worker in chosen)
    source = trailers[source_of(members, trailers, by_majority=by_majority)]
    is_weighted = rules.aggregation.rule.is_weighted
    indexes = {index for entry in chosen.values() for index in entry.staged}
    parts = (
        (index, contributions_to(index, chosen, is_weighted=is_weighted))
        for index in sorted(indexes)
    )
    return MeasureClock(
        choice=choice,
        chunks=tuple(part for part in parts if part[1]),
        total_weight=total_weight_of(chosen, is_weighted=is_weighted),
        optimizer=source.optimizer,
        spec_digest=source.spec_digest,
        measures_each=rules.measures_each,
        measures_pairs=rules.measures_pairs,
    )
