"""A watch tells everything, from its first message on."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from psserver.coordinator.core.fence import NUMBERS_PER_START
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.rpc.data_control import DataControl
from psserver.coordinator.rpc.public_control import PublicControl
from psserver.coordinator.rpc.shard_control import ShardControl
from psserver.coordinator.rpc.trace_reports import take_recorded
from psserver.coordinator.rpc.worker_control import WorkerControl
from psserver.coordinator.storage.job_store import JobStore
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.fence_report import FenceReport
from psserver.edge.limits import DEFAULT_LIMITS
from psserver.edge.monotonic import now_ms
from pswire.keepalive import Keepalive
from pswire.leased_data import DataReport
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import Record, WorkerState
from pswire.membership_codec import identity_message
from pswire.reasons import CATALOGUE, ErrorReason, Refusal
from pswire.schema_codec import optimizer_to_message, schema_to_message
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1 import membership_pb2
from tests.doubles.core_values import OPTIMIZERS, SCHEMA, TERMS
from tests.refusals import refused

if TYPE_CHECKING:
    from psserver.edge.guard import Context

# No handler of a watch looks at it.
NO_CONTEXT = cast("Context", None)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[CoordinatorHost]:
    with JobStore(tmp_path) as store:
        host = CoordinatorHost(CoordinatorSettings(job_id="job", shard_count=1), store)
        host.register_shard(process_id="shard", address="host:1")
        yield host


def watch_worker(
    host: CoordinatorHost, incarnation: int = 1, name: str = "a"
) -> AsyncIterator[messages.WatchWorkerResponse]:
    identity = membership_pb2.WorkerIdentity(worker_id=name, incarnation=incarnation)
    request = messages.WatchWorkerRequest(
        job_id="job", worker=identity, process_id={"a": "p", "b": "q"}[name]
    )
    return WorkerControl(host).watch_worker(request, NO_CONTEXT)


def watch_shard(host: CoordinatorHost) -> AsyncIterator[messages.WatchShardResponse]:
    request = messages.WatchShardRequest(
        job_id="job", shard_index=0, incarnation=1, process_id="shard"
    )
    return ShardControl(host).watch_shard(request, NO_CONTEXT)


async def stream_of(
    request: messages.JoinRequest,
) -> AsyncIterator[bytes]:
    yield request.SerializeToString()


def join(host: CoordinatorHost) -> None:
    entry = host.register_worker(process_id="p", worker_id="a", address="host:9")
    host.core.join(entry, terms=TERMS, loaders=(), now_ms=now_ms())
    host.pump()


def report(host: CoordinatorHost) -> None:
    fence = host.core.fence
    assert fence is not None
    found = FenceReport(
        fence_number=fence.number,
        holdings=(),
        trailer_clock_max=0,
        touched_clock_max=0,
        applied_clock=0,
    )
    host.core.report_fence(host.core.shards.slots[0], found, now_ms())
    host.pump()


async def test_a_record_is_told_that_was_written_while_the_view_was_on_its_way(
    host: CoordinatorHost,
) -> None:
    host.register_worker(process_id="p", worker_id="a", address="host:9")
    watch = watch_worker(host)
    assert not (await anext(watch)).view.HasField("record")

    await anext(watch_shard(host))
    join(host)
    report(host)

    assert (await anext(watch)).WhichOneof("event") == "seed"
    assert (await anext(watch)).view.record.generation == 1


async def test_who_waits_while_another_seeds_is_told_where_the_shards_are(
    host: CoordinatorHost,
) -> None:
    """It may have come before them, and is to say whether it reaches them."""
    host.register_worker(process_id="q", worker_id="b", address="host:8")
    watch = watch_worker(host, name="b")
    assert (await anext(watch)).WhichOneof("event") == "view"

    await anext(watch_shard(host))
    join(host)

    (told,) = (await anext(watch)).shard_map.shards
    assert told.address == host.core.shards.slots[0].address


async def test_a_fence_is_told_that_opens_while_the_view_is_on_its_way(
    host: CoordinatorHost,
) -> None:
    watch = watch_shard(host)
    assert not (await anext(watch)).view.HasField("schema")

    join(host)

    assert (await anext(watch)).view.HasField("schema")
    assert (await anext(watch)).prepare.fence_number == 1


async def test_a_shard_that_comes_back_is_told_of_the_fence_it_owes_a_report(
    host: CoordinatorHost,
) -> None:
    first = watch_shard(host)
    await anext(first)
    join(host)
    report(host)
    host.core.want_cut(now_ms())
    host.pump()

    again = watch_shard(host)

    view = (await anext(again)).view
    assert (view.record.generation, view.fence_closed_number) == (1, 1)
    assert (await anext(again)).prepare.fence_number == 2


async def test_who_comes_after_the_jobs_failure_is_told_of_it(
    host: CoordinatorHost,
) -> None:
    await anext(watch_shard(host))
    join(host)
    report(host)
    slot = host.core.shards.slots[0]
    host.core.shard_broken(slot, 0)
    host.core.tick(1_000_000)
    host.pump()

    watch = watch_shard(host)
    events = [await anext(watch), await anext(watch)]

    assert events[1].end.failed
    assert events[1].end.reason == "shard 0 at host:1 was lost"


async def test_a_start_that_is_over_is_not_watched(host: CoordinatorHost) -> None:
    entry = host.register_worker(process_id="p", worker_id="a", address="host:9")
    await host.leave(entry, 0, DataReport())

    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        await anext(watch_worker(host))
    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        await anext(watch_worker(host, incarnation=2))


async def test_the_watch_of_a_worker_that_leaves_ends_in_order(
    host: CoordinatorHost,
) -> None:
    """A stream that its client has to cancel leaves memory behind (grpc/grpc#43360)."""
    host.register_worker(process_id="p", worker_id="a", address="host:9")
    watch = watch_worker(host)
    await anext(watch)
    await anext(watch_shard(host))
    join(host)
    report(host)
    (entry,) = host.core.roster.in_state(WorkerState.MEMBER)
    leaving = asyncio.create_task(host.leave(entry, 0, DataReport()))
    await asyncio.sleep(0)
    report(host)
    await leaving

    async with asyncio.timeout(30):
        events = [event async for event in watch]

    members = [list(event.view.record.members) for event in events if event.view]
    assert members[-1] == []
    assert entry.broken_ms is not None, "as any watch that has ended"


async def test_who_has_outlived_an_earlier_job_is_refused_by_its_name(
    host: CoordinatorHost,
) -> None:
    """Worker ids, shard indexes and incarnations begin anew in every job."""
    host.register_worker(process_id="p", worker_id="a", address="host:9")
    worker = membership_pb2.WorkerIdentity(worker_id="a", incarnation=1)
    shard: Any = {"job_id": "older", "shard_index": 0, "incarnation": 1}
    shards, workers, data = ShardControl(host), WorkerControl(host), DataControl(host)
    own: Any = {"job_id": "older", "worker": worker}
    calls: list[Any] = [
        shards.report_fence(messages.ReportFenceRequest(**shard), NO_CONTEXT),
        shards.report_cut(messages.ReportCutRequest(**shard), NO_CONTEXT),
        shards.report_checkpoint(messages.ReportCheckpointRequest(**shard), NO_CONTEXT),
        shards.report_progress(messages.ReportProgressRequest(**shard), NO_CONTEXT),
        anext(shards.watch_shard(messages.WatchShardRequest(**shard), NO_CONTEXT)),
        workers.join(stream_of(messages.JoinRequest(**own)), NO_CONTEXT),
        workers.leave(messages.LeaveRequest(**own), NO_CONTEXT),
        data.open_epoch(messages.OpenEpochRequest(**own), NO_CONTEXT),
        data.lease_data(
            messages.LeaseDataRequest(**own, batch_count_max=1), NO_CONTEXT
        ),
        anext(workers.watch_worker(messages.WatchWorkerRequest(**own), NO_CONTEXT)),
    ]
    for call in calls:
        with refused(ErrorReason.JOB_UNKNOWN, "'older', this is job 'job'"):
            await call


@pytest.mark.parametrize("process_id", ["", "stranger"])
async def test_who_is_not_the_process_of_a_shard_neither_watches_nor_reports_as_it(
    host: CoordinatorHost, process_id: str
) -> None:
    """Job, index and incarnation are known to everybody."""
    watch = watch_shard(host)
    await anext(watch)
    forged: Any = {"job_id": "job", "incarnation": 1, "process_id": process_id}
    shards = ShardControl(host)
    calls: list[Any] = [
        anext(shards.watch_shard(messages.WatchShardRequest(**forged), NO_CONTEXT)),
        shards.report_fence(messages.ReportFenceRequest(**forged), NO_CONTEXT),
        shards.report_cut(messages.ReportCutRequest(**forged), NO_CONTEXT),
        shards.report_checkpoint(
            messages.ReportCheckpointRequest(**forged), NO_CONTEXT
        ),
        shards.report_progress(messages.ReportProgressRequest(**forged), NO_CONTEXT),
    ]
    for call in calls:
        with refused(
            ErrorReason.SHARD_INCARNATION_STALE, "another process than the caller"
        ):
            await call

    join(host)  # and the shard hears of all that follows
    assert (await anext(watch)).view.HasField("schema")
    assert host.core.shards.slots[0].is_watching


@pytest.mark.parametrize("process_id", ["", "stranger"])
async def test_who_is_not_the_process_of_a_worker_neither_watches_nor_leaves_as_it(
    host: CoordinatorHost, process_id: str
) -> None:
    watch = watch_shard(host)
    await anext(watch)
    join(host)
    report(host)
    entry = host.core.roster.present("a")
    assert entry is not None
    own = watch_worker(host)
    await anext(own)
    state = entry.state
    worker = identity_message(entry.worker)
    forged: Any = {"job_id": "job", "worker": worker, "process_id": process_id}
    workers = WorkerControl(host)
    silent = [messages.ShardSilence(shard_index=0, silent_ms=1_000_000)]
    calls: list[Any] = [
        anext(workers.watch_worker(messages.WatchWorkerRequest(**forged), NO_CONTEXT)),
        workers.leave(messages.LeaveRequest(**forged), NO_CONTEXT),
        workers.report_silence(
            messages.ReportSilenceRequest(**forged, shards=silent), NO_CONTEXT
        ),
        workers.report_work(messages.ReportWorkRequest(**forged), NO_CONTEXT),
    ]
    for call in calls:
        with refused(
            ErrorReason.WORKER_INCARNATION_STALE,
            match="another process than the caller",
        ):
            await asyncio.wait_for(call, 30)
    assert entry.state is state
    assert entry.broken_ms is None


METRICS = [messages.Metric(name=f"n{number}", value=1.0) for number in range(17)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"step_count": -1}, ErrorReason.MALFORMED_MESSAGE),
        ({"compute_s": float("nan")}, ErrorReason.MALFORMED_MESSAGE),
        ({"wait_s": float("inf")}, ErrorReason.MALFORMED_MESSAGE),
        ({"send_s": 1e308}, ErrorReason.MALFORMED_MESSAGE),
        (
            {
                "traffic": messages.Traffic(
                    encodings=[messages.EncodedBytes(encoding="a")]
                )
            },
            ErrorReason.MALFORMED_MESSAGE,
        ),
        (
            {"traffic": messages.Traffic(sent_bytes=-1)},
            ErrorReason.MALFORMED_MESSAGE,
        ),
        ({"metrics": METRICS}, ErrorReason.LIMIT_EXCEEDED),
        (
            {"metrics": [messages.Metric(name="x" * 65)]},
            ErrorReason.LIMIT_EXCEEDED,
        ),
        (
            {"metrics": [messages.Metric(name="<script>")]},
            ErrorReason.MALFORMED_MESSAGE,
        ),
        (
            {"traffic": messages.Traffic(encodings=[messages.EncodedBytes()] * 17)},
            ErrorReason.LIMIT_EXCEEDED,
        ),
    ],
)
async def test_a_report_of_work_that_makes_no_sense_changes_nothing(
    host: CoordinatorHost, fields: dict[str, Any], reason: ErrorReason
) -> None:
    watch = watch_shard(host)
    await anext(watch)
    join(host)
    report(host)
    entry = host.core.roster.present("a")
    assert entry is not None
    own: Any = {
        "job_id": "job",
        "worker": identity_message(entry.worker),
        "process_id": "p",
    }
    workers = WorkerControl(host)
    with refused(reason):
        await workers.report_work(
            messages.ReportWorkRequest(**own, **fields), NO_CONTEXT
        )
    assert entry.work.newest is None
    good = messages.ReportWorkRequest(
        **own, step_count=3, activity=messages.Activity.ValueType(99)
    )
    await workers.report_work(good, NO_CONTEXT)
    assert entry.work.newest is not None
    assert entry.work.newest.step_count == 3


