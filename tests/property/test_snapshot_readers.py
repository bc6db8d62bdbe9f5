"""A reader that has a snapshot already reads what one without reads, in fewer bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import psworker
from pswire.frames import ChunkFrame
from pswire.torch_types import buffer_of
from psworker.snapshots.snapshot_image import SnapshotImage
from psworker.transport.calls import CallError
from tests.integration.job import Job, connect

PIECE_COUNT = 8
PIECE_ELEMENTS = 16_384
SIZE = PIECE_COUNT * PIECE_ELEMENTS

pieces = st.integers(0, PIECE_COUNT - 1)


class Values(nn.Module):
    """Chunks of one tensor, some of a second one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(SIZE))
        self.narrow = nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16))
        self.register_buffer("counts", torch.arange(5))


@contextmanager
def broken_at(frame_count: int) -> Iterator[None]:
    """The call breaks that brings so many frames, of all calls to come."""
    left, add = [frame_count], SnapshotImage.add

    def count(image: SnapshotImage, shard_index: int, frame: ChunkFrame) -> None:
        left[0] -= 1
        if not left[0]:
            raise CallError(
                "a shard", "UNAVAILABLE", "cut", refusal=None, decided=False
            )
        add(image, shard_index, frame)

    with mock.patch.object(SnapshotImage, "add", count):
        yield


def changed_bytes(job: Job, before: psworker.Snapshot, now: psworker.Snapshot) -> int:
    """Bytes of the chunks in which two snapshots differ."""
    entries = job.terms.schema.entries
    one, other = (
        [bytes(buffer_of(each.state_dict()[entry.name])) for entry in entries]
        for each in (before, now)
    )
    return sum(
        chunk.byte_count
        for host in job.shards
        for chunk in host.model.chunks
        if any(
            one[piece.entry_index][start:stop] != other[piece.entry_index][start:stop]
            for piece in chunk.slices
            for start, stop in [
                (
                    piece.start * chunk.element_type.byte_count,
                    piece.stop * chunk.element_type.byte_count,
                )
            ]
        )
    )


def test_a_reader_that_has_a_snapshot_reads_what_one_without_reads(
    tmp_path: Path,
) -> None:
    with (
        Job(tmp_path, shard_count=2, chunk_kib=64) as job,
        connect(job, "w0") as ps,
        psworker.SnapshotReader(job.address) as reader,
    ):
        model = Values()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = ps.prepare(model, optimizer)
        chunk_count = sum(len(host.model.chunks) for host in job.shards)
        assert chunk_count > PIECE_COUNT

        def train(changed: set[int]) -> None:
            for parameter in model.parameters():
                gradient = torch.zeros(PIECE_COUNT, PIECE_ELEMENTS)
                gradient[sorted(changed)] = 1.0
                parameter.grad = gradient.reshape(-1).to(parameter.dtype)
            optimizer.step()

        @settings(derandomize=True, deadline=None, max_examples=20)
        @given(
            steps=st.lists(st.sets(pieces), max_size=3),
            edited=st.sets(pieces),
            break_at=st.integers(0, chunk_count),
        )
        def check(steps: list[set[int]], edited: set[int], break_at: int) -> None:
            before = reader.latest(timeout=20)
            for changed in steps:
                train(changed)
            for index in edited:  # by whoever the snapshot is of
                start = index * PIECE_ELEMENTS
                before.state_dict()["wide"][start] += 0.5
            with broken_at(break_at):
                found = reader.latest(timeout=20, since=before, restart=False)
            exact = reader.latest(timeout=20)
            assert exact.received_byte_count == exact.byte_count == found.byte_count
            assert found.version == exact.version
            assert found.received_byte_count == changed_bytes(job, before, exact)
            for name, tensor in found.state_dict().items():
                assert torch.equal(tensor, exact.state_dict()[name])
                memory = before.state_dict()[name].untyped_storage().data_ptr()
                assert tensor.untyped_storage().data_ptr() != memory

        check()
