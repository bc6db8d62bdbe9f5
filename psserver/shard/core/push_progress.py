"""SSP and ASP on one shard: pushes, each applied by itself.

A worker's clock advances when its push is applied. The answer waits until the values
are as new as the bound demands: a pull at clock c holds every member's steps up to
c - bound, and all of the puller's own.
Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", NIPS 2013.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from psserver.shard.core.apply_orders import contributions_to
from psserver.shard.core.clock_table import closed_refusal
from psserver.shard.core.effects import (
    ApplyChunk,
    BufferAverage,
    ContributionAwaited,
    RefusePush,
    Staged,
)
from psserver.shard.core.push import PushEntry, PushId, Trailer
from psserver.shard.core.shard_state import ShardState
from psserver.shard.core.staleness_counter import StalenessCounter
from pswire.membership import ClockChoice, Member, Outcome, WorkerKey, longest_of


class UpdateQueue:
    """One update at a time for each chunk, in the order in which they came.

    Attributes:
        applying: Whose update of a chunk is being applied.
    """

    def __init__(self) -> None:
        self.applying: dict[int, PushId] = {}
        self._waiting: dict[int, deque[PushId]] = {}

    def enqueue(self, chunk_index: int, push: PushId) -> None:
        """A push's part of a chunk is there; once for each."""
        self._waiting.setdefault(chunk_index, deque()).append(push)

    def take(self, chunk_index: int) -> PushId | None:
        """The update of a chunk whose turn it is, marked as being applied."""
        waiting = self._waiting.get(chunk_index)
        if waiting is None or chunk_index in self.applying:
            return None
        push = waiting.popleft()
        if not waiting:
            del self._waiting[chunk_index]
        self.applying[chunk_index] = push
        return push

    @property
    def waiting(self) -> tuple[int, ...]:
        """Chunks for which some update waits."""
        return tuple(self._waiting)

    def applied(self, chunk_index: int) -> PushId:
        """An update is done; returns whose it was."""
        return self.applying.pop(chunk_index)

    def discard(self, push: PushId) -> None:
        """Takes out a push that does not count any more; none of it is applying."""
        assert push not in self.applying.values()
        for chunk_index, waiting in list(self._waiting.items()):
            kept = deque(other for other in waiting if other != push)
            if kept:
                self._waiting[chunk_index] = kept
            else:
                del self._waiting[chunk_index]


@dataclass(slots=True)
class OpenPush:
    """A push that is being applied.

    Attributes:
        remaining: Chunks that are not applied yet.
        queued: Of those, chunks that have a place in the queue.
        used: Trailer whose hyperparameters count for it.
    """

    remaining: set[int]
    used: Trailer
    queued: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class DonePush:
    """A push that is done and whose answer waits."""

    outcome: Outcome
    staleness: int
    nonfinite: tuple[str, ...] = ()


