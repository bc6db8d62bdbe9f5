"""Which gradient segment a chunk of whom is in."""

import os
from collections.abc import Iterator

import pytest
import xxhash

from psserver.shard.host.hosted_members import HostedMembers
from psserver.shard.host.shared_segments import SharedSegments
from pswire.frames import (
    ENCODING_RAW,
    ChunkFrame,
    decode_chunk,
    encode_shared_chunk,
    split_fields,
)
from pswire.membership import WorkerKey
from pswire.placement import place
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from pswire.shared_memory.segments import (
    GradientLayout,
    MemorySegment,
    SegmentKind,
    SharedRun,
    boot_id,
)
from tests.doubles.core_values import record
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not boot_id(), reason="Linux only")

W0, W1 = WorkerKey("w0", 1), WorkerKey("w1", 1)
TOKEN = b"t" * 16
ENTRY = SchemaEntry(name="p", shape=(1000,), element_type=ElementType.FLOAT32)
PLACEMENT = place(ModelSchema((ENTRY,)), 1)
LAYOUT = GradientLayout.of(PLACEMENT, 0)


@pytest.fixture
def members() -> HostedMembers:
    return HostedMembers()


@pytest.fixture
def shared(members: HostedMembers) -> SharedSegments:
    shared = SharedSegments(members, is_wanted=True)
    shared.expect(TOKEN, W0, PLACEMENT, 0)
    return shared


@pytest.fixture
def segment(shared: SharedSegments) -> Iterator[MemorySegment]:
    segment = MemorySegment.create(SegmentKind.GRADIENT, LAYOUT.byte_count)
    assert shared.claim(TOKEN) == (W0, LAYOUT)
    adopted = MemorySegment.adopt(segment.header, os.dup(segment.descriptor))
    shared.put(W0, adopted)
    yield segment
    segment.close()


def frame(number: int, *, index: int = 0, length: int = 4000) -> ChunkFrame:
    message = encode_shared_chunk(
        index=index, presence=b"\x01", digest=7, shared=SharedRun(number, length)
    )
    ((_, view),) = split_fields(message)
    return decode_chunk(view)


def test_the_elements_are_those_in_the_segment(
    shared: SharedSegments, segment: MemorySegment
) -> None:
    data = bytes(range(250)) * 16
    segment.data[LAYOUT.run(0, 4000)] = data

    found = shared.resolve(W0, frame(segment.header.number))

    assert bytes(found.data) == data
    assert found.encoding == ENCODING_RAW
    assert found.shared is None
    # A later write is seen: the memory is the same.
    segment.data[LAYOUT.starts[0]] = 99
    assert found.data[0] == 99
    assert xxhash.xxh3_64_intdigest(found.data) != xxhash.xxh3_64_intdigest(data)


@pytest.mark.parametrize(
    ("worker", "offset"), [(W1, 0), (WorkerKey("w0", 2), 0), (W0, 1)]
)
def test_a_segment_that_was_not_handed_over_is_refused(
    shared: SharedSegments, segment: MemorySegment, worker: WorkerKey, offset: int
) -> None:
    number = segment.header.number + offset

    with refused(
        ErrorReason.SEGMENT_GONE,
        match=f"chunk 0 is said to be in the segment {number:016x} of shared memory, "
        f"which {worker} has not handed over, or has lost with its membership",
    ):
        shared.resolve(worker, frame(number))


@pytest.mark.parametrize(
    ("index", "length", "text"),
    [
        (0, 4001, "where it has room for 4000"),
        (1, 4, "has no place"),
        (0, 2**63, "room"),
    ],
)
def test_a_place_outside_of_the_segment_is_refused(
    shared: SharedSegments,
    segment: MemorySegment,
    index: int,
    length: int,
    text: str,
) -> None:
    wrong = frame(segment.header.number, index=index, length=length)

    with refused(ErrorReason.CHUNK_INVALID, text):
        shared.resolve(W0, wrong)


def test_a_token_is_good_for_once_and_for_one_worker(shared: SharedSegments) -> None:
    assert shared.claim(b"another".ljust(16)) is None
    assert shared.claim(TOKEN) == (W0, LAYOUT)
    assert shared.claim(TOKEN) is None

    shared.expect(TOKEN, W0, PLACEMENT, 0)
    shared.expect(b"newer".ljust(16), W0, PLACEMENT, 0)
    assert shared.claim(TOKEN) is None


def test_a_token_is_good_for_some_seconds(
    shared: SharedSegments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1e12)

    assert shared.claim(TOKEN) is None


def test_a_departed_worker_has_no_segment_but_what_is_staged_stays(
    members: HostedMembers, shared: SharedSegments, segment: MemorySegment
) -> None:
    segment.data[LAYOUT.run(0, 4000)] = b"s" * 4000
    shared.note_reader(W0)
    staged = shared.resolve(W0, frame(segment.header.number)).data

    assert members.reads_values(W0)

    members.follow(record({"w1": 0}), lambda _: 0)

    assert not members.reads_values(W0)
    with pytest.raises(Refusal, match="has not handed over"):
        shared.resolve(W0, frame(segment.header.number))
    segment.close()
    assert bytes(staged) == b"s" * 4000


def test_a_second_segment_counts_from_the_first_chunk_that_is_in_it(
    shared: SharedSegments, segment: MemorySegment
) -> None:
    segment.data[LAYOUT.run(0, 4000)] = b"a" * 4000
    unused, newest = (
        MemorySegment.create(SegmentKind.GRADIENT, LAYOUT.byte_count) for _ in range(2)
    )
    newest.data[LAYOUT.run(0, 4000)] = b"c" * 4000
    for each in (unused, newest):
        shared.put(W0, MemorySegment.adopt(each.header, os.dup(each.descriptor)))

    # Who has handed over another one has not taken the worker's away.
    assert bytes(shared.resolve(W0, frame(segment.header.number)).data) == b"a" * 4000
    with pytest.raises(Refusal, match="has not handed over"):
        shared.resolve(W0, frame(unused.header.number))
    with pytest.raises(Refusal, match="room"):
        shared.resolve(W0, frame(newest.header.number, length=4001))
    shared.resolve(W0, frame(segment.header.number))

    # As of the next leader of a host's group: the one before it is ended.
    assert bytes(shared.resolve(W0, frame(newest.header.number)).data) == b"c" * 4000
    with pytest.raises(Refusal, match="has not handed over"):
        shared.resolve(W0, frame(segment.header.number))
    unused.close()
    newest.close()


def test_only_who_has_handed_memory_over_reads_values(
    members: HostedMembers, shared: SharedSegments
) -> None:
    shared.note_reader(W1)

    assert not members.reads_values(W1)
