"""Values that are written while the script goes on."""

import queue
import threading

import pytest
import torch

from pswire.frames import RESPONSE_CHUNK_FIELD, decode_chunk, split_fields
from psworker.errors import CorruptionError
from psworker.steps.overlap.arriving_values import ArrivingValues, ValueWriter
from psworker.steps.overlap.copier import Copier
from psworker.tensors.tensor_chunks import ChunkSource
from psworker.tensors.value_store import ValueStore
from tests.doubles.placed_tensors import placement_of


class Push:
    """A push whose answer comes when the test says so."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.placement = placement_of(tensors, 1)
        self._source = ChunkSource([torch.full_like(each, 3.0) for each in tensors])
        self._come: queue.Queue[int | BaseException | None] = queue.Queue()

    def come(self, chunk_index: int) -> None:
        self._come.put(chunk_index)

    def end(self, error: BaseException | None = None) -> None:
        self._come.put(error)

    def cancel(self) -> None:
        self.end(RuntimeError("cancelled"))

    def write_next(self, store: ValueStore) -> bool:
        item = self._come.get(timeout=10)
        if isinstance(item, BaseException):
            raise item
        if item is None:
            return False
        chunk = self.placement.chunks[item]
        ((_, view),) = split_fields(self._source.encode(chunk, RESPONSE_CHUNK_FIELD))
        store.write(decode_chunk(view))
        return True


class Step:
    """Two tensors of a chunk each, and a push of both under way."""

    def __init__(self) -> None:
        self.tensors = [torch.zeros(4), torch.zeros(4, dtype=torch.float64)]
        self.push = Push(self.tensors)
        self.values = ArrivingValues(self.tensors, self.push.placement, {0, 1})
        self.copier = Copier()
        self.writer = ValueWriter(self.values, self.copier)
        self.values.open()
        self.writer.begin(self.push)

    def wait(self, entry: int, came: threading.Event) -> None:
        with self.values.turn:
            while not self.values.are_there([entry]):
                assert self.writer.wait_next()
        came.set()


def test_a_tensor_is_there_as_soon_as_its_values_have_come() -> None:
    step = Step()
    came = threading.Event()
    waiting = threading.Thread(target=step.wait, args=(0, came))
    waiting.start()

    step.push.come(0)
    assert came.wait(10)
    waiting.join(10)

    assert step.tensors[0].tolist() == [3.0] * 4
    assert not step.values.are_there([1])
    step.push.come(1)
    step.push.end()
    with step.values.turn:
        step.writer.end()
    assert step.tensors[1].tolist() == [3.0] * 4
    step.copier.close()


def test_what_could_not_be_written_is_raised_once_where_it_is_waited_for() -> None:
    step = Step()
    step.push.end(CorruptionError("broken on its way"))

    with step.values.turn, pytest.raises(CorruptionError, match="broken on its way"):
        step.writer.end()
    with step.values.turn:
        step.writer.end()
        assert not step.writer.wait_next()
    step.copier.close()
