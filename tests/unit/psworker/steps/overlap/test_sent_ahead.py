"""A push whose chunks go before its step, and is dropped."""

import threading
from collections.abc import Iterator

import pytest
import torch

from pswire.membership import WorkerKey
from pswire.placement import place
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from psworker import event_loop
from psworker.event_loop import EventLoop
from psworker.steps.overlap.copier import ChunkCopies, Copier
from psworker.steps.overlap.sent_ahead import SentAhead
from psworker.transport.values import PushHeader

SCHEMA = ModelSchema(
    tuple(
        SchemaEntry(name=name, shape=(4,), element_type=kind)
        for name, kind in (("a", ElementType.FLOAT32), ("b", ElementType.FLOAT64))
    )
)
HEADER = PushHeader(
    job_id="job",
    optimizer="optimizer",
    worker=WorkerKey("w0", 1),
    generation=1,
    sequence=1,
    sequence_unacknowledged_min=1,
    clock=1,
)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    yield event_loop.acquire()
    event_loop.release()


class CountedCopies(ChunkCopies):
    """Counts chunks, and waits before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.count = 0

    def encode(self, *given: object, **named: object) -> bytes:
        self.count += 1
        self.begun.set()
        assert self.go_on.wait(10)
        return super().encode(*given, **named)  # type: ignore[arg-type]


def test_nothing_is_copied_any_more_once_it_is_dropped(loop: EventLoop) -> None:
    # Else a late copy would overwrite what the next push has put into shared memory.
    placement = place(SCHEMA, 1)
    copier, copies = Copier(), CountedCopies()
    copier.copies = copies
    ahead = SentAhead(HEADER, [1], placement, loop, copier)
    gradients = [torch.ones(4), torch.ones(4, dtype=torch.float64)]
    ahead.send(placement.chunks, gradients)
    assert copies.begun.wait(10)
    dropped = threading.Event()

    def drop() -> None:
        ahead.drop()
        dropped.set()

    dropping = threading.Thread(target=drop)
    dropping.start()
    assert not dropped.wait(0.05)  # the first copy is under way
    copies.go_on.set()
    dropping.join(10)

    assert dropped.is_set()
    assert copies.count == 1
    copier.close()