async def test_events_come_as_they_happen_to_who_follows_them(
    host: CoordinatorHost,
) -> None:
    public = PublicControl(host)

    def watch(after: int, *, follow: bool) -> AsyncIterator[list[str]]:
        async def kinds() -> AsyncIterator[list[str]]:
            request = messages.WatchEventsRequest(
                protocol_version=PROTOCOL_VERSION, after=after, follow=follow
            )
            async for response in public.watch_events(request, NO_CONTEXT):
                yield [event.kind for event in response.events]

        return kinds()

    told = [kinds async for kinds in watch(0, follow=False)]
    assert told == [["coordinator_started", "shard_registered"]]
    follower = watch(1, follow=True)
    assert await anext(follower) == ["shard_registered"]
    next_ones = asyncio.ensure_future(anext(follower))
    await asyncio.sleep(0)
    shard = watch_shard(host)
    await anext(shard)
    join(host)
    report(host)
    assert await asyncio.wait_for(next_ones, 10) == ["job_started", "worker_joined"]
    after = host.core.events.newest_number
    assert [kinds async for kinds in watch(after, follow=False)] == []
    (event, *_) = public.events(0).events
    assert abs(event.at_unix_s - time.time()) < 600


async def test_a_new_coordinator_disowns_the_snapshots_of_the_one_before(
    tmp_path: Path,
) -> None:
    """Nobody else would ever free them."""
    settings = CoordinatorSettings(job_id="job", shard_count=1)
    for closed_id in (0, NUMBERS_PER_START):
        with JobStore(tmp_path) as store:
            host = CoordinatorHost(settings, store)
            host.register_shard(process_id="shard", address="host:1")
            view = (await anext(watch_shard(host))).view
        assert view.snapshot_closed_id == closed_id


