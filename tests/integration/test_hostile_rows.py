"""Sparse gradients that no honest client sends: refused, and nothing changed."""

from collections.abc import Callable, Iterator
from typing import Final

import grpc
import pytest
import torch
import xxhash
from torch import nn

from pswire.frames import ENCODING_SPARSE_ROWS
from pswire.reasons import ErrorReason
from tests.integration.forged_calls import (
    Messages,
    Target,
    check_goes_on,
    check_refused,
)
from tests.integration.job import Job, connect

ROWS: Final = 32
LENGTH: Final = 16
ROW_BYTES: Final = 4 * LENGTH


class Model(nn.Module):
    """In the first chunk: two tables, a layer and a buffer, of 512 elements each."""

    still: torch.Tensor
    rest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, LENGTH, sparse=True)
        self.other = nn.Embedding(ROWS, LENGTH, sparse=True)
        self.dense = nn.Parameter(torch.ones(512))
        self.register_buffer("still", torch.ones(ROWS, LENGTH))
        self.register_buffer("rest", torch.ones(2048))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with (
        Job(tmp_path_factory.mktemp("rows"), sockets=True) as job,
        connect(job, "w0") as ps,
    ):
        model = Model()
        adam = torch.optim.Adam([model.dense])
        sparse_adam = torch.optim.SparseAdam([model.table.weight], lr=0.5)
        adagrad = torch.optim.Adagrad([model.other.weight], lr=0.5)
        model, _, optimizer, _ = ps.prepare(
            model, adam, sparse_adam, adagrad, buffers="local"
        )

        def step() -> None:
            before = model.table.weight.detach().clone()
            model.table(torch.tensor([3, 30, 3])).sum().backward()
            optimizer.step()
            model.zero_grad()
            after = model.table.weight.detach()
            changed = (after != before).any(1).nonzero().flatten()
            assert changed.tolist() == [3, 30]

        step()
        with (
            grpc.insecure_channel(job.shard_addresses()[0]) as channel,
            grpc.insecure_channel(job.address) as coordinator,
        ):
            yield Target(job, channel, coordinator, step)


def numbers(*values: int) -> bytes:
    return b"".join(each.to_bytes(8, "little", signed=True) for each in values)


Make = Callable[[Target], Messages]


def sent(
    row_indices: bytes,
    byte_count: int,
    *,
    presence: bytes = b"\2",
    optimizer: str = "optimizer1",
    encoding: int = ENCODING_SPARSE_ROWS,
    **changes: int,
) -> Make:
    """A push of the first chunk: bits of `presence` are dense, table, other, still."""
    return lambda target: [
        target.header(optimizer=optimizer),
        target.chunk(
            target.own,
            presence=presence,
            row_indices=row_indices,
            data=bytes(byte_count),
            encoding=encoding,
            **changes,
        ),
    ]


