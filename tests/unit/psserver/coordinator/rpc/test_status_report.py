"""The status tells where each worker and shard stands, as the shards last told."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from psserver.coordinator.core.start_point import StartPoint
from psserver.coordinator.core.work import Work
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.rpc.public_control import PublicControl
from psserver.coordinator.rpc.shard_control import ShardControl
from psserver.coordinator.rpc.status_report import status_message
from psserver.coordinator.rpc.web_page import document_routes
from psserver.coordinator.storage.job_store import JobStore
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.monotonic import now_ms
from pswire.addresses import Address
from pswire.checkpoint.place import CheckpointPlace
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import Mode, ModeTerms, WorkerState
from pswire.reasons import ErrorReason, Refusal
from pswire.status_document import SCHEMA_VERSION
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1 import membership_pb2, push_pb2
from tests.doubles.core_values import TERMS
from tests.refusals import refused

if TYPE_CHECKING:
    from starlette.requests import Request

    from psserver.edge.guard import Context

# No handler here looks at them.
NO_CONTEXT = cast("Context", None)
NO_REQUEST = cast("Request", None)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[CoordinatorHost]:
    """A job of two shards and two workers, in BSP."""
    with JobStore(tmp_path) as store:
        host = CoordinatorHost(
            CoordinatorSettings(job_id="job", shard_count=2, workers_min=2), store
        )
        for index in range(2):
            slot = host.register_shard(process_id=f"s{index}", address=f"host:{index}")
            host.open_shard_watch(slot)
        for name in ("a", "b"):
            join(host, name)
        await report_fence(host)
        yield host


def join(host: CoordinatorHost, name: str) -> None:
    entry = host.register_worker(process_id=name, worker_id=name, address="host:9")
    host.open_worker_watch(entry)
    host.core.join(entry, terms=TERMS, loaders=(), now_ms=0)
    host.pump()


async def report_fence(host: CoordinatorHost) -> None:
    """Both shards answer the fence that is open; nothing was pushed yet."""
    fence = host.core.fence
    assert fence is not None
    for index in range(2):
        request = messages.ReportFenceRequest(
            job_id="job",
            shard_index=index,
            incarnation=1,
            process_id=f"s{index}",
            fence_number=fence.number,
            settled=True,
        )
        await ShardControl(host).report_fence(request, NO_CONTEXT)


def identity(name: str) -> membership_pb2.WorkerIdentity:
    return membership_pb2.WorkerIdentity(worker_id=name, incarnation=1)


async def tell(
    host: CoordinatorHost,
    index: int,
    done: dict[str, int],
    request: messages.ReportProgressRequest | None = None,
) -> None:
    """A shard tells where it stands."""
    told = messages.ReportProgressRequest(
        job_id="job",
        shard_index=index,
        incarnation=1,
        process_id=f"s{index}",
        done=[
            membership_pb2.WorkerSequence(worker=identity(name), sequence=sequence)
            for name, sequence in done.items()
        ],
    )
    if request is not None:
        told.MergeFrom(request)
    await ShardControl(host).report_progress(told, NO_CONTEXT)


async def status(host: CoordinatorHost) -> messages.GetStatusResponse:
    request = messages.GetStatusRequest(protocol_version=PROTOCOL_VERSION)
    return await PublicControl(host).get_status(request, NO_CONTEXT)


async def test_a_workers_clock_is_what_every_shard_has_of_it(
    host: CoordinatorHost,
) -> None:
    await tell(host, 0, {"a": 9, "b": 4})
    await tell(host, 1, {"a": 8, "b": 5})

    found = await status(host)

    assert [(w.clock, w.lead, w.rank) for w in found.workers] == [(8, 4, 0), (4, 0, 1)]
    assert [w.state for w in found.workers] == ["member", "member"]


async def test_before_a_shard_has_told_a_worker_is_where_it_joined(
    host: CoordinatorHost,
) -> None:
    await tell(host, 0, {"a": 9, "b": 4})
    found = await status(host)
    assert [(w.clock, w.lead) for w in found.workers] == [(0, 0), (0, 0)]


async def test_who_is_no_member_has_no_rank(host: CoordinatorHost) -> None:
    host.register_worker(process_id="c", worker_id="c", address="host:9")
    last = (await status(host)).workers[-1]
    assert (last.worker.worker_id, last.rank, last.state) == ("c", -1, "registered")


async def test_a_shard_tells_its_queue_and_the_staleness_of_pushes(
    host: CoordinatorHost,
) -> None:
    request = messages.ReportProgressRequest(
        applied_clock=4,
        frontier=4,
        version=12,
        queued_push_count=2,
        torn_step_count=1,
        staleness_counts=[5, 3, 1],
        parameter_bytes=12,
        optimizer_bytes=24,
        waiting=push_pb2.Waiting(
            clock=5,
            waited_ms=6_000,
            reason="contributions",
            awaited=[push_pb2.Awaited(name="b", clock=4, step_ms=7_000)],
        ),
    )
    await tell(host, 1, {"a": 4, "b": 4}, request)

    found = await status(host)

    other, shard = found.shards
    assert (shard.applied_clock, shard.frontier, shard.version) == (4, 4, 12)
    assert (shard.queued_push_count, shard.torn_step_count) == (2, 1)
    assert list(shard.staleness_counts) == [5, 3, 1]
    assert (shard.parameter_bytes, shard.optimizer_bytes) == (12, 24)
    assert shard.waiting.awaited[0].name == "b"
    assert shard.waiting.waited_ms == 6_000
    assert not other.HasField("waiting")
    assert found.waiting_for.startswith("b (alive, in step 5 for 7 s), for 6 s")


async def test_the_mode_is_that_of_now(host: CoordinatorHost) -> None:
    before = await status(host)
    assert (before.mode, before.workers_floor) == (membership_pb2.MODE_BSP, 2)
    host.core.set_mode(ModeTerms(Mode.SSP, 3), 0)
    host.pump()
    await report_fence(host)

    after = await status(host)

    assert (after.mode, after.staleness_bound) == (membership_pb2.MODE_SSP, 3)
    assert after.settings.mode == membership_pb2.MODE_BSP
    assert after.generation == before.generation + 1


async def test_a_mode_since_the_checkpoint_that_a_job_goes_on_from_is_its_first(
    host: CoordinatorHost,
) -> None:
    assert host.core.record is not None
    host.core.progress.record = replace(host.core.record, mode_clock=12)
    assert (await status(host)).mode_clock == 12
    # From BSP to quorum the numbering goes on, and what closes a clock changes.
    host.core.progress.record = replace(host.core.record, terms_clock=12)
    assert (await status(host)).mode_clock == 12
    host.core.progress.start_point = StartPoint(
        place=CheckpointPlace("", "step-000000000024"),
        clock=12,
        version=24,
        mode=Mode.BSP,
        staleness_bound=0,
        generation=1,
        incarnation_floor=0,
    )
    assert (await status(host)).mode_clock == 0


async def test_the_strategy_is_told_with_how_long_rounds_are_now(
    host: CoordinatorHost,
) -> None:
    def told() -> str:
        return status_message(host.core, host.waits, now_ms()).strategy

    members = host.core.roster.in_state(WorkerState.MEMBER)
    members[0].work.take(Work(round_step_count=7), 0)
    assert not told()
    host.core.model.terms = replace(TERMS, strategy="DiLoCo()")
    members[0].work.take(Work(round_step_count=1), 1)
    assert told() == "DiLoCo, outer SGD(lr=0.1), 1 local step a round"
    members[1].work.take(Work(round_step_count=50), 1)
    assert told() == "DiLoCo, outer SGD(lr=0.1), 1 to 50 local steps a round"


async def test_who_contradicts_itself_is_taken_out_and_named_once(
    host: CoordinatorHost, caplog: pytest.LogCaptureFixture
) -> None:
    join(host, "c")
    await report_fence(host)
    request = messages.ReportProgressRequest(contradicting=[identity("c")])
    for index in (0, 1):
        await tell(host, index, {}, request)

    fence = host.core.fence
    assert fence is not None
    assert [worker.worker_id for worker in fence.change.evictions] == ["c"]
    texts = [message for message in caplog.messages if "is to be evicted" in message]
    (text,) = texts
    assert "c/1 at host:9" in text
    assert "shard 0" in text

    await report_fence(host)
    assert (await status(host)).evicted_count == 1
    assert host.core.roster.in_state(WorkerState.EVICTED)


@pytest.mark.parametrize("path", ["/status", "/history"])
async def test_a_job_is_read_once_a_second_for_all_who_look(
    host: CoordinatorHost, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    public, counts = PublicControl(host), Counter[str]()

    def counted(name: str) -> None:
        read = getattr(public, name)

        def reading() -> object:
            counts[name] += 1
            return read()

        monkeypatch.setattr(public, name, reading)

    counted("status")
    counted("history")
    monkeypatch.setattr("psserver.edge.shared_answer.KEPT_S", 3600.0)
    routes = document_routes(public, Address("10.0.0.1", 7070))
    (route,) = [each for each in routes if each.path == path]
    answers = [await route.endpoint(NO_REQUEST) for _ in range(5)]
    assert counts == {path.removeprefix("/"): 1}
    assert len({each.body for each in answers}) == 1
    assert answers[0].headers["content-type"] == "application/json"
    assert json.loads(answers[0].body)["schema_version"] == SCHEMA_VERSION


async def set_mode(
    host: CoordinatorHost, mode: int, bound: int = 0
) -> messages.SetModeResponse:
    request = messages.SetModeRequest(
        protocol_version=PROTOCOL_VERSION,
        mode=membership_pb2.Mode.ValueType(mode),
        staleness_bound=bound,
        timeout_ms=50,
    )
    return await PublicControl(host).set_mode(request, NO_CONTEXT)


@pytest.mark.parametrize(
    ("mode", "bound"),
    [(0, 0), (77, 0), (1, 3), (3, 3), (2, -1), (2, 1_000_001)],
)
async def test_what_is_no_mode_is_refused(
    host: CoordinatorHost, mode: int, bound: int
) -> None:
    with refused(ErrorReason.MALFORMED_MESSAGE):
        await set_mode(host, mode, bound)
    assert host.core.fence is None


async def test_a_mode_that_does_not_come_in_time_names_who_is_silent(
    host: CoordinatorHost,
) -> None:
    with pytest.raises(Refusal) as caught:
        await set_mode(host, membership_pb2.MODE_SSP, 3)
    assert caught.value.reason is ErrorReason.WAIT_TIMEOUT
    assert "the change to SSP" in caught.value.message

    # What was asked for comes all the same, and asking again finds it.
    await report_fence(host)
    changed = await set_mode(host, membership_pb2.MODE_SSP, 3)
    assert changed.generation == 2
    assert host.core.fence is None


async def test_before_the_start_there_is_no_mode_to_change(tmp_path: Path) -> None:
    with JobStore(tmp_path / "new") as store:
        host = CoordinatorHost(CoordinatorSettings(job_id="job", shard_count=1), store)
        with pytest.raises(Refusal) as caught:
            await set_mode(host, membership_pb2.MODE_ASP)
    assert caught.value.reason is ErrorReason.NOT_STARTED


async def test_a_shard_hears_of_which_members_there_is_no_sign_of_life(
    host: CoordinatorHost,
) -> None:
    report = messages.ReportProgressRequest(
        job_id="job", shard_index=0, incarnation=1, process_id="s0"
    )
    entry = host.core.roster.present("b")
    assert entry is not None
    host.core.worker_broken(entry, now_ms() - 3_000)

    answer = await ShardControl(host).report_progress(report, NO_CONTEXT)

    lost = {each.worker.worker_id: each.lost_ms for each in answer.lost}
    assert lost.keys() >= {"b"}
    assert lost["b"] >= 3_000


async def test_the_time_in_a_step_begins_with_a_new_clock(
    host: CoordinatorHost,
) -> None:
    before = await status(host)
    assert [w.step_ms for w in before.workers] == [-1, -1]
    for index in range(2):
        await tell(host, index, {"a": 1, "b": 1})
    entry = host.core.roster.present("a")
    assert entry is not None
    entry.stepped_ms -= 1_000_000
    for index in range(2):
        await tell(host, index, {"a": 1, "b": 1})

    after = await status(host)
    assert after.workers[0].step_ms >= 1_000_000
    await tell(host, 0, {"a": 2, "b": 1})
    await tell(host, 1, {"a": 2, "b": 1})
    assert (await status(host)).workers[0].step_ms < 1_000_000