async def test_after_standing_still_the_coordinator_has_patience(
    host: CoordinatorHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "psserver.coordinator.host.coordinator_host.coordinator_keepalive",
        lambda _: Keepalive(interval_ms=100, timeout_ms=100),
    )
    join(host)
    (entry,) = host.core.roster.in_state(WorkerState.JOINING)
    running = asyncio.create_task(host.run_clock())
    await asyncio.sleep(0)
    time.sleep(0.11)  # noqa: ASYNC251, as when the machine is suspended
    await host.changes.wait_until(ticked())
    running.cancel()
    at_ms = now_ms()
    host.core.worker_broken(entry, at_ms)
    host.core.tick(at_ms + 600)
    assert entry.state is WorkerState.JOINING
    host.core.tick(at_ms + 20_000)
    assert entry.state is WorkerState.LEFT


def ticked() -> Callable[[], bool]:
    """Whether anything was notified of since this was asked first."""
    asked = 0

    def has_been() -> bool:
        nonlocal asked
        asked += 1
        return asked > 1

    return has_been


@pytest.mark.parametrize("name", ["SIG TERM", "SIGTERM\n", "S" * 17, "15"])
async def test_what_is_no_name_of_a_signal_is_not_written_into_the_log(
    host: CoordinatorHost, name: str
) -> None:
    host.register_worker(process_id="p", worker_id="a", address="host:9")
    worker = membership_pb2.WorkerIdentity(worker_id="a", incarnation=1)
    leave = messages.LeaveRequest(
        job_id=host.core.settings.job_id, worker=worker, signal=name, process_id="p"
    )
    with refused(ErrorReason.MALFORMED_MESSAGE, "signal is no signal's name"):
        await WorkerControl(host).leave(leave, NO_CONTEXT)


