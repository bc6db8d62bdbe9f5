"""What a worker may rely on of a shard and of the coordinator, over each network.

The same calls go over sockets and through memory: what a test of the client finds with
one network holds with the other.
"""

import asyncio
import contextlib
import struct
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
import xxhash

from psserver.shard.core.push import PushId
from pswire.frames import (
    ENCODING_UNCHANGED,
    REQUEST_CHUNK_FIELD,
    REQUEST_HEADER_FIELD,
    REQUEST_TRAILER_FIELD,
    SEED_CHUNK_FIELD,
    ChunkFrame,
    bits_to_bytes,
    decode_chunk,
    encode_chunk,
    join_fields,
)
from pswire.job_settings import JobSettings
from pswire.leased_data import DataReport
from pswire.membership import ClockChoice, Outcome, Record, WorkerKey
from pswire.reasons import ErrorReason
from pswire.schema import ModelSchema
from psworker.transport import messages, values
from psworker.transport.calls import CallError, pause
from psworker.transport.control_client import ControlClient
from psworker.transport.ports import CoordinatorPort, Receiver, ShardPort, Traffic
from psworker.transport.shard_client import ShardClient
from psworker.transport.snapshot_client import SnapshotClient
from tests.doubles.children import wait_until
from tests.doubles.core_values import SCHEMA, TERMS, sgd
from tests.integration.job import Job

T = TypeVar("T")

TIMEOUT_S: Final = 30.0
RATE: Final = 0.5
FIRST: Final = (1.0, 2.0, 4.0)
ONES: Final = (1.0, 1.0, 1.0)


