"""Snapshots while training goes on: one version of all shards, always."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psworker
from psserver.edge.monotonic import now_ms
from pswire.addresses import Address, parse_address
from pswire.frames import ChunkFrame, decode_chunk
from psworker.snapshots import snapshot
from psworker.snapshots.snapshot import SnapshotReader
from psworker.snapshots.snapshot_image import SnapshotImage
from psworker.transport.calls import CallError
from tests.doubles.fault_proxy import DOWN, FaultProxy
from tests.integration.job import Crew, Job, connect

SNAPSHOT_COUNT = 40


class Ones(nn.Module):
    """Zeros at first, and a gradient of ones: after clock c all is minus c."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((100, 50), (3,), (), (40, 40), (0, 2))
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.tied = self.parts[0]
        self.register_buffer("counts", torch.arange(5))


def test_each_snapshot_is_of_exactly_one_version(tmp_path: Path) -> None:
    stopped = threading.Event()

    def train(worker_id: str) -> int:
        with connect(job, worker_id) as ps:
            model = Ones()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            model, optimizer = ps.prepare(model, optimizer)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            while not stopped.is_set():
                optimizer.step()
            return ps.clock

    versions = []
    with (
        Job(tmp_path, shard_count=3, workers_min=1) as job,
        Crew({"w0": train}) as crew,
        psworker.SnapshotReader(job.address) as reader,
    ):
        try:
            version = 0
            for _ in range(SNAPSHOT_COUNT):
                snapshot = reader.wait_newer(version, timeout=20)
                version = snapshot.version
                versions.append(version)
                state = snapshot.state_dict()
                Ones().load_state_dict(state, strict=True)
                values = {
                    value
                    for name, tensor in state.items()
                    if name != "counts"
                    for value in tensor.flatten().tolist()
                }
                assert values == {-float(snapshot.clock)}
                assert snapshot.version == snapshot.clock
        finally:
            stopped.set()
        final_clock = crew.results()["w0"]
        final = reader.latest(timeout=20)
    assert versions == sorted(set(versions))
    assert final.clock == final_clock


def test_a_reader_is_given_time_for_the_bytes_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 KB, at a byte a millisecond."""
    monkeypatch.setattr("psserver.coordinator.core.snapshots.READER_BYTES_PER_MS", 1)
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = nn.Linear(1_000, 1, bias=False)
        ps.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        requests = job.coordinator.snapshots
        asked_ms = now_ms()
        found = job.run(requests.get(newer_than=-1, timeout_s=30))
        least_ms = job.coordinator.core.settings.pin_ttl_ms
        assert found.ttl_ms == least_ms + 4_000
        assert found.entry.pins[found.pin_id] - asked_ms >= found.ttl_ms


def test_a_connection_that_breaks_while_a_snapshot_is_read_costs_what_lacks(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        proxies: list[FaultProxy] = []

        def through_proxy(address: Address) -> Address:
            proxies.append(stack.enter_context(FaultProxy(str(address))))
            return parse_address(proxies[-1].address)

        job = stack.enter_context(
            Job(tmp_path, shard_count=1, advertise={0: through_proxy})
        )
        with connect(job, "w0") as ps:
            model = nn.Linear(1_000, 2_000, bias=False)
            ps.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            (proxy,) = proxies
            with psworker.SnapshotReader(job.address) as reader:
                proxy.cut_after(5 << 20, DOWN)
                found = reader.latest(restart=False)
            assert proxy.cut_count == 1
            assert torch.equal(found.state_dict()["weight"], model.weight)
            # At most the chunk that was under way came twice.
            largest = max(chunk.byte_count for chunk in job.shards[0].model.chunks)
            assert found.byte_count <= found.received_byte_count
            assert found.received_byte_count < found.byte_count + largest


class Ten(nn.Module):
    """Ten chunks on each of two shards, and a gradient of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20, 1 << 14))

    def trained(self, ps: psworker.Connection) -> Callable[[], None]:
        """Makes a step."""
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        _, prepared = ps.prepare(self, optimizer)
        self.weight.grad = torch.ones_like(self.weight)

        def step() -> None:
            prepared.step()

        return step


@pytest.mark.parametrize("restart", [True, False])
def test_of_a_snapshot_that_is_gone_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, restart: bool
) -> None:
    """The newest is read from its beginning, or an error names the one that is gone."""
    add, request = SnapshotImage.add, SnapshotReader._request
    requested: list[int] = []

    def release(image: SnapshotImage, shard_index: int, frame: ChunkFrame) -> None:
        add(image, shard_index, frame)
        if len(requested) == 1 and len(image.lacking(shard_index)) == 7:
            monkeypatch.setattr(SnapshotImage, "add", add)
            for host in job.shards:
                job.ask(lambda host=host: host.release_image(1))  # type: ignore[misc]
            raise CallError("shard", "UNAVAILABLE", "cut", refusal=None, decided=False)

    async def note(*arguments: Any) -> Any:  # noqa: ANN401, as the method has them
        requested.append(len(requested))
        if len(requested) > 1:
            await asyncio.to_thread(step)
        return await request(*arguments)

    monkeypatch.setattr(SnapshotImage, "add", release)
    monkeypatch.setattr(SnapshotReader, "_request", note)
    with (
        Job(tmp_path, shard_count=2, chunk_kib=64) as job,
        connect(job, "w0") as ps,
        SnapshotReader(job.address) as reader,
    ):
        step = Ten().trained(ps)
        step()
        if not restart:
            with pytest.raises(psworker.SnapshotGoneError, match="snapshot 1 is not"):
                reader.latest(restart=False)
            return
        found = reader.latest()
    assert found.version == 2
    assert (found.state_dict()["weight"] == -2).all()
    assert len(requested) == 2


