"""How a worker joins, is evicted and rejoins.

To join: ask, wait, and seed the first values or pull the job's. An evicted worker that
lives rejoins, as a new start under the same id, inside `step()` or a loader. Its push
that was under way counts or is thrown away, as the record of the eviction has decided
on all shards alike; it is never sent under a new id. Source: docs/decisions/0007.

In the user's thread; whoever is waited for is named in the log.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import xxhash

from pswire.frames import SEED_CHUNK_FIELD
from pswire.membership import Member, Record, WorkerKey
from pswire.reasons import ErrorReason
from pswire.schema import SchemaEntry
from psworker.errors import (
    EvictedError,
    SchemaMismatchError,
    StartTimeoutError,
    StepTimeoutError,
    UnavailableError,
    WaitTimeoutError,
)
from psworker.event_loop import EventLoop
from psworker.member.catch_up import LateJoiner, left_s
from psworker.member.core import Begin, Seed, outcome_of_done
from psworker.member.exchange import receive
from psworker.member.outgoing_push import OutgoingPush
from psworker.member.session import Session
from psworker.optim.optimizer_state import parts_of
from psworker.optim.prepare import Prepared
from psworker.optim.push_result import PushResult, combine
from psworker.optim.write_guard import Samples
from psworker.tensors.tensor_chunks import ChunkSource
from psworker.tensors.value_store import ValueStore
from psworker.transport.calls import CallError, told_to_users
from psworker.transport.messages import seed_state_bytes
from psworker.transport.values import JoinAnswer, PushReply, SeedOrder
from psworker.transport.waiting_log import WaitingLog

logger: Final = logging.getLogger("psworker")

_SEED_RETRY_S: Final = 0.5
_USELESS: Final = frozenset({ErrorReason.HYPERPARAMETER_INVALID})


class OtherOrderError(SchemaMismatchError):
    """The job has the same tensors in another order, which holds for all workers.

    Attributes:
        positions: Position in the job of each tensor here.
    """

    def __init__(self, positions: Sequence[int], names: Sequence[str]) -> None:
        """Says how they differ.

        Args:
            positions: Position in the job of each tensor here.
            names: Of the tensors here.
        """
        here = next(i for i, position in enumerate(positions) if i != position)
        super().__init__(
            f"the job's model has the same tensors in another order: {names[here]!r} "
            f"is number {here} here and {positions[here]} there; a module that is "
            "filled from a set or from a listing of files has another order in each "
            "process: fill it from sorted(...)",
            reason=ErrorReason.SCHEMA_MISMATCH,
        )
        self.positions = positions


@dataclass(frozen=True, slots=True)
class Joined:
    """A place in the job.

    Attributes:
        member: The place.
        generation: Of the record that gave it.
        replies: Of all shards to the pull of the values; empty for who seeded them.
        late_joiner: Takes part until the first step of a worker that has joined others
            who train already.
        epochs: By loader, the first epoch that was not over.
        new_epochs: Those of these of which nothing was trained yet.
        checkpoint: The newest one, if it has registered state to be loaded.
        state: What it has.
        returned_to: Checkpoint that the job has returned to since this worker was a
            member; empty if it has to none.
    """

    member: Member
    generation: int
    replies: Sequence[PushReply] = ()
    late_joiner: LateJoiner | None = None
    epochs: Mapping[str, int] = field(default_factory=dict)
    new_epochs: Mapping[str, int] = field(default_factory=dict)
    checkpoint: str = ""
    state: bytes = b""
    returned_to: str = ""


@dataclass(frozen=True, slots=True)
class LostStart:
    """A start of this worker that was evicted.

    Attributes:
        worker: Which start.
        generation: Newest one that it was a member in.
        clock: Clocks that it had completed.
        pushes: Each shard's part of its push that was under way; empty if none was.
    """

    worker: WorkerKey
    generation: int
    clock: int
    pushes: Sequence[OutgoingPush] = ()

    @property
    def sequence(self) -> int:
        """Number of the push that was under way, 0 if none was."""
        return self.pushes[0].header.sequence if self.pushes else 0


class Joining:
    """One worker on its way into a job, for the first time or again."""

    def __init__(
        self, loop: EventLoop, session: Session, store: ValueStore, given: Prepared
    ) -> None:
        """Asks nobody yet.

        Args:
            loop: Where calls run.
            session: The worker.
            store: Takes the values.
            given: What `prepare` was given.
        """
        self._loop = loop
        self._session = session
        self._store = store
        self._given = given
        self._eviction_cause = ""
        self._epochs: dict[str, int] = {}
        self._new_epochs: dict[str, int] = {}
        self._answer = JoinAnswer()

    def join_first(self, deadline: float) -> Joined:
        """Joins; a worker that is evicted before that tries again as a new start.

        Raises:
            SchemaMismatchError: The job trains another model; it is an
                `OtherOrderError` where only the order of the tensors differs.
            OptimizerMismatchError: The job uses another optimizer.
            HyperparameterError: This worker seeds, and its optimizer state is of other
                switches than its groups.
            StartTimeoutError: The job did not start in time.
            EvictedError: A replacement has its place, or the time is over.
        """
        while True:
            try:
                return self._with_state(self._join(deadline))
            except EvictedError as error:
                if time.monotonic() >= deadline:
                    raise
                logger.warning("joining again: %s", error)
            with told_to_users():
                self._loop.run(lambda: self._session.renew(left_s(deadline)))

    def rejoin(self, lost: LostStart, timeout_s: float) -> tuple[Joined, PushResult]:
        """Joins as a new start under the same id; the model then holds its values.

        Called again after an error, it goes on where it stopped.

        Returns:
            The place, and what became of the push that was under way, with the numbers
            of the values that are in the model now.

        Raises:
            StepTimeoutError: It did not become a member in time.
            EvictedError: A replacement has its place.
            PsError: The job can't go on.
        """
        deadline = time.monotonic() + timeout_s
        if self._session.worker == lost.worker:
            self._eviction_cause = self._session.membership.eviction_cause
        try:
            while True:
                self._renew(lost, deadline)
                try:
                    return self._rejoin(lost, deadline)
                except EvictedError as error:
                    # Evicted before it was a member: it was stopped once more.
                    if time.monotonic() >= deadline:
                        raise StepTimeoutError(f"{error}") from None
        except (WaitTimeoutError, UnavailableError) as error:
            raise StepTimeoutError(
                f"worker {lost.worker.worker_id} was evicted and could not join again "
                f"within {timeout_s:g} s: {error}; step() again goes on trying",
                reason=error.reason,
                facts=error.facts,
            ) from None

    def _renew(self, lost: LostStart, deadline: float) -> None:
        """Registers a new start, unless an earlier call has done so.

        Raises:
            EvictedError: A replacement has this worker's place.
            PsError: The coordinator was not reached, or it refused.
        """
        session = self._session
        failure = session.membership.failure
        if session.worker == lost.worker or isinstance(failure, EvictedError):
            with told_to_users():
                self._loop.run(lambda: session.renew(left_s(deadline)))

    def _rejoin(self, lost: LostStart, deadline: float) -> tuple[Joined, PushResult]:
        joined = self._join(deadline)
        answer = self._answer
        if answer.start_checkpoint and answer.generation_before >= lost.generation:
            joined = self._with_state(joined)
            joined = replace(joined, returned_to=answer.start_checkpoint)
        try:
            outcome = self._loop.run(lambda: self._outcome_of_push(lost))
        except BaseException:
            if joined.late_joiner is not None:
                joined.late_joiner.abandon()
            raise
        push = replace(combine(joined.replies), outcome=outcome, rejoined=True)
        if not joined.returned_to:  # else it is said when the script goes on
            logger.warning(
                "worker %s was evicted in its start %d: %s; it has joined again as "
                "start %d, at clock %d of generation %d%s",
                lost.worker.worker_id,
                lost.worker.incarnation,
                self._eviction_cause,
                self._session.worker.incarnation,
                push.clock,
                joined.generation,
                f"; its push under way was {outcome}" if lost.pushes else "",
            )
        return joined, push

    def _with_state(self, joined: Joined) -> Joined:
        """A place, with what the checkpoint has that the job goes on from."""
        checkpoint = self._answer.checkpoint
        if not checkpoint:
            return joined
        state = self._loop.run(lambda: self._session.load_state(checkpoint))
        return replace(joined, checkpoint=checkpoint, state=state)

    async def _outcome_of_push(self, lost: LostStart) -> str:
        """What became of the push under way, as the record of the eviction says."""
        shards = self._session.shards
        if not lost.pushes or not await shards.was_done(lost.worker, lost.sequence):
            return "dropped"
        # A clock may have been skipped, or have not waited for it.
        return outcome_of_done(await shards.outcomes_of(lost.pushes))

    def _join(self, deadline: float) -> Joined:
        """Joins, and returns when the tensors hold the job's values."""
        given = self._given
        self._loop.run(
            lambda: self._session.membership.unless_failed(
                self._session.wait_shards(timeout_s=left_s(deadline))
            )
        )
        held_digests = self._store.digests()
        looks = Samples(self._store.tensors).looks()
        values_digest = _digest_of_all(held_digests)
        state_digest = self._state_digest()
        begin = self._become_member(values_digest, state_digest, deadline)
        record, pull = begin.record, begin.pull
        if pull is None:
            self._loop.run(lambda: self._session.share_memory(self._store.placement))
            return Joined(
                begin.member,
                record.generation,
                epochs=self._epochs,
                new_epochs=self._new_epochs,
            )
        late_joiner = None
        if not record.is_start:
            late_joiner = LateJoiner(
                self._loop, self._session, self._store, given.specs
            )
        try:
            self._loop.run(lambda: self._session.share_memory(self._store.placement))
            replies = receive(
                self._loop,
                lambda receiver: self._session.shards.pull(
                    pull.generation,
                    pull.clock,
                    receiver,
                    held_digests=held_digests,
                    timeout_s=left_s(deadline),
                ),
                self._store,
            )
        except BaseException:
            if late_joiner is not None:
                late_joiner.abandon()
            raise
        others = [
            entry
            for entry, old, new in zip(
                given.bound.schema.entries,
                looks,
                Samples(self._store.tensors).looks(),
                strict=True,
            )
            if old[2] != new[2]
        ]
        self._log_differing(record, others, values_digest, state_digest)
        return Joined(
            begin.member,
            record.generation,
            replies,
            late_joiner,
            self._epochs,
            self._new_epochs,
        )

    def _log_differing(
        self,
        record: Record,
        others: Sequence[SchemaEntry],
        values_digest: int,
        state_digest: int,
    ) -> None:
        """Says what this worker has brought and the job does not go on from."""
        first = self._session.membership.first_values
        if not record.is_start:
            if state_digest:
                logger.warning(
                    "this worker has joined a job that trains already: its optimizers "
                    "go on from the job's state, and what was loaded into %s before "
                    "prepare() is not used",
                    " and ".join(self._given.states),
                )
            return
        if first is None:
            return
        has_values = first.values_digest not in (0, values_digest)
        if state_digest and state_digest != first.state_digest:
            logger.warning(
                "the job starts with the values and the optimizer state of worker %s, "
                "and what was loaded into %s of this worker is other%s: load it on "
                "every worker before prepare(), or after prepare() on all of them",
                first.worker_id,
                " and ".join(self._given.states),
                f", as are its values of {_named(others)}" if has_values else "",
            )
        elif has_values:
            logger.info(
                "the job starts with the values of worker %s; those of this worker "
                "were others%s, as they are when each draws its own. If they were "
                "loaded, load them on every worker before prepare(), or call "
                "ps.publish(model) after it on all of them",
                first.worker_id,
                f" of {_named(others)}" if others else "",
            )

    def _state_digest(self) -> int:
        """Of the state of all optimizers, as it would be sent; 0 for none."""
        if not self._given.states:
            return 0
        digest = xxhash.xxh3_64()
        for optimizer, states in sorted(self._given.states.items()):
            digest.update(optimizer.encode())
            for chunk in self._store.placement.chunks:
                for part in parts_of(chunk, states):
                    digest.update(part)
        return digest.intdigest()

    def _become_member(
        self, values_digest: int, state_digest: int, deadline: float
    ) -> Begin:
        """Does what the core says until this worker has a place.

        Raises:
            StartTimeoutError: It was none in time.
        """
        session, log = self._session, WaitingLog()
        has_asked = False
        session.core.want_place()
        try:
            while True:
                left = left_s(deadline)
                step = self._loop.run(partial(session.wait_step, log, timeout_s=left))
                if isinstance(step, Begin):
                    return step
                if isinstance(step, Seed):
                    self._seed(step.order, deadline, log)
                    continue
                answer = self._ask(values_digest, state_digest, is_again=has_asked)
                session.core.joined(step)
                if not has_asked:
                    for note in answer.notes:
                        logger.warning("%s", note)
                    self._loop.run(session.shards.reach.watch)
                has_asked = True
        finally:
            self._loop.run(session.shards.reach.end_watch)

    def _ask(
        self, values_digest: int, state_digest: int, *, is_again: bool
    ) -> JoinAnswer:
        """Asks for a place."""
        given = self._given
        answer = self._loop.run(
            lambda: self._session.join(
                given.terms,
                list(given.loaders),
                values_digest=values_digest,
                state_digest=state_digest,
            )
        )
        if answer.order and is_again:
            raise SchemaMismatchError(
                "the coordinator was started again before the job began, and another "
                "worker, whose model has its tensors in another order, was first "
                "since: start this worker again"
            )
        if answer.order:
            entries = given.bound.schema.entries
            raise OtherOrderError(answer.order, [entry.name for entry in entries])
        self._epochs = dict(zip(given.loaders, answer.epochs, strict=True))
        self._new_epochs = {
            loader: epoch
            for (loader, epoch), is_new in zip(
                self._epochs.items(), answer.are_new, strict=True
            )
            if is_new
        }
        self._answer = answer
        return answer

    def _seed(self, order: SeedOrder, deadline: float, log: WaitingLog) -> None:
        """Writes the first values; where shards do not take them, waits a moment.

        Raises:
            StartTimeoutError: They have not taken them in time.
            PsError: No later order would make it any better.
        """
        try:
            self._write_first_values(order, deadline)
        except CallError as error:
            if error.refusal and error.refusal.reason in _USELESS:
                # Optimizer state that no shard can go on from.
                raise error.to_ps_error() from None
            # The order stands until the coordinator has another: also where a shard
            # refuses, which may not know of it yet.
            if time.monotonic() >= deadline:
                raise StartTimeoutError(
                    f"the job did not start in time: could not write the first "
                    f"values: {error}",
                    reason=ErrorReason.NOT_STARTED,
                ) from None
            awaited = f"a shard to take the first values ({error})"
            log.remind(self._session.missing if error.is_decided else awaited)
            time.sleep(min(_SEED_RETRY_S, left_s(deadline)))

    def _write_first_values(self, order: SeedOrder, deadline: float) -> None:
        """Writes this worker's values, and optimizer state, to all shards.

        Raises:
            CallError: A shard did not take them.
        """
        source, states_of = ChunkSource(self._store.tensors), self._given.states

        def messages_of(shard_index: int) -> Iterator[bytes]:
            # The state first: a shard that has all values is done.
            chunks = self._store.placement.chunks_by_shard[shard_index]
            for optimizer, states in states_of.items():
                for chunk in chunks:
                    for part in parts_of(chunk, states):
                        yield seed_state_bytes(optimizer, chunk.index, part)
            for chunk in chunks:
                yield source.encode(chunk, SEED_CHUNK_FIELD)

        self._loop.run(
            lambda: self._session.seed(order, messages_of, timeout_s=left_s(deadline))
        )


def _digest_of_all(digests: Sequence[Sequence[int]]) -> int:
    """One digest of those of all chunks of all shards."""
    flat = [each for own in digests for each in own]
    return xxhash.xxh3_64_intdigest(b"".join(each.to_bytes(8, "big") for each in flat))


def _named(entries: Sequence[SchemaEntry]) -> str:
    if not entries:
        return "some tensors"
    first = entries[0]
    more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
    return f"{first.name!r} of {first.model}{more}"