@pytest.fixture(params=[True, False], ids=["sockets", "memory"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, shard_count=1, sockets=request.param) as job:
        yield job


@dataclass
class Answers:
    """What comes before the reply.

    Attributes:
        chunks: Values.
        waiting: Whom the call waited for.
        staged: Clocks that wait for a commit.
        changed: Set whenever something comes.
    """

    chunks: list[tuple[float, ...]] = field(default_factory=list)
    waiting: list[values.Waiting] = field(default_factory=list)
    staged: list[ClockChoice] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def receiver(self) -> Receiver:
        return Receiver(self._take_chunk, self._take_waiting, self.staged.append)

    def _take_chunk(self, view: Any) -> None:  # noqa: ANN401, none is in shared memory
        self.chunks.append(floats_of(decode_chunk(view)))
        self.changed.set()

    def _take_waiting(self, waiting: values.Waiting) -> None:
        self.waiting.append(waiting)
        self.changed.set()


@dataclass
class Worker:
    """A worker that knows of nothing but the two ports."""

    coordinator: CoordinatorPort
    shard: ShardPort
    identity: WorkerKey
    settings: JobSettings
    events: AsyncGenerator[values.WatchEvent, None]
    generation: int = 1

    def header(self, step: int, **changes: Any) -> bytes:  # noqa: ANN401
        header = values.PushHeader(
            job_id=self.settings.job_id,
            optimizer="optimizer",
            worker=self.identity,
            generation=self.generation,
            sequence=step,
            sequence_unacknowledged_min=step,
            clock=step,
        )
        incarnation = self.shard.shard.incarnation
        data = messages.header_bytes(replace(header, **changes), incarnation)
        return join_fields((REQUEST_HEADER_FIELD, data))

    def push(self, sequence: int, gradient: tuple[float, ...] = ONES) -> list[bytes]:
        """The messages of a push, in the order of a stream."""
        return [self.header(sequence) + trailer(), chunk(REQUEST_CHUNK_FIELD, gradient)]

    async def push_pull(
        self, requests: list[bytes], answers: Answers | None = None
    ) -> values.PushReply:
        return await self.shard.push_pull(
            streamed(requests), (answers or Answers()).receiver(), timeout_s=TIMEOUT_S
        )


def trailer() -> bytes:
    names = sgd().hyperparameter_names
    whole = values.PushTrailer(
        weight=1.0,
        groups=(tuple(RATE if name == "lr" else 0.0 for name in names),),
        is_finite=True,
        ranges=(),
    )
    data = messages.trailer_bytes(whole, bits_to_bytes((True,)))
    return join_fields((REQUEST_TRAILER_FIELD, data))


def chunk(number: int, elements: tuple[float, ...]) -> bytes:
    return encode_chunk(
        number,
        index=0,
        presence=bits_to_bytes((True,)),
        data=struct.pack("<3f", *elements),
    )


def floats_of(frame: ChunkFrame) -> tuple[float, ...]:
    frame.verify()
    return struct.unpack("<3f", frame.data)


def after(steps: int) -> tuple[float, ...]:
    """The values after so many steps on gradients of ones."""
    return tuple(each - steps * RATE for each in FIRST)


async def streamed(requests: list[bytes]) -> AsyncGenerator[bytes, None]:
    for each in requests:
        yield each


async def next_of(events: AsyncGenerator[values.WatchEvent, None], kind: type[T]) -> T:
    """The next event of a kind."""
    async with asyncio.timeout(TIMEOUT_S):
        async for event in events:
            if isinstance(event, kind):
                return event
    raise AssertionError(f"the watch ended without a {kind.__name__}")


async def next_record(
    events: AsyncGenerator[values.WatchEvent, None],
) -> Record:
    """The next record, by itself or in a view of all that a worker has to know."""
    async with asyncio.timeout(TIMEOUT_S):
        async for event in events:
            if isinstance(event, values.WorkerView) and event.record is not None:
                return event.record
            if isinstance(event, Record):
                return event
    raise AssertionError("the watch ended without a record")


@contextlib.asynccontextmanager
async def registered(
    job: Job, worker_id: str
) -> AsyncIterator[tuple[CoordinatorPort, WorkerKey, JobSettings]]:
    coordinator: CoordinatorPort = ControlClient(job.address)
    try:
        identity, settings = await coordinator.register_worker(
            uuid.uuid4().hex, worker_id, timeout_s=TIMEOUT_S
        )
        yield coordinator, identity, settings
    finally:
        await coordinator.close()


@contextlib.asynccontextmanager
async def joined(job: Job, worker_id: str = "w0") -> AsyncIterator[Worker]:
    """A member, which seeds the job if it is the first."""
    async with registered(job, worker_id) as (coordinator, identity, settings):
        events = coordinator.watch_worker(identity)
        view = await next_of(events, values.WorkerView)
        shard: ShardPort = ShardClient(
            view.shards[0], settings.job_id, identity, Traffic()
        )
        worker = Worker(coordinator, shard, identity, settings, events)
        try:
            await coordinator.join(identity, TERMS, (), timeout_s=TIMEOUT_S)
            if view.record is None:
                order = await next_of(events, values.SeedOrder)
                seed = [chunk(SEED_CHUNK_FIELD, FIRST)]
                await shard.seed(order.fence_number, seed, timeout_s=TIMEOUT_S)
            record = await next_record(events)
            assert identity in [member.worker for member in record.members]
            worker.generation = record.generation
            yield worker
        finally:
            await events.aclose()
            await shard.close()


async def failure_of(call: Any) -> CallError:  # noqa: ANN401, any awaitable
    with pytest.raises(CallError) as raised:
        await call
    return raised.value


async def test_a_pull_brings_the_values_that_were_seeded(job: Job) -> None:
    async with joined(job) as worker:
        answers = Answers()
        reply = await worker.shard.pull(1, 0, answers.receiver(), timeout_s=TIMEOUT_S)
    assert (answers.chunks, reply.version) == ([FIRST], 0)


async def test_a_push_brings_the_values_after_its_step(job: Job) -> None:
    async with joined(job) as worker:
        for step in (1, 2):
            answers = Answers()
            reply = await worker.push_pull(worker.push(step), answers)
            assert reply.outcome is Outcome.APPLIED
            assert (answers.chunks, reply.clock) == ([after(step)], step)


async def test_pushes_of_one_message_share_a_call(job: Job) -> None:
    async with joined(job) as worker:
        for step in (1, 2, 3):
            answers = Answers()
            message = chunk(REQUEST_CHUNK_FIELD, ONES) + b"".join(
                [worker.header(step), trailer()]
            )
            reply = await worker.shard.push_pull_once(
                message, answers.receiver(), timeout_s=TIMEOUT_S
            )
            assert reply is not None
            assert (answers.chunks, reply.clock) == ([after(step)], step)


async def test_a_push_that_is_sent_again_counts_once(job: Job) -> None:
    async with joined(job) as worker:
        await worker.push_pull(worker.push(1))
        answers = Answers()
        again = await worker.push_pull(worker.push(1), answers)
        session = await worker.shard.get_session(worker.identity, timeout_s=TIMEOUT_S)
    assert again.outcome is Outcome.DUPLICATE
    assert (answers.chunks, session.sequence_done_max) == ([after(1)], 1)


async def test_a_push_goes_on_where_a_lost_call_ended(job: Job) -> None:
    """The shard keeps what came with the trailer, and says so when it is asked."""
    async with joined(job) as worker:
        opening, rest = worker.push(1)
        hold = asyncio.Event()

        async def half() -> AsyncGenerator[bytes, None]:
            yield opening
            await hold.wait()

        call = asyncio.ensure_future(
            worker.shard.push_pull(half(), Answers().receiver(), timeout_s=TIMEOUT_S)
        )
        await asyncio.to_thread(wait_opened, job)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        answers = Answers()
        await worker.push_pull([opening, rest], answers)
    assert answers.chunks == [after(1)]


def wait_opened(job: Job) -> None:
    """Returns once the shard has a part of a push."""
    (host,) = job.shards
    windows = host.model.core.on_shard
    first = WorkerKey("w0", 1)
    assert job.run(
        host.changes.wait_until(
            lambda: bool(windows.window_of(first).entries), TIMEOUT_S
        )
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"job_id": "another"}, ErrorReason.JOB_UNKNOWN),
        ({"sequence": 9}, ErrorReason.MALFORMED_MESSAGE),
        (
            {"worker": WorkerKey("w0", 9)},
            ErrorReason.WORKER_INCARNATION_STALE,
        ),
    ],
)
async def test_a_refused_push_says_why(
    job: Job, changes: dict[str, Any], reason: ErrorReason
) -> None:
    async with joined(job) as worker:
        _, rest = worker.push(1)
        opening = worker.header(1, **changes) + trailer()
        error = await failure_of(worker.push_pull([opening, rest]))
        assert error.refusal is not None
        assert (error.refusal.reason, error.is_decided) == (reason, True)
        # Nothing has changed: the right push is the first.
        answers = Answers()
        await worker.push_pull(worker.push(1), answers)
        assert answers.chunks == [after(1)]


