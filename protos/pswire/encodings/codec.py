"""What every way to turn elements into fewer bytes can do, with torch."""

from abc import ABC, abstractmethod
from typing import NoReturn

import numpy as np
import torch

from pswire.reasons import ErrorReason, Refusal


class Codec(ABC):
    """One way. Has no state: whoever encodes keeps what it leaves out.

    What is not finite is decoded as not finite, so that a receiver's check finds it.
    Its class is named for the encoding.
    """

    @abstractmethod
    def byte_count(self, element_count: int) -> int:
        """Bytes that `encode` makes of so many elements, none of them zero."""

    @abstractmethod
    def encode(self, values: torch.Tensor, *, seed: int | None = None) -> bytes:
        """Encodes elements.

        Args:
            values: 1-D float32, contiguous, on the CPU. Left as they are.
            seed: From which what is random follows, so that the same call makes the
                same bytes; `None` to round to the nearest.
        """

    def take(self, values: torch.Tensor, *, seed: int | None = None) -> bytes:
        """Encodes elements as `encode` does, and leaves in them what the bytes lack."""
        data = self.encode(values, seed=seed)
        lacking = values.numpy()
        decoded = self.decode(memoryview(data), len(lacking))
        np.subtract(lacking, decoded.numpy(), out=lacking)
        return data

    def add_to(self, values: torch.Tensor, data: memoryview) -> None:
        """Adds what `encode` made of as many elements to values: `added`, in place.

        Args:
            values: 1-D, contiguous, on the CPU, of a floating type of at most 32 bits.
            data: Encoded.

        Raises:
            Refusal: As `check`; nothing has changed.
        """
        values.copy_(added(values, self.decode(data, values.numel())))

    @abstractmethod
    def decode(self, data: memoryview, element_count: int) -> torch.Tensor:
        """Decodes what `encode` made of so many elements; 1-D float32, its own memory.

        Raises:
            Refusal: As `check`.
        """

    def check(self, data: memoryview, element_count: int) -> None:
        """Checks bytes of a stranger, allocating no more than a few times their size.

        Raises:
            Refusal: `CHUNK_INVALID`, with what was expected.
        """
        self.check_size(data, element_count, self.byte_count(element_count))

    def check_size(self, data: memoryview, element_count: int, byte_count: int) -> None:
        """Checks that there are as many bytes as so many elements take.

        Raises:
            Refusal: `CHUNK_INVALID`.
        """
        if len(data) != byte_count:
            self.refuse(
                f"{element_count} of them take {byte_count} bytes, {len(data)} came"
            )

    def refuse(self, what: str) -> NoReturn:
        """Refuses bytes.

        Raises:
            Refusal: `CHUNK_INVALID`.
        """
        name = type(self).__name__.lower()
        raise Refusal(ErrorReason.CHUNK_INVALID, f"elements encoded as {name}: {what}")


def added(values: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
    """The sum of values and a difference: the same bits on both sides, in float32.

    By numpy, in this thread alone: torch would share elements out to threads that then
    wait for each other, on cores that a shard or the script itself could use.

    Args:
        values: 1-D, of a floating type of at most 32 bits.
        difference: 1-D float32. Not used any more afterwards.
    """
    total = difference.numpy()
    np.add(values.float().numpy(), total, out=total)
    return difference.to(values.dtype)


def block_count(element_count: int, block: int) -> int:
    """Blocks of so many elements, of which the last may be smaller."""
    return -(-element_count // block)


def in_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """Elements, 1-D, in rows of `block`, filled up with zeros; may share memory."""
    missing = -values.numel() % block
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, block)
