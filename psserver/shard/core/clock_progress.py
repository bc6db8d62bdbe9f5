"""BSP on one shard: clocks, worked on one after the other.

Decides what is applied when, and answers what is complete. `ShardCore` feeds it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from psserver.shard.core.apply_orders import (
    kind_of_mixed,
    of_kind,
    orders_to_apply,
    source_of,
    trailers_of,
)
from psserver.shard.core.clock_commits import ClockCommits
from psserver.shard.core.effects import ContributionAwaited
from psserver.shard.core.push import PushEntry, PushId, Trailer
from psserver.shard.core.shard_state import ShardState
from pswire.clipping import norm_of
from pswire.membership import Member, MixedClock, Outcome, Record, WorkerKey


@dataclass(slots=True)
class OpenClock:
    """One clock while it is open: who has sent what, and what can be applied.

    Who contributes is said by the clock table, from records; never by counting messages
    and never by what a request says. Chunks are released only when the verdicts of all
    contributors are in (*finite first*).

    Attributes:
        clock: Its number.
        applying: Chunks that the owner is applying now.
        applied: Chunks that are done, also those that nobody sent.
        torn: Workers whose chunk contradicted their verdict.
        is_settled: Whether its optimizer and settings are known to the shard.
        source: Whose optimizer and hyperparameters count, while it is armed.
    """

    clock: int
    applying: set[int] = field(default_factory=set)
    applied: set[int] = field(default_factory=set)
    torn: set[str] = field(default_factory=set)
    is_settled: bool = False
    source: Trailer | None = None
    _missing: dict[int, set[WorkerKey]] | None = None

    @property
    def is_armed(self) -> bool:
        """Whether all trailers were in when the clock was last looked at."""
        return self._missing is not None

    def disarm(self) -> None:
        """Forgets who is missing, since the contributors have changed."""
        self._missing = None
        self.source = None

    def arm(
        self,
        entries: Mapping[WorkerKey, PushEntry],
        chunk_indexes: Iterable[int],
        source: Trailer,
    ) -> None:
        """Works out whose bytes each chunk still lacks; all trailers are in.

        A chunk that nobody with weight sends is done at once. Chunks that are there
        already are released in ascending order: the next forward pass begins with them.
        """
        missing: dict[int, set[WorkerKey]] = {}
        for index in sorted(chunk_indexes):
            if index in self.applied:
                continue
            senders = {
                worker
                for worker, entry in entries.items()
                if entry.trailer is not None
                and entry.trailer.weight > 0
                and index in entry.trailer.chunk_indexes
            }
            if senders:
                missing[index] = {
                    worker for worker in senders if index not in entries[worker].digests
                }
            else:
                self.applied.add(index)
        self._missing = missing
        self.source = source

    def note_chunk(self, worker: WorkerKey, chunk_index: int) -> None:
        """A contributor's chunk has come."""
        if self._missing is not None and chunk_index in self._missing:
            self._missing[chunk_index].discard(worker)

    def take_ready(self, among: Iterable[int] | None = None) -> list[int]:
        """Chunks whose contributions are complete; marks them as being applied.

        Args:
            among: Chunks to look at; all when None.
        """
        if self._missing is None:
            return []
        ready = [
            index
            for index in (self._missing if among is None else among)
            if index in self._missing and not self._missing[index]
        ]
        for index in ready:
            del self._missing[index]
            self.applying.add(index)
        return ready

    @property
    def is_done(self) -> bool:
        """Whether every chunk of this shard is done."""
        return self._missing is not None and not self._missing and not self.applying