async def test_chunks_that_are_damaged_are_refused(job: Job) -> None:
    async with joined(job) as worker:
        opening, rest = worker.push(1)
        damaged = rest[:-1] + bytes([rest[-1] ^ 1])
        error = await failure_of(worker.push_pull([opening, damaged]))
    assert error.refusal is not None
    assert error.refusal.reason is ErrorReason.CHUNK_DIGEST_MISMATCH


async def test_a_pull_that_waits_too_long_says_so_and_nothing_is_known(
    job: Job,
) -> None:
    async with joined(job) as worker:
        error = await failure_of(
            worker.shard.pull(1, 1, Answers().receiver(), timeout_s=0.2)
        )
    assert (error.code, error.is_decided) == ("DEADLINE_EXCEEDED", False)
    assert error.is_retryable


async def test_a_wait_names_whom_it_is_for(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psserver.shard.rpc.parameter_service.WAITING_INTERVAL_MS", 50)
    async with joined(job) as first, joined(job, "w1"):
        await next_record(first.events)
        first.generation = 2
        answers = Answers()
        call = asyncio.ensure_future(first.push_pull(first.push(1), answers))
        async with asyncio.timeout(TIMEOUT_S):
            while not answers.waiting:
                answers.changed.clear()
                await answers.changed.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert [each.name for each in answers.waiting[0].awaited] == ["w1"]


async def test_a_cancelled_call_ends_at_the_shard(job: Job) -> None:
    async with joined(job) as worker:
        (host,) = job.shards
        hold = asyncio.Event()

        async def half() -> AsyncGenerator[bytes, None]:
            yield worker.push(1)[0]
            await hold.wait()

        call = asyncio.ensure_future(
            worker.shard.push_pull(half(), Answers().receiver(), timeout_s=None)
        )
        await asyncio.to_thread(wait_opened, job)
        assert job.ask(lambda: has_call(job, 1))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(wait_no_call, job, 1)
    assert host.model.core.clocks.applied_clock == 0


def has_call(job: Job, sequence: int) -> bool:
    (host,) = job.shards
    return host.members.session_of(PushId(WorkerKey("w0", 1), sequence)) is not None


def wait_no_call(job: Job, sequence: int) -> None:
    wait_until(lambda: not job.ask(lambda: has_call(job, sequence)), "the call is over")


async def test_calls_of_a_shard_that_is_lost_leave_all_unknown(job: Job) -> None:
    async with joined(job) as worker:
        waiting = asyncio.ensure_future(
            worker.shard.pull(1, 1, Answers().receiver(), timeout_s=TIMEOUT_S)
        )
        await worker.shard.get_session(worker.identity, timeout_s=TIMEOUT_S)
        await asyncio.to_thread(job.end_shard, 0)
        for error in (
            await failure_of(waiting),
            await failure_of(worker.push_pull(worker.push(1))),
            await failure_of(
                worker.shard.get_session(worker.identity, timeout_s=TIMEOUT_S)
            ),
        ):
            assert (error.code, error.is_decided) == ("UNAVAILABLE", False)
            assert error.is_retryable


async def test_a_coordinator_that_is_lost_ends_the_watch_and_is_found_again(
    job: Job,
) -> None:
    async with joined(job) as worker:
        watched = asyncio.ensure_future(next_of(worker.events, values.JobEnd))
        await asyncio.to_thread(job.stop_coordinator)
        assert (await failure_of(watched)).is_retryable
        await asyncio.to_thread(job.start_coordinator)

        async def until_answered() -> values.WatchEvent:
            while True:
                with contextlib.suppress(CallError):
                    again = worker.coordinator.watch_worker(worker.identity)
                    async with contextlib.aclosing(again):
                        return await next_of(again, values.WorkerView)
                await pause(0)

        view = await asyncio.wait_for(until_answered(), TIMEOUT_S)
    assert isinstance(view, values.WorkerView)
    assert view.record is not None


async def test_who_comes_and_goes_is_told_on_the_watch(job: Job) -> None:
    async with joined(job) as first, joined(job, "w1") as second:
        record = await next_record(first.events)
        names = [member.worker.worker_id for member in record.members]
        assert names == ["w0", "w1"]
        await second.coordinator.leave(
            second.identity, 1, DataReport(), timeout_s=TIMEOUT_S
        )
        record = await next_record(first.events)
        assert [each.member.worker for each in record.departures] == [second.identity]
        assert not record.departures[0].evicted


async def test_a_worker_id_belongs_to_one_process(job: Job) -> None:
    async with registered(job, "w0"):
        coordinator = ControlClient(job.address)
        error = await failure_of(
            coordinator.register_worker("another", "w0", timeout_s=TIMEOUT_S)
        )
        await coordinator.close()
    assert error.refusal is not None
    assert error.refusal.reason is ErrorReason.WORKER_ID_TAKEN


async def test_another_model_is_refused_with_the_difference(job: Job) -> None:
    async with joined(job), registered(job, "w1") as (coordinator, identity, _):
        events = coordinator.watch_worker(identity)
        await next_of(events, values.WorkerView)
        shape = (4,)
        other = ModelSchema((replace(SCHEMA.entries[0], shape=shape),))
        error = await failure_of(
            coordinator.join(
                identity, replace(TERMS, schema=other), (), timeout_s=TIMEOUT_S
            )
        )
        await events.aclose()
    assert error.refusal is not None
    assert error.refusal.reason is ErrorReason.SCHEMA_MISMATCH
    assert "weight" in error.refusal.message


async def test_a_snapshot_is_read_from_the_shard(job: Job) -> None:
    async with joined(job) as worker:
        await worker.push_pull(worker.push(1))
        snapshot = await worker.coordinator.request_snapshot(
            -1, wait_s=TIMEOUT_S, timeout_s=TIMEOUT_S
        )
        await worker.push_pull(worker.push(2))
        reader = SnapshotClient(snapshot.shards[0])
        frames: list[tuple[float, ...]] = []
        try:
            await reader.pull_snapshot(
                snapshot.job_id,
                snapshot.snapshot_id,
                lambda frame: frames.append(floats_of(frame)),
                timeout_s=TIMEOUT_S,
            )
            held = xxhash.xxh3_64_intdigest(struct.pack("<3f", *after(1)))
            same: list[ChunkFrame] = []
            for digest in (held, held ^ 1):
                await reader.pull_snapshot(
                    snapshot.job_id,
                    snapshot.snapshot_id,
                    same.append,
                    timeout_s=TIMEOUT_S,
                    chunk_indexes=[0],
                    held_digests=[digest],
                )
            refused = await failure_of(
                reader.pull_snapshot(
                    snapshot.job_id,
                    snapshot.snapshot_id,
                    same.append,
                    timeout_s=TIMEOUT_S,
                    chunk_indexes=[0, 0],
                )
            )
            await worker.coordinator.release_snapshot(
                snapshot.snapshot_id, snapshot.pin_id, timeout_s=TIMEOUT_S
            )
            error = await failure_of(
                reader.pull_snapshot(
                    snapshot.job_id, 99, lambda _: None, timeout_s=TIMEOUT_S
                )
            )
        finally:
            await reader.close()
    assert (snapshot.version, frames) == (1, [after(1)])
    assert error.refusal is not None
    assert error.refusal.reason is ErrorReason.SNAPSHOT_GONE
    unchanged, raw = same
    assert (unchanged.encoding, unchanged.digest) == (ENCODING_UNCHANGED, held)
    assert (len(unchanged.data), floats_of(raw)) == (0, after(1))
    assert refused.refusal is not None
    assert refused.refusal.reason is ErrorReason.CHUNK_INVALID


async def test_an_optimizer_gives_its_settings(job: Job) -> None:
    async with joined(job) as worker:
        await worker.push_pull(worker.push(1))
        parts, settings = await worker.shard.pull_optimizer_state(
            "optimizer",
            1,
            1,
            spec_digest="",
            only_settings=True,
            on_waiting=lambda _: None,
            timeout_s=TIMEOUT_S,
        )
        lr = sgd().hyperparameter_names.index("lr")
        error = await failure_of(
            worker.shard.stage_optimizer_state(
                "another", 1, 2, [], spec_digest="", timeout_s=TIMEOUT_S
            )
        )
    assert (parts, settings.groups[0][lr]) == ([], RATE)
    assert error.is_decided


async def test_calls_on_a_closed_port_fail(job: Job) -> None:
    """Those that stream begin otherwise than those that do not, and fail alike."""
    async with joined(job) as worker:
        coordinator, shard = worker.coordinator, worker.shard
        await coordinator.close()
        await shard.close()
        receiver = Answers().receiver()
        calls = (
            shard.get_session(worker.identity, timeout_s=TIMEOUT_S),
            shard.push_pull(streamed(worker.push(1)), receiver, timeout_s=TIMEOUT_S),
            shard.pull_optimizer_state(
                "optimizer",
                1,
                1,
                spec_digest="",
                only_settings=True,
                on_waiting=lambda _: None,
                timeout_s=TIMEOUT_S,
            ),
            shard.stage_optimizer_state(
                "optimizer", 1, 2, [], spec_digest="", timeout_s=TIMEOUT_S
            ),
            shard.seed(1, [], timeout_s=TIMEOUT_S),
            coordinator.lease_ttl_ms(timeout_s=TIMEOUT_S),
            coordinator.request_snapshot(-1, wait_s=0, timeout_s=TIMEOUT_S),
            anext(coordinator.watch_worker(worker.identity)),
        )
        codes = [(await failure_of(call)).code for call in calls]
    assert codes == ["CANCELLED"] * len(calls)
