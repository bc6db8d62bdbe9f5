"""Somebody who sends pushes under another process's name, past its own numbering."""

from collections.abc import Sequence
from typing import Self

from pswire.membership import WorkerKey
from pswire.placement import place
from pswire.status_document import Document
from psworker import event_loop
from psworker.member.exchange import PushExchange
from psworker.member.membership import Membership
from psworker.member.shard_calls import ShardCalls
from psworker.optim.gradients import norm_of
from psworker.optim.prepare import sort_objects
from psworker.optim.step_contents import StepContents
from psworker.tensors.value_store import ValueStore
from psworker.transport.values import (
    PushHeader,
    PushReply,
    PushTrailer,
    ShardAddress,
    WorkerView,
)
from psworker.work_log import WorkLog
from tests.fault.training import make_model, mark

TIMEOUT_S = 30.0


class Forger:
    """Calls the shards of a job as if it were a worker. A context manager."""

    def __init__(self, status: Document, worker_id: str, incarnation: int) -> None:
        self._status = status
        self._worker = WorkerKey(worker_id, incarnation)
        self._loop = event_loop.acquire()
        self._calls = self._loop.run(self._make_calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._calls.close)
        event_loop.release()

    def push(self, sequence: int, clock: int, slot: int) -> Sequence[PushReply]:
        """Sends a whole push to all shards; their answers.

        Raises:
            PsError: As a worker would be told.
        """
        model, optimizer = make_model()
        mark(model, slot)
        given = sort_objects((model, optimizer))
        (spec,) = given.specs.values()
        placement = place(given.bound.schema, len(self._status["shards"]))
        gradients = [parameter.grad for parameter in model.parameters()]
        header = PushHeader(
            job_id=self._status["job"]["job_id"],
            optimizer=spec.name,
            worker=self._worker,
            generation=self._status["generation"],
            sequence=sequence,
            sequence_unacknowledged_min=sequence,
            clock=clock,
        )
        trailer = PushTrailer(
            weight=1.0,
            groups=tuple(tuple(g.hyperparameters) for g in spec.groups),
            is_finite=True,
            ranges=(),
            gradient_norm=norm_of(gradients),
        )
        exchange = PushExchange.begin(
            header,
            StepContents(optimizer=spec.name, tensors=gradients, trailer=trailer),
            placement=placement,
            incarnations=[shard["incarnation"] for shard in self._status["shards"]],
            loop=self._loop,
        )
        return exchange.run(
            self._loop,
            lambda receiver: self._calls.push(
                exchange.pushes, receiver, timeout_s=TIMEOUT_S
            ),
            ValueStore(given.bound.tensors, placement),
            WorkLog(),
        )

    async def _make_calls(self) -> ShardCalls:
        """On the loop, which its parts belong to."""
        membership = Membership(self._worker)
        shards = tuple(
            ShardAddress(shard["shard_index"], shard["address"], shard["incarnation"])
            for shard in self._status["shards"]
        )
        membership.take(WorkerView(None, shards))
        return ShardCalls(self._status["job"]["job_id"], membership)
