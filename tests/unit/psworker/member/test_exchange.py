"""A delivery that brings values faster than they are asked for."""

import asyncio
import gc
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch

from pswire.frames import RESPONSE_CHUNK_FIELD, encode_chunk, split_fields
from pswire.membership import WorkerKey
from pswire.placement import place
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from pswire.torch_types import buffer_of
from psworker.event_loop import EventLoop
from psworker.member.exchange import Incoming, PushExchange, receive
from psworker.optim.step_contents import StepContents
from psworker.tensors.value_store import ValueStore
from psworker.transport.ports import Receiver
from psworker.transport.values import PushHeader, PushReply, PushTrailer
from psworker.work_log import WorkLog

CHUNK_COUNT = 100
CHUNK_ELEMENTS = 16


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.stop()


def test_surplus_values_are_written_while_others_are_still_to_come(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MIN", 64)
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MAX", 64)
    entry = SchemaEntry(
        name="weight",
        shape=(CHUNK_COUNT, CHUNK_ELEMENTS),
        element_type=ElementType.FLOAT32,
    )
    placement = place(ModelSchema((entry,)), 1)
    weight = torch.zeros(CHUNK_COUNT, CHUNK_ELEMENTS)
    store = ValueStore([weight], placement)
    has_come, goes_on = asyncio.Event(), asyncio.Event()

    async def deliver(receiver: Receiver) -> Sequence[PushReply]:
        for index in range(CHUNK_COUNT):
            data = buffer_of(torch.full((CHUNK_ELEMENTS,), index + 1.0))
            message = encode_chunk(
                RESPONSE_CHUNK_FIELD, index=index, presence=b"\1", data=data
            )
            ((_, view),) = split_fields(message)
            receiver.on_chunk(view)
        has_come.set()
        await goes_on.wait()
        return []

    incoming = Incoming(loop, deliver)
    loop.run(has_come.wait, 5)
    incoming.write_surplus(store)
    written = weight[:, 0].tolist()
    incoming.write_surplus(store)
    assert weight[:, 0].tolist() == written
    loop.notify(goes_on)
    assert incoming.finish(store) == []

    assert written == [*range(1, 37), *[0.0] * 64]
    assert weight[:, 0].tolist() == [*range(1, CHUNK_COUNT + 1)]


def test_a_push_keeps_no_gradient_once_it_is_encoded(loop: EventLoop) -> None:
    # The script may need the memory for its next ones while the push is under way.
    entry = SchemaEntry(name="weight", shape=(4,), element_type=ElementType.FLOAT32)
    gradient = torch.ones(4)
    kept = weakref.ref(gradient)
    trailer = PushTrailer(weight=1.0, groups=(), is_finite=True, ranges=())
    header = PushHeader(
        job_id="job",
        optimizer="optimizer",
        worker=WorkerKey("w0", 1),
        generation=1,
        sequence=1,
        sequence_unacknowledged_min=1,
        clock=1,
    )
    exchange = PushExchange.begin(
        header,
        StepContents(optimizer="optimizer", tensors=[gradient], trailer=trailer),
        placement=place(ModelSchema((entry,)), 1),
        incarnations=[1],
        loop=loop,
    )
    del gradient
    goes_on = asyncio.Event()

    async def deliver(_: Receiver) -> Sequence[PushReply]:
        await goes_on.wait()
        return []

    assert kept() is not None
    exchange.start(loop, deliver)
    assert kept() is None

    loop.notify(goes_on)
    exchange.run(
        loop,
        deliver,
        ValueStore([torch.zeros(4)], place(ModelSchema((entry,)), 1)),
        WorkLog(),
    )


def test_what_delivers_is_freed_at_the_end_and_not_when_garbage_is(
    loop: EventLoop,
) -> None:
    # It holds a push's messages: the gradient once more, beside those of the next step.
    class Messages:
        pass

    messages = Messages()
    kept = weakref.ref(messages)

    async def deliver(_: Receiver, messages: Messages) -> Sequence[PushReply]:
        return []

    entry = SchemaEntry(name="weight", shape=(4,), element_type=ElementType.FLOAT32)
    store = ValueStore([torch.zeros(4)], place(ModelSchema((entry,)), 1))
    gc.disable()
    try:
        receive(loop, partial(deliver, messages=messages), store)
        del messages
        assert kept() is None
    finally:
        gc.enable()