@pytest.mark.parametrize("damaged_count", [1, 2])
def test_a_damaged_tensor_is_read_again_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged_count: int
) -> None:
    left = [damaged_count]

    def damage(view: memoryview) -> ChunkFrame:
        frame = decode_chunk(view)
        if frame.index == 5 and left[0]:
            left[0] -= 1
            data = bytearray(frame.data)
            data[-1] ^= 1
            return replace(frame, data=memoryview(data))
        return frame

    monkeypatch.setattr("psworker.transport.snapshot_client.decode_chunk", damage)
    with (
        Job(tmp_path, shard_count=2, chunk_kib=64) as job,
        connect(job, "w0") as ps,
        SnapshotReader(job.address) as reader,
    ):
        model = Ten()
        model.trained(ps)()
        if damaged_count == 2:
            text = "'weight' are not those that shard 1 has: .* check the memory"
            with pytest.raises(psworker.CorruptionError, match=text):
                reader.latest()
        found = reader.latest()
        assert torch.equal(found.state_dict()["weight"], model.weight)
        assert found.received_byte_count == found.byte_count


def test_what_is_no_snapshot_can_t_be_gone_on_from() -> None:
    with (
        SnapshotReader("127.0.0.1:1") as reader,
        pytest.raises(psworker.ConfigurationError, match=r"since: .* not int"),
    ):
        reader.latest(since=3)  # type: ignore[arg-type]


def test_two_readers_share_and_a_closed_one_stops_waiting(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        with psworker.SnapshotReader(job.address) as first:
            second = psworker.SnapshotReader(job.address)
            assert first.latest().version == second.latest().version == 0
            assert torch.equal(first.latest().state_dict()["weight"], model.weight)

            def wait(_: str) -> str:
                with pytest.raises(psworker.ClosedError) as caught:
                    second.wait_newer(0, timeout=20)
                return str(caught.value)

            with Crew({"reader": wait}) as crew:
                second.close()
                assert "closed" in crew.results()["reader"]


def test_a_reader_closed_while_the_coordinator_is_away_stops_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def note(error: CallError) -> bool:
        failed.set()
        return is_away(error)

    is_away = snapshot._is_away
    monkeypatch.setattr(snapshot, "_is_away", note)
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        ps.prepare(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters(), 0.1))
        reader = psworker.SnapshotReader(job.address)
        reader.latest()
        job.stop_coordinator()

        def wait(_: str) -> None:
            with pytest.raises(psworker.ClosedError, match="closed meanwhile"):
                reader.wait_newer(0, timeout=20)

        with Crew({"reader": wait}) as crew:
            assert failed.wait(20)
            reader.close()
            crew.results()
        job.start_coordinator()


def test_there_is_none_before_the_start_and_the_text_says_whom_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("psworker.transport.waiting_log.WAITING_INTERVAL_MS", 50)
    with (
        Job(tmp_path, workers_min=2) as job,
        psworker.SnapshotReader(job.address) as reader,
        pytest.raises(psworker.PsError, match="worker"),
    ):
        reader.latest(timeout=3)
    said = [line for line in caplog.messages if line.startswith("waiting for a snap")]
    assert any(
        "2 more workers to call prepare() (0 of 2 have)" in line for line in said
    )


def test_waiting_for_a_version_that_never_comes_ends_in_time(tmp_path: Path) -> None:
    with (
        Job(tmp_path) as job,
        connect(job, "w0") as ps,
        psworker.SnapshotReader(job.address) as reader,
    ):
        model = nn.Linear(2, 2)
        ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        reader.latest(timeout=30)
        with pytest.raises(psworker.WaitTimeoutError, match="newest is 0"):
            reader.wait_newer(0, timeout=0.5)


def test_images_that_a_new_coordinator_does_not_know_are_freed(tmp_path: Path) -> None:
    with (
        Job(tmp_path, shard_count=1) as job,
        connect(job, "w0") as ps,
        psworker.SnapshotReader(job.address) as reader,
    ):
        model = nn.Linear(2, 2)
        ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        reader.latest(timeout=20)
        shard = job.shards[0]
        assert job.ask(lambda: list(shard.images._images)) == [1]
        job.ask(lambda: shard.images.release_up_to(1_000))
        assert job.ask(lambda: list(shard.images._images)) == []