class ClockProgress:
    """The clocks of BSP.

    Attributes:
        open: The clock that is worked on, once anything of it may be applied.
        skipped_clock: Newest clock that was skipped.
        commits: Two-phase steps.
    """

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._clocks = state.clocks
        self._forced_skips: set[int] = set()
        # Of clocks in which some step and some publish, whether the publishes count: of
        # those that a record named, and of the applied one.
        self._mixed: dict[int, bool] = {}
        self._newest_pushes: tuple[int, tuple[Member, ...], tuple[PushId, ...]] = (
            0,
            (),
            (),
        )
        self.open: OpenClock | None = None
        self.skipped_clock = 0
        self.commits = ClockCommits(state)

    def counted_pushes_of(self, clock: int) -> tuple[PushId, ...]:
        """The pushes that a clock consists of, in the order of worker ids."""
        choice = self.commits.committed(clock)
        # Asked for with each chunk; a clock that bad gradients skip applies none.
        is_skipping = self._state.rules.update.skips_bad
        bad = () if is_skipping else self._bad_workers(clock, self.entries(clock))
        return tuple(
            push
            for push in self.pushes_of(clock)
            if (choice is None or push.worker in choice.workers)
            and push.worker not in bad
        )

    def pushes_of(self, clock: int) -> tuple[PushId, ...]:
        """The pushes of all contributors to a clock, in the order of worker ids."""
        contributors = self._clocks.contributors(clock)
        # Asked for many times in a clock; the table keeps the contributors meanwhile.
        known_clock, known, pushes = self._newest_pushes
        if known_clock != clock or known is not contributors:
            pushes = tuple(
                PushId(member.worker, member.sequence_of(clock))
                for member in contributors
            )
            self._newest_pushes = clock, contributors, pushes
        return pushes

    def entries(self, clock: int) -> dict[WorkerKey, PushEntry]:
        """Entries of the contributors that have sent anything, in their order."""
        found = {}
        for push in self.pushes_of(clock):
            entry = self._state.entry_of(push)
            if entry is not None:
                found[push.worker] = entry
        return found

    def applied_chunks(self, push: PushId) -> frozenset[int]:
        """Chunks whose values already hold the update of an open push's clock."""
        if self.open is not None and push in self.pushes_of(self.open.clock):
            return frozenset(self.open.applied)
        return frozenset()

    def note_chunk(self, push: PushId, chunk_index: int) -> None:
        """A chunk was staged: it may be the last one that an open clock needs."""
        clock = self.open
        if clock is None or not clock.is_armed:
            return
        if push in self.pushes_of(clock.clock):
            clock.note_chunk(push.worker, chunk_index)
            self._release(clock, (chunk_index,))

    def chunk_applied(self, chunk_index: int, torn_worker_ids: Collection[str]) -> bool:
        """The owner has applied a chunk; returns whether the clock is done."""
        clock = self.open
        assert clock is not None
        assert chunk_index in clock.applying
        clock.applying.discard(chunk_index)
        clock.applied.add(chunk_index)
        if torn_worker_ids:
            clock.torn.update(torn_worker_ids)
            self._state.note_torn(clock.clock, chunk_index, list(torn_worker_ids))
        for entry in self._counted_entries(clock.clock).values():
            was_staged = entry.staged.pop(chunk_index, None) is not None
            if was_staged and entry.trailer is not None and entry.trailer.weight > 0:
                entry.applied.add(chunk_index)
        return clock.is_done

    @property
    def mixed_clocks(self) -> tuple[MixedClock, ...]:
        """Clocks of two kinds of pushes of which something was applied."""
        found = dict(self._mixed)
        if self.open is not None and self.open.applied:
            number = self.open.clock
            kind = self._kind_of(number, self._committed_entries(number))
            if kind is not None:
                found[number] = kind
        return tuple(MixedClock(*each) for each in sorted(found.items()))

    def follow(self, record: Record) -> None:
        """Goes on under a newer record, which is installed.

        A clock of two kinds of pushes stays what some shard has begun it as, be it that
        its longest contributor, whose kind it was, has ended in the middle of that.

        Skipped are clocks of which some shard has a verdict that is not finite. They
        still need the pushes of all that contribute, as any clock does: whoever leaves
        instead is not counted. Left out are those that are complete here, and those
        that nobody is left of: the next worker to join may contribute to them.
        """
        applied = self._clocks.applied_clock
        self._forced_skips.update(
            clock
            for clock in record.skipped_clocks
            if clock > applied and self._clocks.contributors(clock)
        )
        self._mixed.update(each for each in record.mixed_clocks if each.clock > applied)
        commit = record.commit
        if commit is not None and commit.clock > applied:
            if commit.is_scaled:
                self._state.committed = commit
            else:
                self.commits.stand(commit)
        if self.open is not None:
            self.open.disarm()

    def advance(self) -> bool:
        """Works on the next clock; returns whether it is complete now."""
        number = self._clocks.next_clock
        if number is None:
            return False
        if self._clocks.is_empty(number, self._state.fence.cut_clock):
            self._complete(number, Outcome.APPLIED)
            return True
        contributors = self._clocks.contributors(number)
        if not contributors:
            return False
        entries = self.entries(number)
        if not self._state.closes_early(number):
            return self._advance_all(number, contributors, entries)
        lacking = [m for m in contributors if m.worker not in trailers_of(entries)]
        if self._state.rules.is_first and not self._clocks.has_quorum(number):
            self._ask_idle(number, lacking, entries)
        if self._waits_for_batch(number, entries):
            return False
        choice = self.commits.settle(number, contributors, entries)
        if choice is None or not self._state.fence.admits_clock(number):
            return False
        return self._close(number, {w: entries[w] for w in choice.workers})

    # Inside

    def _advance_all(
        self,
        number: int,
        contributors: tuple[Member, ...],
        entries: dict[WorkerKey, PushEntry],
    ) -> bool:
        """Works on a clock that needs all of its contributors."""
        trailers = trailers_of(entries)
        lacking = [m for m in contributors if m.worker not in trailers]
        if lacking:
            self._ask_idle(number, lacking, entries)
            return False
        if self._waits_for_batch(number, entries):
            return False
        # A skip loads the optimizer state that its trailers bring, so that it too must
        # be of the same contributors on every shard.
        if (
            self._state.is_two_phase(number)
            and self.commits.settle(number, contributors, entries) is None
        ):
            return False
        return self._close(number, entries)

    def _close(self, number: int, entries: dict[WorkerKey, PushEntry]) -> bool:
        """Applies or skips a clock of these pushes; whether it is complete now."""
        bad = self._bad_workers(number, entries)
        entries = self._counting(number, entries)
        is_bad = self._state.rules.update.skips_bad and any(w in bad for w in entries)
        # Where some may be left out, whose verdicts count is not known before that.
        needs_all = not self._state.closes_early(number)
        is_forced = number in self._forced_skips and needs_all
        is_skipped = is_forced or is_bad
        # Nobody is left of the kind that the clock was begun with, or whose gradient
        # counts: it ends as it is.
        if is_skipped or not entries:
            if entries:
                self._settle(number, entries)
            self._complete(number, Outcome.SKIPPED if is_skipped else Outcome.APPLIED)
            return True
        return self._apply(number, entries)

    def _apply(self, number: int, entries: dict[WorkerKey, PushEntry]) -> bool:
        """Applies what is ready of a clock; returns whether it is complete now."""
        if self.open is None:
            self.open = OpenClock(number)
        if not self.open.is_settled:
            # Before anything of it is applied, and once: the contributors may change
            # while it is open.
            self._settle(number, entries)
            self.open.is_settled = True
        if not self.open.is_armed:
            trailers = trailers_of(entries)
            used = self._source_of(self._members_of(number, entries), trailers)
            self.open.arm(entries, self._state.chunk_indexes, trailers[used])
            self._state.effects += self._state.comparison.differences(
                number, used, trailers
            )
        self._release(self.open)
        if not self.open.is_done:
            return False
        self._complete(number, Outcome.APPLIED)
        return True

    def _settle(self, number: int, entries: dict[WorkerKey, PushEntry]) -> None:
        """Takes the settings of a clock from the longest contributor."""
        trailers = trailers_of(entries)
        members = self._members_of(number, entries)
        source = self._source_of(members, trailers)
        (member,) = (each for each in members if each.worker == source)
        push = PushId(source, member.sequence_of(number))
        self._state.settle(push, trailers[source])

    def _source_of(
        self, members: tuple[Member, ...], trailers: dict[WorkerKey, Trailer]
    ) -> WorkerKey:
        by_majority = self._state.rules.update.aggregation.is_robust
        return source_of(members, trailers, by_majority=by_majority)

    def _members_of(
        self, clock: int, entries: dict[WorkerKey, PushEntry]
    ) -> tuple[Member, ...]:
        contributors = self._clocks.contributors(clock)
        return tuple(member for member in contributors if member.worker in entries)

    def _counted_entries(self, clock: int) -> dict[WorkerKey, PushEntry]:
        """Entries of those whose pushes make a clock's update."""
        return self._counting(clock, self._committed_entries(clock))

    def _committed_entries(self, clock: int) -> dict[WorkerKey, PushEntry]:
        """Entries of a clock: with a commit, of those that it names."""
        entries = self.entries(clock)
        choice = self.commits.committed(clock)
        if choice is not None:
            entries = {w: entry for w, entry in entries.items() if w in choice.workers}
        return entries

    def _counting(
        self, clock: int, entries: dict[WorkerKey, PushEntry]
    ) -> dict[WorkerKey, PushEntry]:
        counted = of_kind(entries, self._kind_of(clock, entries))
        if self._state.rules.update.skips_bad:
            return counted
        bad = self._bad_workers(clock, entries)
        return {w: entry for w, entry in counted.items() if w not in bad}

    def _bad_workers(
        self, clock: int, entries: dict[WorkerKey, PushEntry]
    ) -> Collection[WorkerKey]:
        """Contributors whose gradients are not finite or too large.

        Where each is measured the commit says so, on every shard alike: what a worker
        says of its own may be another thing on each.
        """
        choice = self.commits.committed(clock)
        if choice is not None and choice.factors:
            return choice.bad_workers()
        return [w for w, trailer in trailers_of(entries).items() if not trailer.finite]

    def _kind_of(self, clock: int, entries: dict[WorkerKey, PushEntry]) -> bool | None:
        """Whether a clock publishes; None where all its contributors do the same."""
        known = self._mixed.get(clock)
        if known is not None:
            return known
        return kind_of_mixed(
            self._clocks.contributors(clock),
            entries,
            by_majority=self._state.rules.update.aggregation.is_robust,
        )

    def _ask_idle(
        self,
        clock: int,
        lacking: list[Member],
        entries: dict[WorkerKey, PushEntry],
    ) -> None:
        """Asks workers without data for their part of a clock that needs only them.

        Somebody must have pushed: workers that are all idle do not spin, since an idle
        one pushes only when it is asked. With backup workers a clock needs nobody in
        particular, so those that are idle are asked at once.
        """
        trailers = trailers_of(entries)
        pushes = [PushId(m.worker, m.sequence_of(clock)) for m in lacking]
        idle = [push for push in pushes if self._state.on_shard.is_idle(push)]
        is_due = len(idle) == len(pushes) or self._state.rules.has_backups
        if not trailers or not idle or not is_due:
            return
        first = max(trailers.values(), key=lambda trailer: trailer.weight > 0)
        for push in idle:
            self._state.of(push.worker).idle_sequence = 0
            self._state.effects.append(
                ContributionAwaited(
                    worker=push.worker, clock=clock, optimizer=first.optimizer
                )
            )

    def _release(self, clock: OpenClock, among: tuple[int, ...] | None = None) -> None:
        """Orders the chunks that are ready to be applied."""
        if clock.source is None or not self._state.fence.admits_clock(clock.clock):
            return
        if self._waits_for_batch(clock.clock):
            return
        ready = clock.take_ready(among)
        if not ready:
            return
        entries = self._counted_entries(clock.clock)
        choice = self.commits.committed(clock.clock)
        self._state.effects += orders_to_apply(
            clock.clock,
            ready,
            entries,
            source=clock.source,
            choice=choice,
            is_weighted=self._state.rules.update.aggregation.rule.is_weighted,
        )

    def _waits_for_batch(
        self, clock: int, entries: dict[WorkerKey, PushEntry] | None = None
    ) -> bool:
        """Whether a clock begins a batch that is to wait for a checkpoint."""
        fence = self._state.fence
        if not fence.batch_floors:
            return False
        trailers = trailers_of(self.entries(clock) if entries is None else entries)
        return any(
            fence.is_beyond_batch(*push) for push in self.pushes_of(clock)
        ) and not any(trailer.continues_batch for trailer in trailers.values())

    def _complete(self, clock: int, outcome: Outcome) -> None:
        pushes = self.pushes_of(clock)
        entries = self._committed_entries(clock)
        kind = self._kind_of(clock, entries)
        counted = self._counting(clock, entries)
        bad = self._bad_workers(clock, entries)
        nonfinite = tuple(w.worker_id for w in of_kind(entries, kind) if w in bad)
        choice = self.commits.committed(clock)
        is_told = not self._state.rules.update.aggregation.rule.is_radial
        factors = choice.factor_of() if choice is not None and is_told else {}
        left_out = choice.left_out_workers() if choice is not None else frozenset()
        # Workers that come from a mode without clocks have values of different age.
        is_new = clock == self._clocks.first_clock
        self._clocks.complete(clock)
        self.open = None
        self._forced_skips.discard(clock)
        self._mixed = {c: each for c, each in self._mixed.items() if c > clock}
        if kind is not None:
            self._mixed[clock] = kind
        if outcome is Outcome.SKIPPED:
            self.skipped_clock = clock
        outcomes = {}
        for push in pushes:
            is_counted = push.worker in counted
            outcomes[push] = outcome if is_counted else Outcome.DROPPED
            told = nonfinite if outcomes[push] is Outcome.SKIPPED else ()
            self._state.end(push, outcomes[push], told)
            self._note_norm(push, outcomes[push])
            self._state.note_factor(
                push,
                0.0 if push.worker in bad else factors.get(push.worker, 1.0),
                is_left_out=push.worker in left_out,
            )
        self._clocks.note_progress()
        for push, became in outcomes.items():
            told = nonfinite if became is Outcome.SKIPPED else ()
            reply = self._state.reply(push, became, nonfinite=told)
            if became is Outcome.DROPPED:
                # It was not complete perhaps, so that its worker has heard nothing.
                self.commits.say_committed(push, clock)
            self._state.finish(push, reply, needs_all=is_new)

    def _note_norm(self, push: PushId, outcome: Outcome) -> None:
        """Keeps what the clock that was just completed measured, for the answer."""
        choice = self.commits.committed(self._clocks.applied_clock)
        entry = self._state.entry_of(push)
        rules = self._state.rules.update
        is_known = choice is not None and rules.clip_grad_norm > 0
        if is_known and entry is not None and outcome is Outcome.APPLIED:
            assert choice is not None
            entry.grad_norm = norm_of(choice.sum_of_squares)
