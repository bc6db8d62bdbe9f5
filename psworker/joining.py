"""How a worker becomes a member: join, wait, seed or pull.

In the user's thread; whoever is waited for is named in the log.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pswire.frames import SEED_CHUNK_FIELD
from pswire.reasons import ErrorReason
from psworker.errors import StartTimeoutError
from psworker.event_loop import EventLoop
from psworker.exchange import receive
from psworker.jump import left_s
from psworker.optimizer_state import parts_of
from psworker.prepare import Prepared
from psworker.session import Session
from psworker.stand_in import StandIn
from psworker.tensor_chunks import ChunkSource
from psworker.transport.call_error import CallError
from psworker.transport.messages import seed_state_bytes
from psworker.transport.values import Member, PushReply, SeedOrder
from psworker.value_store import ValueStore
from psworker.waiting_log import WaitingLog

logger: Final = logging.getLogger("psworker")

_SEED_RETRY_S: Final = 0.5
_USELESS: Final = frozenset({ErrorReason.HYPERPARAMETER_INVALID})


@dataclass(frozen=True, slots=True)
class Joined:
    """A place in the job.

    Attributes:
        member: The place.
        generation: Of the record that gave it.
        replies: Of all shards to the pull of the values; empty for who seeded them.
        stand_in: Takes this worker's place until its first step, for one that has
            joined others who train already.
    """

    member: Member
    generation: int
    replies: Sequence[PushReply]
    stand_in: StandIn | None = None


class Joining:
    """One worker on its way into a job."""

    def __init__(self, loop: EventLoop, session: Session, store: ValueStore) -> None:
        self._loop = loop
        self._session = session
        self._store = store

    def join(self, given: Prepared, *, timeout_s: float) -> Joined:
        """Joins, and returns when the tensors hold the job's values.

        Raises:
            SchemaMismatchError: The job trains another model.
            OptimizerMismatchError: The job uses another optimizer.
            HyperparameterError: This worker seeds, and its optimizer state is of other
                switches than its groups.
            StartTimeoutError: The job did not start in time.
        """
        specs = list(given.specs.values())
        loaders = list(given.loaders)
        asking = self._session.join(
            given.bound.schema,
            specs,
            loaders,
            clip_grad_norm=given.clip_grad_norm,
            compression=str(given.compression),
        )
        self._loop.run(asking)
        deadline = time.monotonic() + timeout_s
        member, seeded = self._wait_member(given, deadline)
        record = self._session.membership.record
        assert record is not None, "only a record makes a member"
        if seeded is not None and seeded.fence_number == record.fence_number:
            self._loop.run(self._session.share_memory(self._store.placement))
            return Joined(member, record.generation, ())
        held_digests = self._store.digests()
        stand_in = None
        if not record.is_start:
            stand_in = self._loop.run(
                StandIn.begin(self._session, given.specs, self._store.placement)
            )
        try:
            self._loop.run(self._session.share_memory(self._store.placement))
            replies = receive(
                self._loop,
                lambda receiver: self._session.shards.pull(
                    record.generation,
                    member.clock_of(0),
                    receiver,
                    held_digests=held_digests,
                    timeout_s=left_s(deadline),
                ),
                self._store,
            )
        except BaseException:
            if stand_in is not None:
                self._loop.run(stand_in.abandon())
            raise
        return Joined(member, record.generation, replies, stand_in)

    def _wait_member(
        self, given: Prepared, deadline: float
    ) -> tuple[Member, SeedOrder | None]:
        """Waits for the start, seeding when told to; the order that was carried out.

        Raises:
            StartTimeoutError: It did not come in time.
        """
        log = WaitingLog()
        done: SeedOrder | None = None
        seeded: SeedOrder | None = None
        while True:
            waiting = self._session.wait_start(done, timeout_s=left_s(deadline))
            step = self._loop.run(waiting)
            if isinstance(step, Member):
                return step, seeded
            try:
                self._seed(step, given, deadline)
                done = seeded = step
            except CallError as error:
                if error.refusal and error.refusal.reason in _USELESS:
                    # Optimizer state that no shard can go on from, and no later order
                    # would make any better.
                    raise error.to_ps_error() from None
                if error.is_decided:
                    logger.warning("could not write the first values: %s", error)
                    done = step  # that order is over; a new one will come
                    continue
                # The order stands, so that `wait_start` returns it at once.
                if time.monotonic() >= deadline:
                    raise StartTimeoutError(
                        f"the job did not start in time: could not write the first "
                        f"values: {error}",
                        reason=ErrorReason.NOT_STARTED,
                    ) from None
                log.remind(f"a shard to take the first values ({error})")
                time.sleep(min(_SEED_RETRY_S, left_s(deadline)))

    def _seed(self, order: SeedOrder, given: Prepared, deadline: float) -> None:
        """Writes this worker's values, and optimizer state, to all shards.

        Raises:
            CallError: A shard did not take them.
        """
        source = ChunkSource(self._store.tensors)

        def messages_of(shard_index: int) -> Iterator[bytes]:
            # The state first: a shard that has all values is done.
            chunks = self._store.placement.chunks_by_shard[shard_index]
            for optimizer, states in given.states.items():
                for chunk in chunks:
                    for part in parts_of(chunk, states):
                        yield seed_state_bytes(optimizer, chunk.index, part)
            for chunk in chunks:
                yield source.encode(chunk, SEED_CHUNK_FIELD)

        seeding = self._session.shards.seed(
            order, messages_of, timeout_s=left_s(deadline)
        )
        self._loop.run(seeding)