class PushProgress:
    """Pushes that are applied by themselves.

    Attributes:
        staleness: How old the values of pushes are.
    """

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._clocks = state.clocks
        self._updates = UpdateQueue()
        self._open: dict[PushId, OpenPush] = {}
        self._blocked: dict[PushId, DonePush] = {}
        self._staged: dict[PushId, ClockChoice] = {}
        self.staleness = StalenessCounter(state.on_shard)

    @property
    def is_applying(self) -> bool:
        """Whether the owner is applying anything."""
        return bool(self._updates.applying)

    def owns_chunk(self, chunk_index: int) -> bool:
        """Whether an update of a chunk that is being applied is one of these."""
        return chunk_index in self._updates.applying

    def is_begun(self, push: PushId) -> bool:
        """Whether a push is being applied, be it that none of its chunks was yet."""
        return push in self._open

    def is_blocked(self, push: PushId) -> bool:
        """Whether a push is done and its answer waits for others."""
        return push in self._blocked

    def block(self, push: PushId, done: DonePush) -> None:
        """Holds the answer to a push that is done, and asked for again."""
        self._blocked[push] = done

    def note_values(self, worker: WorkerKey) -> None:
        """A worker is sent the values as they are now."""
        if self._clocks.member_of(worker) is not None:
            self.staleness.note_values(worker)

    def note_chunk(self, push: PushId, chunk_index: int) -> None:
        """A chunk was staged: it may be applied if its push may."""
        known = self._open.get(push)
        if known is None or chunk_index in known.queued:
            return
        if chunk_index in known.remaining:
            known.queued.add(chunk_index)
            self._updates.enqueue(chunk_index, push)
            if self._admits(push):
                self._start(chunk_index)

    def chunk_applied(self, chunk_index: int, torn_worker_ids: Collection[str]) -> bool:
        """The owner has applied a chunk; returns whether it was its push's last one.

        Otherwise nothing is new but the chunk's own queue: what follows for all pushes
        is looked at once for each push, not for each of its chunks.
        """
        push = self._updates.applied(chunk_index)
        entry = self._state.entry_of(push)
        assert entry is not None
        entry.staged.pop(chunk_index, None)
        entry.applied.add(chunk_index)
        self._open[push].remaining.discard(chunk_index)
        if torn_worker_ids:
            self._state.note_torn(
                self._clock_of(push), chunk_index, list(torn_worker_ids)
            )
        self._start(chunk_index)
        return not self._open[push].remaining

    def sequence_of(self, member: Member, clock: int) -> int:
        """The push that a commit means by a clock.

        A mode that began since `staged` was sent may have numbered clocks anew, and
        another shard has perhaps committed already: the number of then still counts.
        """
        numbered = self._state.of(member.worker).numbered
        return numbered.get(clock, member.sequence_of(clock))

    def commit(self, worker: WorkerKey, sequence: int) -> bool:
        """A driver says that every shard holds all of its push.

        Returns:
            Whether it is committed.
        """
        if sequence <= self._state.of(worker).window.done_sequence:
            return True
        push = PushId(worker, sequence)
        entry = self._state.entry_of(push)
        if entry is None or not entry.is_complete:
            self._staged.pop(push, None)
            return False
        self._state.of(worker).committed_sequence = sequence
        return True

    def send_again(self, push: PushId) -> None:
        """The push's call is a new one: it may not have heard."""
        self._staged.pop(push, None)

    def discard(self, push: PushId) -> None:
        """A record says that a push does not count."""
        self._open.pop(push, None)
        self._blocked.pop(push, None)
        self._staged.pop(push, None)
        self._updates.discard(push)

    def advance(self) -> bool:
        """Does what has become possible; returns whether anything is done now."""
        is_moved = False
        for member in self._clocks.senders:
            window = self._state.of(member.worker).window
            push = PushId(member.worker, window.done_sequence + 1)
            entry = window.next_entry
            if entry is not None and entry.trailer is not None and self._admits(push):
                is_moved |= self._work_on(push, entry, entry.trailer)
        self._start_ready()
        return self._answer() or is_moved

    def admits_pull(self, clock: int) -> bool:
        """Whether values are as new as a reader at `clock` must have them.

        Up to the clock after which a mode without clocks begins, they must be as in
        BSP: whoever has not pushed that clock yet may have to pull before it does.
        Never while the coordinator is silent, since the job may go on elsewhere.
        """
        if self._state.fence.is_orphaned:
            return False
        bound = self._clocks.lag_max
        if not self._clocks.is_settled:
            return not self._clocks.is_clocked and self._clocks.frontier >= clock
        return bound is None or self._clocks.frontier >= clock - bound

    def laggards(self) -> tuple[Member, ...]:
        """Members that answers wait for, or BSP does that is to begin."""
        if not self._clocks.is_settled:
            return tuple(
                member
                for member in self._clocks.members
                if self._clocks.done_of(member.worker) < member.base_sequence
            )
        if not self._blocked:
            return ()
        slowest = min(map(self._clocks.clock_of, self._clocks.members), default=0)
        return tuple(
            member
            for member in self._clocks.members
            if self._clocks.clock_of(member) == slowest
        )

    # Inside

    def _admits(self, push: PushId) -> bool:
        """Whether a push may be applied now."""
        member = self._state.known_member(push.worker)
        if member is None or not self._clocks.is_streamed(member, push.sequence):
            return False
        record = self._clocks.record
        assert record is not None
        is_later = member.clock_of(push.sequence) > record.mode_clock
        if is_later and not self._clocks.is_settled:
            return False  # clocks of BSP come before it
        if self._waits_for_batch(push):
            return False
        ended = self._clocks.departure_of(push.worker)
        if ended is not None:
            # Every shard holds it and every image does.
            is_counted = push.sequence <= ended.last_sequence
            return is_counted and not self._state.fence.is_frozen
        return self._state.fence.admits_push(push.worker, push.sequence)

    def _waits_for_batch(self, push: PushId) -> bool:
        """Whether a push begins a batch that is to wait for a checkpoint."""
        if not self._state.fence.is_beyond_batch(*push):
            return False
        entry = self._state.entry_of(push)
        trailer = entry.trailer if entry is not None else None
        return trailer is not None and not trailer.continues_batch

    def _work_on(self, push: PushId, entry: PushEntry, trailer: Trailer) -> bool:
        """Brings one push on; returns whether it is done now."""
        if self._state.rules.has_two_phase_pushes and not self._is_committed(
            push, entry
        ):
            return False
        is_skipped = not trailer.finite or self._state.rules.update.is_bad_alone(
            trailer.gradient_norm
        )
        if is_skipped or trailer.weight == 0:
            if trailer.loads_state:
                self._settings(push, trailer)
            nonfinite = (push.worker.worker_id,) if is_skipped else ()
            if is_skipped:
                self._state.note_factor(push, 0.0)
            outcome = Outcome.SKIPPED if is_skipped else Outcome.APPLIED
            self._finish(push, DonePush(outcome, 0, nonfinite))
            return True
        known = self._open.get(push)
        if known is None:
            known = self._opened(push, trailer)
        come = known.remaining & entry.digests.keys() - known.queued
        # Ascending: the next forward pass begins with the first ones.
        for chunk_index in sorted(come):
            known.queued.add(chunk_index)
            self._updates.enqueue(chunk_index, push)
        if known.remaining:
            return False
        if self._state.rules.update.clip_grad_norm:
            entry.grad_norm = trailer.gradient_norm
        limit = self._state.rules.update.limit_alone(trailer.gradient_norm)
        self._state.note_factor(push, limit)
        staleness = self.staleness.of_next(push.worker)
        self.staleness.count(staleness)
        self.staleness.note_update()
        self._finish(push, DonePush(Outcome.APPLIED, staleness))
        return True

    def _opened(self, push: PushId, trailer: Trailer) -> OpenPush:
        opened = OpenPush(
            remaining=set(trailer.chunk_indexes),
            used=self._settings(push, trailer),
        )
        self._open[push] = opened
        return opened

    def _settings(self, push: PushId, trailer: Trailer) -> Trailer:
        """The trailer of the longest member that has pushed for the optimizer.

        One that has ended stands for itself: other shards may have applied this push
        before it did.
        """
        self._load(push, trailer)
        own = self._state.known_member(push.worker)
        assert own is not None
        if self._clocks.member_of(push.worker) is not None:
            self._state.of(push.worker).newest[trailer.optimizer] = trailer
        pushers = [
            member
            for member in self._clocks.members
            if trailer.optimizer in self._state.of(member.worker).newest
        ]
        source = longest_of((own, *pushers)).worker
        used = trailer
        if source != push.worker:
            used = self._state.of(source).newest[trailer.optimizer]
        self._state.effects += self._state.comparison.differences(
            self._clock_of(push), source, {source: used, push.worker: trailer}
        )
        if source == push.worker:
            self._state.used[trailer.optimizer] = used
        return used

    def _load(self, push: PushId, trailer: Trailer) -> None:
        """Loads the state that a push brings, if it is the longest member's.

        As its worker knew when it made the push: shards hear of a new record at
        different points between the pushes of others, and half of a model would go on
        from what was loaded. Before all other pushes, of whom there is none to ask, any
        state is better than none: the longest member's will come in place of it.
        """
        is_first = trailer.optimizer not in self._state.used
        if trailer.loads_state and (self._is_of_longest(push, trailer) or is_first):
            self._state.load(push, trailer)

    def _is_of_longest(self, push: PushId, trailer: Trailer) -> bool:
        """Whether a push is the longest member's, as its worker says.

        Where a norm bounds what each may do, nobody is believed against the record: it
        is none before that of the push, and the longest stays it but for a mode change.
        """
        own, record = self._state.known_member(push.worker), self._clocks.record
        is_bounded = self._state.rules.update.gradient_norm_max > 0
        if not (trailer.is_of_longest and is_bounded) or own is None or record is None:
            return trailer.is_of_longest
        is_before = own.clock_of(push.sequence) <= record.mode_clock
        return is_before or longest_of((own, *self._clocks.members)) == own

    def _start_ready(self) -> None:
        """Orders the updates whose turn it is, of all chunks."""
        for chunk_index in self._updates.waiting:
            self._start(chunk_index)

    def _start(self, chunk_index: int) -> None:
        """Orders the update of a chunk whose turn it is, if one waits."""
        if self._state.fence.is_frozen:
            return
        push = self._updates.take(chunk_index)
        if push is None:
            return
        entry, known = self._state.entry_of(push), self._open[push]
        assert entry is not None
        assert entry.trailer is not None
        # Of all workers that publish at one place of a script one counts, or each of
        # them would undo what was pushed since the one before.
        is_left_out = entry.trailer.publishes and not self._is_of_longest(
            push, entry.trailer
        )
        counted = {} if is_left_out else {push.worker: entry}
        self._state.effects.append(
            ApplyChunk(
                clock=self._clock_of(push),
                chunk_index=chunk_index,
                optimizer=entry.trailer.optimizer,
                contributions=contributions_to(chunk_index, counted),
                total_weight=entry.trailer.weight,
                hyperparameters=known.used.hyperparameters,
                spec_digest=known.used.spec_digest,
                pusher=push.worker,
                staleness=self._staleness_of(push, chunk_index),
                average=BufferAverage(
                    entry.trailer.averaged_buffers, max(1, len(self._clocks.members))
                ),
                gradient_scale=self._state.rules.update.scale_alone(
                    entry.trailer.gradient_norm
                ),
            )
        )

    def _staleness_of(self, push: PushId, chunk_index: int) -> int:
        """Updates of a chunk since the values that a push came from.

        Also those by pushes of which other chunks are still to be applied.
        """
        entries = (self._state.entry_of(o) for o in self._open if o != push)
        begun = (e is not None and chunk_index in e.applied for e in entries)
        return self.staleness.of_next(push.worker) + sum(begun)

    def _is_committed(self, push: PushId, entry: PushEntry) -> bool:
        """Whether a push may be applied as far as two-phase steps go."""
        known = self._state.of(push.worker)
        if known.committed_sequence == push.sequence:
            return True
        if not entry.is_complete:
            return False
        if self._clocks.member_of(push.worker) is None:
            return True  # its worker has ended, and every shard holds all of it
        choice = ClockChoice(self._clock_of(push), (push.worker,))
        if self._staged.get(push) != choice:
            self._staged[push] = choice
            known.numbered[choice.clock] = push.sequence
            self._state.effects.append(Staged(push=push, choice=choice))
        return False

    def _finish(self, push: PushId, done: DonePush) -> None:
        self._open.pop(push, None)
        self._staged.pop(push, None)
        self._state.of(push.worker).numbered.clear()
        self._state.end(push, done.outcome, done.nonfinite)
        self._blocked[push] = done
        self._clocks.note_progress()

    def _answer(self) -> bool:
        """Answers pushes whose values are new enough; asks whom the others lack."""
        if self._state.fence.is_frozen:
            return False
        is_moved = False
        for push, done in list(self._blocked.items()):
            ended = self._clocks.departure_of(push.worker)
            if ended is not None:
                # It counts, and yet no value may be sent: nobody keeps to the bound
                # for one that has ended.
                del self._blocked[push]
                refusal = closed_refusal(ended)
                self._state.effects.append(RefusePush(push=push, refusal=refusal))
                continue
            if not self.admits_pull(self._clock_of(push)):
                continue
            del self._blocked[push]
            is_moved = True
            self.note_values(push.worker)
            reply = self._state.reply(
                push,
                done.outcome,
                staleness=done.staleness,
                nonfinite=done.nonfinite,
            )
            self._state.finish(push, reply, needs_all=True)
        self._ask_idle()
        return is_moved

    def _ask_idle(self) -> None:
        """Asks workers without data for a push, when answers wait only for them."""
        lagging = self.laggards() if self._blocked else ()
        pushes = [PushId(m.worker, self._clocks.done_of(m.worker) + 1) for m in lagging]
        if not pushes or not all(map(self._state.on_shard.is_idle, pushes)):
            return
        waiting = self._state.entry_of(next(iter(self._blocked)))
        trailer = waiting.trailer if waiting is not None else None
        for member, push in zip(lagging, pushes, strict=True):
            self._state.of(push.worker).idle_sequence = 0
            self._state.effects.append(
                ContributionAwaited(
                    worker=push.worker,
                    clock=member.clock_of(push.sequence),
                    optimizer=trailer.optimizer if trailer is not None else "",
                )
            )

    def _clock_of(self, push: PushId) -> int:
        member = self._state.known_member(push.worker)
        assert member is not None
        return member.clock_of(push.sequence)
