"""Pushes weight 0 for a worker that has joined and does not come to its first step.

The others wait for a joiner's part in their clocks. Its first values may be long in
coming, and its first batch or a compiler too: after a while the event loop takes part
in its place, with nothing, until the user's thread is there. What was computed from
the values of before is then too old to count.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from pswire.placement import Placement
from pswire.schema import OptimizerSpec
from psworker.errors import StepTimeoutError
from psworker.member.core import Missed, NextPush
from psworker.member.outgoing_push import OutgoingPush
from psworker.member.session import Session
from psworker.transport.ports import Receiver
from psworker.transport.values import PushHeader, PushTrailer

JOIN_LIMIT_S: Final = 30.0
"""How long the others wait for a joiner, before it takes part with nothing."""

_PUSH_TIMEOUT_S: Final = 60.0


class StandIn:
    """Takes the place of one start of a worker. On the event loop.

    Attributes:
        sequence: Last push that it has made and that is settled, 0 for none.
    """

    def __init__(
        self,
        session: Session,
        specs: Mapping[str, OptimizerSpec],
        placement: Placement,
    ) -> None:
        """Stands in from `JOIN_LIMIT_S` after this call on.

        Args:
            session: The worker, which is a member.
            specs: Its optimizers by name.
            placement: How tensors are cut.
        """
        self._job_id = session.settings.job_id
        self._worker = session.worker
        self._core = session.core
        self._shards = session.shards
        self._specs = specs
        self._placement = placement
        self._pushing: asyncio.Task[None] | None = None
        self.sequence = 0
        self._standing = asyncio.ensure_future(self._stand())

    @classmethod
    async def begin(
        cls,
        session: Session,
        specs: Mapping[str, OptimizerSpec],
        placement: Placement,
    ) -> "StandIn":
        """As the constructor, for who is not on the event loop."""
        return cls(session, specs, placement)

    async def relieve(self) -> int:
        """Stops once the push that is under way is settled; how many there were.

        An error is not raised: the worker's own next call meets it.
        """
        self._standing.cancel()
        await asyncio.gather(self._standing, return_exceptions=True)
        if self._pushing is not None:
            await asyncio.wait({self._pushing})
            if not self._pushing.cancelled():
                self._pushing.exception()
        return self.sequence

    async def abandon(self) -> None:
        """Stops at once, for a worker that is at its end."""
        self._standing.cancel()
        if self._pushing is not None:
            self._pushing.cancel()
        await self.relieve()

    async def _stand(self) -> None:
        await asyncio.sleep(JOIN_LIMIT_S)
        while True:
            if self._core.member is None:
                return
            place = self._core.next_push()
            awaited = await self._shards.await_contribution(
                place.generation, place.clock, place.sequence
            )
            spec = self._specs.get(awaited.optimizer)
            self._pushing = asyncio.ensure_future(
                self._push(spec or next(iter(self._specs.values())), place)
            )
            await asyncio.shield(self._pushing)

    async def _push(self, spec: OptimizerSpec, place: NextPush) -> None:
        """Pushes nothing, until that is settled: an id is never given up."""
        header = PushHeader(
            job_id=self._job_id,
            optimizer=spec.name,
            worker=self._worker,
            generation=place.generation,
            sequence=place.sequence,
            sequence_unacknowledged_min=place.sequence_unacknowledged_min,
            clock=place.clock,
        )
        groups = tuple(group.hyperparameters for group in spec.groups)
        trailer = PushTrailer(weight=0.0, groups=groups, is_finite=True, ranges=())
        pushes = [
            OutgoingPush(
                header,
                trailer,
                shard_incarnation=self._shards.incarnation(shard_index),
                chunk_bitmap=(False,) * len(chunks),
                chunk_indexes=(),
                notify=asyncio.Event.set,
            )
            for shard_index, chunks in enumerate(self._placement.chunks_by_shard)
        ]
        receiver = Receiver(on_chunk=lambda _: None, on_waiting=lambda _: None)
        while True:
            try:
                replies = await self._shards.push(
                    pushes, receiver, timeout_s=_PUSH_TIMEOUT_S
                )
                break
            except StepTimeoutError:
                continue
        concluded = self._core.conclude(place.sequence, replies)
        self.sequence = (
            concluded.sequence if isinstance(concluded, Missed) else place.sequence
        )
        self._core.acknowledge(self.sequence)