async def test_a_worker_joins_by_one_call_at_a_time(host: CoordinatorHost) -> None:
    """What an earlier one has brought is not kept beside the newer one's."""
    worker = WorkerControl(host)
    entry = host.register_worker(process_id="p", worker_id="a", address="")
    identity = membership_pb2.WorkerIdentity(
        worker_id="a", incarnation=entry.worker.incarnation
    )
    request = messages.JoinRequest(job_id="job", worker=identity)
    is_begun, is_over = asyncio.Event(), asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield request.SerializeToString()
        is_begun.set()
        await is_over.wait()

    older = asyncio.ensure_future(worker.join(parts(), NO_CONTEXT))
    await asyncio.wait_for(is_begun.wait(), 30)
    with pytest.raises(Refusal):  # it has no model
        await worker.join(stream_of(request), NO_CONTEXT)

    with refused(ErrorReason.DRAINING, "a newer call"):
        await asyncio.wait_for(older, 30)


def join_request(host: CoordinatorHost, name: str) -> messages.JoinRequest:
    """Of a worker that is registered with it."""
    entry = host.register_worker(process_id=name, worker_id=name, address="host:9")
    return messages.JoinRequest(
        job_id="job",
        worker=identity_message(entry.worker),
        schema=schema_to_message(SCHEMA),
        optimizers=[optimizer_to_message(each) for each in OPTIMIZERS],
    )


