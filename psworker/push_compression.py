"""Gradients in fewer bytes, and what these leave out.

What an encoding leaves out of a gradient, its residual, is added to the next one. A
residual is this worker's own. It changes when a push that was built with it is settled
and counts, and at no other time: bytes that are built anew, sent again or thrown away
leave it as it was. So a push that was dropped or skipped takes no more with it than
its own gradient, which is lost then with any other way to send it too. See
`docs/compression.md`.

In the thread that steps, but for `PushEncoder.encode`, which may be in any one thread.
"""

from collections.abc import Collection, Sequence
from itertools import compress

import torch
import xxhash

from pswire.compression import Compression, Method
from pswire.encodings.known import encoding_of
from pswire.placement import Chunk, Slice
from pswire.schema import EntryKind, ModelSchema
from pswire.torch_types import buffer_of
from psworker.transport.values import PushHeader

Residuals = dict[int, torch.Tensor]
"""What has not been sent, by entry of the schema: float32, 1-D, on the CPU."""


class PushCompression:
    """What a worker keeps for the gradients of all its pushes."""

    def __init__(self, compression: Compression, schema: ModelSchema) -> None:
        """Begins without residuals.

        Args:
            compression: As the job has chosen.
            schema: What is trained.
        """
        self._method = compression.push_method
        self._ratio = compression.ratio
        self._sizes = [entry.element_count for entry in schema.entries]
        self._buffers = frozenset(
            index
            for index, entry in enumerate(schema.entries)
            if entry.kind is EntryKind.BUFFER
        )
        self._residuals: dict[str, Residuals] = {}

    @property
    def byte_count(self) -> int:
        """Bytes of all residuals."""
        return sum(
            residual.nbytes
            for residuals in self._residuals.values()
            for residual in residuals.values()
        )

    def encoder(self, header: PushHeader, *, loss_scale: float) -> "PushEncoder | None":
        """Encodes the gradients of one push; None where they go as they are.

        Noise of rounding follows from the worker, the push and the chunk. Not from the
        job's id, which differs from run to run: a run that is repeated has the same
        numbers.

        Args:
            header: Of the push.
            loss_scale: Factor that its gradients carry.
        """
        if self._method is None:
            return None
        return PushEncoder(
            self._method,
            self._residuals.setdefault(header.optimizer, {}),
            ratio=self._ratio,
            buffer_entries=self._buffers,
            entry_sizes=self._sizes,
            seed_text=f"{header.worker.worker_id} {header.sequence}",
            loss_scale=loss_scale,
        )

    def residuals_of(self, optimizer: str) -> Residuals:
        """A copy of what an optimizer's gradients have not sent."""
        known = self._residuals.get(optimizer, {})
        return {index: residual.clone() for index, residual in known.items()}

    def load(self, optimizer: str, residuals: Residuals) -> None:
        """Goes on with what a worker has saved."""
        self._residuals[optimizer] = {
            index: residual.clone() for index, residual in residuals.items()
        }


class PushEncoder:
    """Encodes the gradients of one push.

    Attributes:
        loss_scale: Factor that they carry.
    """

    def __init__(
        self,
        method: Method,
        residuals: Residuals,
        *,
        ratio: float,
        buffer_entries: Collection[int],
        entry_sizes: Sequence[int],
        seed_text: str,
        loss_scale: float,
    ) -> None:
        """Encodes nothing yet.

        Args:
            method: How.
            residuals: Of the optimizer, as of the last push that counted.
            ratio: Share of the elements that `topk` sends.
            buffer_entries: Entries that are buffers, which go as they are.
            entry_sizes: Elements of each entry.
            seed_text: Names the push: what is random follows from it.
            loss_scale: Factor that the gradient carries; residuals carry none.
        """
        self._method = method
        self._encoding = encoding_of(method, ratio)
        self._residuals = residuals
        self._buffers = buffer_entries
        self._entry_sizes = entry_sizes
        self._seed_text = seed_text
        self.loss_scale = loss_scale or 1.0
        self._left: dict[int, tuple[list[Slice], torch.Tensor]] = {}

    def encode(
        self, chunk: Chunk, presence: Sequence[bool], data: torch.Tensor
    ) -> tuple[int, bytes] | None:
        """The data of a chunk in fewer bytes, with the number of their encoding.

        Again for the same chunk: in place of what it made before.

        Args:
            chunk: A dense chunk.
            presence: Which of its slices there are.
            data: Their elements, 1-D, on the CPU. Left as they are.

        Returns:
            None where the chunk is to go as it is.
        """
        if not self._method.takes(chunk.element_type):
            return None
        present = list(compress(chunk.slices, presence))
        pieces = [each for each in present if each.entry_index not in self._buffers]
        if not pieces or pieces != present[: len(pieces)]:
            return None  # of buffers alone; they come last in a schema
        count = sum(each.element_count for each in pieces)
        values = data[:count].float()
        if self._encoding.keeps_residual:
            values = self._with_residual(pieces, values)
        seed = xxhash.xxh3_64_intdigest(f"{self._seed_text} {chunk.index}".encode())
        encoded = self._encoding.encode(values, seed=seed)
        if self._encoding.keeps_residual:
            sent = self._encoding.decode(memoryview(encoded), count)
            left = torch.sub(values, sent, out=sent)
            self._left[chunk.index] = pieces, left.div_(self.loss_scale)
        buffers = buffer_of(data[count:])
        message = b"".join((buffers, encoded)) if len(buffers) else encoded
        return self._encoding.number, message

    def settle(self, *, is_counted: bool) -> None:
        """The push is settled: what it left out is the residual now, if it counts."""
        left, self._left = self._left, {}
        if not is_counted:
            return
        for pieces, values in left.values():
            parts = values.split([each.element_count for each in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                self._residual(piece.entry_index)[piece.start : piece.stop] = part

    def _with_residual(
        self, pieces: Sequence[Slice], values: torch.Tensor
    ) -> torch.Tensor:
        known = [
            residual[piece.start : piece.stop]
            if (residual := self._residuals.get(piece.entry_index)) is not None
            else torch.zeros(piece.element_count)
            for piece in pieces
        ]
        return torch.add(values, torch.cat(known), alpha=self.loss_scale)

    def _residual(self, entry_index: int) -> torch.Tensor:
        residual = self._residuals.get(entry_index)
        if residual is None:
            size = self._entry_sizes[entry_index]
            residual = self._residuals[entry_index] = torch.zeros(size)
        return residual