PUSHES: Final[dict[str, tuple[ErrorReason, str, Make]]] = {
    "a row beyond the table": (
        ErrorReason.CHUNK_INVALID,
        "rows 5 to 32 of a slice of tensor 1 came, and rows 0 to 31 lie in it",
        sent(numbers(2, 5, ROWS), 2 * ROW_BYTES),
    ),
    "a negative row": (
        ErrorReason.CHUNK_INVALID,
        "rows -1 to 5",
        sent(numbers(2, -1, 5), 2 * ROW_BYTES),
    ),
    "the largest number for a row": (
        ErrorReason.CHUNK_INVALID,
        "rows 0 to 9223372036854775807",
        sent(numbers(2, 0, 2**63 - 1), 2 * ROW_BYTES),
    ),
    "rows out of order": (
        ErrorReason.CHUNK_INVALID,
        "are not sorted and unique",
        sent(numbers(2, 5, 4), 2 * ROW_BYTES),
    ),
    "a row twice": (
        ErrorReason.CHUNK_INVALID,
        "are not sorted and unique",
        sent(numbers(2, 5, 5), 2 * ROW_BYTES),
    ),
    "more rows announced than come": (
        ErrorReason.MALFORMED_MESSAGE,
        "announce 3 rows at byte 0, and 16 bytes follow",
        sent(numbers(3, 4, 5), 3 * ROW_BYTES),
    ),
    "rows without end announced": (
        ErrorReason.MALFORMED_MESSAGE,
        "announce 9223372036854775807 rows",
        sent(numbers(2**63 - 1, 4, 5), 2 * ROW_BYTES),
    ),
    "a count below -1": (
        ErrorReason.MALFORMED_MESSAGE,
        "announce -2 rows at byte 0",
        sent(numbers(-2), 0),
    ),
    "no row indices": (
        ErrorReason.MALFORMED_MESSAGE,
        "end at byte 0, before those of all slices",
        sent(b"", 0),
    ),
    "half a number": (
        ErrorReason.MALFORMED_MESSAGE,
        "end at byte 4",
        sent(numbers(0)[:4], 0),
    ),
    "row indices that go on": (
        ErrorReason.MALFORMED_MESSAGE,
        "go on for 16 bytes after the last slice",
        sent(numbers(1, 5, 0, 0), ROW_BYTES),
    ),
    "an element too few": (
        ErrorReason.CHUNK_INVALID,
        f"take {2 * ROW_BYTES} bytes, {2 * ROW_BYTES - 4} came",
        sent(numbers(2, 4, 5), 2 * ROW_BYTES - 4),
    ),
    "a row too many": (
        ErrorReason.CHUNK_INVALID,
        f"take {2 * ROW_BYTES} bytes, {3 * ROW_BYTES} came",
        sent(numbers(2, 4, 5), 3 * ROW_BYTES),
    ),
    "elements without rows": (
        ErrorReason.CHUNK_INVALID,
        f"take 0 bytes, {ROW_BYTES} came",
        sent(numbers(0), ROW_BYTES),
    ),
    "rows for an optimizer of dense gradients": (
        ErrorReason.CHUNK_INVALID,
        "'optimizer' is Adam: a slice of chunk 0 is sparse, and it takes dense",
        sent(numbers(1, 5), 4, presence=b"\1", optimizer="optimizer"),
    ),
    "a dense slice for an optimizer of sparse gradients": (
        ErrorReason.CHUNK_INVALID,
        "'optimizer1' is SparseAdam: a slice of chunk 0 is dense, and it takes sparse",
        sent(numbers(-1), 512 * 4),
    ),
    "a raw chunk for an optimizer of sparse gradients": (
        ErrorReason.CHUNK_INVALID,
        "'optimizer1' is SparseAdam: a slice of chunk 0 is dense, and it takes sparse",
        sent(b"", 512 * 4, encoding=1),
    ),
    "rows of a table of another optimizer": (
        ErrorReason.CHUNK_INVALID,
        "slice of tensor 2, which 'optimizer1' does not update",
        sent(numbers(1, 5), ROW_BYTES, presence=b"\4"),
    ),
    "rows of a buffer": (
        ErrorReason.CHUNK_INVALID,
        "'optimizer2' is Adagrad: a slice of chunk 0 is of a buffer, whose values come "
        "whole",
        sent(numbers(1, 5), ROW_BYTES, presence=b"\x08", optimizer="optimizer2"),
    ),
    "row indices of a raw chunk": (
        ErrorReason.MALFORMED_MESSAGE,
        "chunk 0 is raw and has 16 bytes of row indices",
        sent(numbers(1, 5), ROW_BYTES, encoding=1),
    ),
    "a digest that leaves the rows out": (
        ErrorReason.CHUNK_DIGEST_MISMATCH,
        "the 80 bytes of chunk 0",
        sent(
            numbers(1, 5),
            ROW_BYTES,
            digest=xxhash.xxh3_64_intdigest(bytes(ROW_BYTES)),
        ),
    ),
}


@pytest.mark.parametrize("method", ["PushPull", "Push"])
@pytest.mark.parametrize("case", PUSHES)
def test_forged_rows_change_nothing(target: Target, case: str, method: str) -> None:
    check_refused(target, method, PUSHES[case])


def test_training_goes_on_after_all_forged_rows(target: Target) -> None:
    check_goes_on(target, PUSHES.values())
