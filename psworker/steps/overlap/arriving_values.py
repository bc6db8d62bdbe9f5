"""The values of a step that is still under way, as the next forward pass reads them.

Written by the thread that copies, read by the one that computes, in turn. A tensor that
was read since the step must not change
before the next one: the backward pass would use two versions of it. Values that come
for it even so (after an eviction, a dropped push or a change of mode) are written, and
what is computed meanwhile is a mix that must not count.
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from typing_extensions import override

from pswire.placement import Chunk, Placement
from pswire.schema import OptimizerSpec
from psworker.optim.model_schema import BoundSchema
from psworker.steps.overlap.copier import Copier
from psworker.tensors.value_store import CheckedChunk, ValueStore


class ArrivingValues(ValueStore):
    """The user's tensors, of which some still lack the values of the last step.

    Attributes:
        is_open: Whether a step is under way.
        is_mixed: Whether a tensor has changed after it was read.
        lock: Held by whoever uses them.
        turn: The same, which waits until something was written.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        placement: Placement,
        updated_entries: Collection[int],
        **kinds: Any,  # noqa: ANN401
    ) -> None:
        """Lacks nothing yet.

        Args:
            tensors: One for each entry of the schema.
            placement: How they are cut.
            updated_entries: Entries whose values may come with those of a step.
            kinds: As those of `ValueStore`.
        """
        super().__init__(tensors, placement, **kinds)
        # By itself, since C takes it: an interruption can't leave it taken.
        self.lock = threading.RLock()
        self.turn = threading.Condition(self.lock)
        self._expected: set[int] = set()
        self.expect(updated_entries)
        self._lacking: set[int] = set()
        self._read_entries: set[int] = set()
        self._marks: dict[tuple[int, int], int] = {}
        self.is_open = False
        self.is_mixed = False

    @classmethod
    def of(
        cls,
        bound: BoundSchema,
        placement: Placement,
        specs: Iterable[OptimizerSpec],
        *,
        buffers: Collection[int],
        local: Collection[int],
        **named: Any,  # noqa: ANN401
    ) -> Self:
        """The tensors of a job, as its optimizers update them.

        Args:
            bound: The models.
            placement: How tensors are cut.
            specs: All optimizers.
            buffers: As that of `ValueStore`.
            local: As that of `ValueStore`.
            named: As those of `ValueStore`.
        """
        held = {index for spec in specs for index in spec.entry_indexes}
        return cls(
            bound.tensors,
            placement,
            held.union(buffers).difference(local),
            buffers=buffers,
            local=local,
            **named,
        )

    def expect(self, entries: Iterable[int]) -> None:
        """Values of these entries may come too, from the next step on."""
        self._expected.update(self._chunks_of(entries))

    def open(self) -> None:
        """A step is under way: its values will come."""
        self._lacking = set(self._expected)
        self._read_entries.clear()
        self._marks.clear()
        self.is_open = True
        self.is_mixed = False

    def close(self) -> None:
        """The step is complete; nothing changes until the next one."""
        self.is_open = False

    @property
    def was_read(self) -> bool:
        """Whether anything was read since the step."""
        return bool(self._read_entries)

    def are_there(self, entry_indexes: Iterable[int]) -> bool:
        """Whether the values of these tensors have come, as far as any will."""
        return not any(
            index in self._lacking for index in self._chunks_of(entry_indexes)
        )

    def note_read(self, entry_indexes: Iterable[int]) -> None:
        """These tensors are about to be read."""
        self._read_entries.update(entry_indexes)

    @override
    def write_checked(self, checked: CheckedChunk) -> None:
        with self.lock:
            if self.is_open:
                self._write_open(checked)
            else:
                super().write_checked(checked)
            self.turn.notify_all()

    def _write_open(self, checked: CheckedChunk) -> None:
        index, mark = checked.chunk.index, checked.mark
        place = index, checked.part
        read = self._read_in(checked.chunk)
        if not (read and checked.pieces):
            super().write_checked(checked)
        elif self._marks.get(place) != mark:
            # Not as a change that autograd should know of: what it computes from
            # these tensors is thrown away, and must not end in an error.
            with _unsafe_preserve_version_counter(tuple(read)):
                super().write_checked(checked)
            self.is_mixed = True
        self._marks[place] = mark
        if self.base.is_lost:
            return  # what has come is not there yet
        if checked.is_last:
            self._lacking.discard(index)

    @override
    def flush(self) -> None:
        read = [self.tensors[entry].detach() for entry in self._read_entries]
        if not (self.is_open and read and self._staged):
            super().flush()
            return
        with _unsafe_preserve_version_counter(tuple(read)):
            super().flush()

    def _chunks_of(self, entries: Iterable[int]) -> Iterator[int]:
        """Indexes of the chunks that hold some of these tensors."""
        for entry in entries:
            for chunk in self.placement.chunks_by_entry.get(entry, ()):
                yield chunk.index

    def _read_in(self, chunk: Chunk) -> list[torch.Tensor]:
        """Tensors of a chunk that were read since the step."""
        return [
            self.tensors[piece.entry_index].detach()
            for piece in chunk.slices
            if piece.entry_index in self._read_entries
        ]


class StartedPush(Protocol):
    """What a writer asks of a push that has been started."""

    def write_next(self, store: ArrivingValues) -> bool:
        """Writes what comes next; `False` when nothing more does."""
        ...

    def cancel(self) -> None:
        """Ends it: nothing more comes."""
        ...


class ValueWriter:
    """Writes the values of one step at a time, beside the thread that computes.

    Values for a device are the exception: the thread that computes writes them when it
    waits for them, on the stream that its script has chosen.

    Its methods are for the thread that computes, which holds the values' `turn`.
    """

    def __init__(self, values: ArrivingValues, copier: Copier) -> None:
        """Writes nothing yet.

        Args:
            values: Where they go.
            copier: Writes those in host memory.
        """
        self._values = values
        self._copier = copier
        self._exchange: StartedPush | None = None
        self._is_beside = False
        self._is_writing = False
        self._error: BaseException | None = None

    def begin(self, exchange: StartedPush) -> None:
        """Writes what a push that has been started brings."""
        self._exchange = exchange
        # Again for each push: a script may move its model.
        self._is_beside = self._values.is_in_host
        if self._is_beside:
            self._is_writing = True
            try:
                self._copier.submit(partial(self._write_all, exchange))
            except BaseException:
                # Interrupted, before or after it was begun: it does not write when
                # this ends, whichever it was.
                exchange.cancel()
                self._copier.submit(lambda: None).result()
                self._is_writing = False
                raise

    def wait_next(self) -> bool:
        """Waits until more has been written; `False` once nothing more will be.

        Raises:
            PsError: What came could not be written. The push can go on.
        """
        if self._exchange is not None and not self._is_beside:
            return self._exchange.write_next(self._values)
        if self._is_writing:
            self._values.turn.wait()
            return True
        self.end()
        return False

    def end(self) -> None:
        """Returns once nothing is written any more.

        Raises:
            PsError: What came could not be written. The push can go on.
        """
        while self._is_writing:
            self._values.turn.wait()
        self._exchange = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_all(self, exchange: StartedPush) -> None:
        """Writes until the push is done or ended, in the thread that copies."""
        error: BaseException | None = None
        try:
            while exchange.write_next(self._values):
                pass
        except BaseException as caught:
            error = caught  # raised where the values are waited for
        with self._values.lock:
            self._error = error
            self._is_writing = False
            self._values.turn.notify_all()