class SilentJoin:
    """Parts of a request to join, and then nothing more."""

    def __init__(self, *parts: messages.JoinRequest) -> None:
        self._parts = parts
        self.read_count = 0
        self._is_over = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            self.read_count += 1
            yield part.SerializeToString()
        await self._is_over.wait()


async def test_strangers_who_join_and_are_silent_keep_out_no_worker(
    host: CoordinatorHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psserver.edge.staging_calls.SLOW_S", 0.01)
    worker = WorkerControl(host)
    silent = [
        SilentJoin(join_request(host, f"stranger{number}"))
        for number in range(DEFAULT_LIMITS.joins + 1)
    ]
    calls = [
        asyncio.ensure_future(worker.join(aiter(each), NO_CONTEXT)) for each in silent
    ]
    await asyncio.sleep(0)

    honest = worker.join(stream_of(join_request(host, "a")), NO_CONTEXT)
    assert not (await asyncio.wait_for(honest, 30)).order
    (entry,) = host.core.roster.in_state(WorkerState.JOINING)
    assert entry.worker.worker_id == "a"

    ended = [call for call in calls if call.done()]
    assert len(ended) == 2  # as many as needed
    for call in ended:
        with pytest.raises(Refusal, match="others bring a request to join") as caught:
            await call
        assert CATALOGUE[caught.value.reason].retryable
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_what_strangers_bring_to_join_with_is_limited_altogether(
    host: CoordinatorHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = messages.JoinRequest(schema=schema_to_message(SCHEMA))
    size = len(part.SerializeToString())
    host.limits = replace(DEFAULT_LIMITS, join_bytes=4 * size)
    worker = WorkerControl(host)
    silent = [
        SilentJoin(join_request(host, f"stranger{number}"), part, part)
        for number in range(8)
    ]
    calls = [
        asyncio.ensure_future(worker.join(aiter(each), NO_CONTEXT)) for each in silent
    ]
    for _ in range(50):
        await asyncio.sleep(0)

    assert all(each.read_count >= 2 for each in silent)
    assert [call.done() for call in calls].count(False) == 2
    # A request of one message needs none of it.
    honest = worker.join(stream_of(join_request(host, "a")), NO_CONTEXT)
    await asyncio.wait_for(honest, 30)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_trace_keeps_no_more_of_a_message_than_its_spans(
    host: CoordinatorHost,
) -> None:
    tracing = host.core.tracing
    tracing.begin(1, ["worker a"])
    sent = messages.Span(kind="send", step=3).SerializeToString()
    with_more = messages.Span.FromString(sent + b"\x9a\x06\x04more")  # field 99
    assert len(with_more.SerializeToString()) > len(sent)
    recorded = messages.RecordedSpans(number=tracing.number, spans=[with_more])
    take_recorded(host, "worker a", recorded)
    (kept,) = tracing.processes["worker a"].spans
    assert kept.SerializeToString() == sent


async def test_a_status_looks_for_no_member_among_all_others(
    host: CoordinatorHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand members that takes most of a second, for each who asks."""
    watch = watch_shard(host)
    await anext(watch)
    join(host)
    report(host)

    def never(*_: object) -> None:
        raise AssertionError("a member is looked for")

    monkeypatch.setattr(Record, "member_of", never)
    (worker,) = PublicControl(host).status().workers
    assert (worker.worker.worker_id, worker.rank) == ("a", 0)
