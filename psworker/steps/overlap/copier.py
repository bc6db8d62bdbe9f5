"""Copies of gradients beside what computes: by a thread, and by streams of devices.

numpy and xxhash release the interpreter's lock while they go through a chunk, so that
the other thread computes meanwhile.

A copy from a CUDA device runs on a stream of its own into pinned memory, after what
computes the data and beside what is computed later; an event is recorded when it is
done. No thread waits for the device.

Writes meanwhile make a copy a mix, which the step finds out by its digest.
"""

import numpy as np
import torch
import xxhash

from pswire.frames import REQUEST_CHUNK_FIELD, bits_to_bytes
from pswire.placement import Chunk
from pswire.torch_types import TORCH_DTYPES
from psworker.side_thread import SideThread
from psworker.tensors.tensor_chunks import Bytes, ChunkEncoder, dense_message, run_of
from psworker.transport.shard_segments import ShardSegments


class Copier(SideThread):
    """The thread that copies, or has copies made.

    Attributes:
        copies: What it copies gradients in host memory with.
        staging: Copies those of CUDA devices, which takes no thread.
    """

    def __init__(self) -> None:
        """Starts the thread."""
        super().__init__("psworker-copier")
        self.copies = ChunkCopies()
        self.staging = Staging()


class ChunkCopies:
    """Makes messages out of dense gradients in host memory, in one thread.

    These may change while they are read. So each is copied first, and the copy is
    hashed and sent: no chunk has another digest than that of its bytes.

    Attributes:
        digest: Of the elements of the last message, where that has them encoded.
    """

    def __init__(self) -> None:
        self.digest: int | None = None
        # As large as the largest chunk so far. It stays in the processor's cache, so
        # that the second copy, into the message, is nearly free.
        self._memory = np.empty(0, np.uint8)

    @torch.no_grad()
    def encode(
        self,
        chunk: Chunk,
        gradients: dict[int, torch.Tensor],
        encoder: ChunkEncoder | None = None,
        segments: ShardSegments | None = None,
    ) -> bytes:
        """A message that holds only this chunk, as its gradients are now.

        With an encoder `digest` is that of the elements then.

        Args:
            chunk: The chunk.
            gradients: By entry, those that are present. One with gaps is exchanged for
                its elements in order, for the other chunks that hold some of it.
            encoder: Makes fewer bytes of them.
            segments: Memory to copy it into, for a message that says so.
        """
        presence = tuple(piece.entry_index in gradients for piece in chunk.slices)
        room = segments.room(chunk) if segments is not None else None
        if segments is not None and room is not None:
            self.digest = None
            length = self._copy(chunk, gradients, room)
            return segments.message(chunk, bits_to_bytes(presence), length)
        self._grow(chunk.byte_count)
        data = self._memory[: self._copy(chunk, gradients, self._memory)].data
        self.digest = None if encoder is None else xxhash.xxh3_64_intdigest(data)
        return dense_message(REQUEST_CHUNK_FIELD, chunk, presence, data, encoder)

    def _copy(
        self, chunk: Chunk, gradients: dict[int, torch.Tensor], target: Bytes
    ) -> int:
        """Copies a chunk's present slices, in this thread alone; their bytes.

        `torch.cat` would hand a part of it to threads that spin while they wait.
        """
        dtype = TORCH_DTYPES[chunk.element_type]
        end = 0
        for piece in chunk.slices:
            gradient = gradients.get(piece.entry_index)
            if gradient is None:
                continue
            flat = gradients[piece.entry_index] = gradient.reshape(-1).contiguous()
            run = run_of(flat, piece).to(dtype)
            run_bytes = run.view(torch.uint8).numpy()
            start, end = end, end + len(run_bytes)
            np.copyto(target[start:end], run_bytes)
        return end

    def _grow(self, byte_count: int) -> None:
        if len(self._memory) < byte_count:
            self._memory = np.empty(byte_count, np.uint8)


class StagedCopy:
    """A copy that is under way."""

    def __init__(self, host: torch.Tensor, done: torch.cuda.Event) -> None:
        self._host = host
        self._done = done

    @property
    def is_there(self) -> bool:
        """Whether it is complete, without waiting."""
        return bool(self._done.query())

    def wait(self) -> torch.Tensor:
        """The data on the host, once all of it is there."""
        self._done.synchronize()
        return self._host


class Staging:
    """A stream for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @torch.no_grad()
    def begin(self, data: torch.Tensor) -> StagedCopy:
        """Begins to copy a tensor of a device, of any shape; returns at once."""
        stream = self._streams.get(data.device)
        if stream is None:
            stream = self._streams[data.device] = torch.cuda.Stream(data.device)
        # From torch's cache: pinned memory is made once and used again.
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(stream):
            host.copy_(data, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        # Not given to others before the copy has read it.
        data.record_stream(stream)
        return StagedCopy(host, done)
