"""Fewer bytes: a job trains to the numbers of one process that encodes as it does."""

import copy
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

import psworker
from psserver.shard.host.shard_host import ShardHost
from pswire.compression import Compression
from pswire.encodings.known import ENCODINGS
from pswire.membership import Mode
from tests.doubles.chunk_sizes import cut_into
from tests.integration.broken_calls import (
    Context,
    Fault,
    Messages,
    Stream,
    breakable_shards,
    cut_upload,
    lose_reply,
)
from tests.integration.compressed_training import (
    BATCHES,
    STEP_COUNT,
    OneProcess,
    OnJob,
    backward,
    model_of,
    on_job,
    optimizer_of,
    values_of,
)
from tests.integration.job import (
    WAIT_TIMEOUT_S,
    Job,
    connect,
    deviation,
    run_workers,
)

PUSHES = [Compression(push=method, ratio=0.1) for method in ENCODINGS]
PULLS = [Compression(pull=method, ratio=0.1) for method in ENCODINGS]
BOTH = [Compression("topk", "topk", 0.1), Compression("onebit", "int8")]

small_chunks = cut_into(64, 1024)
"""Cuts a model of a few KiB into a few chunks, on both sides alike."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Has torch add in one order: what is compared here is compared bit by bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_parity(plain: OneProcess, trained: OnJob) -> None:
    """Bit by bit: the workers' values, and the shards' own, which snapshots have."""
    for values in trained.workers.values():
        for mine, theirs in zip(values, plain.seen.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    for mine, theirs in zip(trained.shards, plain.exact.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("compression", [*PUSHES, *PULLS, *BOTH], ids=str)
def test_a_job_has_the_numbers_of_one_process_that_encodes_alike(
    tmp_path: Path, compression: Compression
) -> None:
    plain = OneProcess(compression)
    plain.train()

    trained = on_job(tmp_path, compression)

    check_parity(plain, trained)
    uncompressed = OneProcess(Compression())
    uncompressed.train()
    pairs = zip(plain.seen.parameters(), uncompressed.seen.parameters(), strict=True)
    assert any(not torch.equal(mine, theirs) for mine, theirs in pairs)


def test_workers_that_differ_are_refused_with_both_values(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps, connect(job, "w1") as late:
        model = model_of(0)
        ps.prepare(model, optimizer_of(model), compression="bf16")
        other = model_of(0)
        text = (
            r"the job has compression \(push=bf16 pull=bf16 ratio=0.01\), this worker "
            r"has compression \(push=topk pull=raw ratio=0.02\); give all workers' "
            r"prepare\(\) the same"
        )
        with pytest.raises(psworker.OptimizerMismatchError, match=text):
            late.prepare(
                other,
                optimizer_of(other),
                compression=psworker.Compression("topk", ratio=0.02),
            )


@pytest.mark.parametrize("compression", ["int8", "topk"])
def test_overlapped_steps_have_the_same_bits(tmp_path: Path, compression: str) -> None:
    choice = Compression(compression, compression, 0.1)
    plain = OneProcess(choice)
    plain.train()

    trained = on_job(tmp_path, choice, overlap=True)

    check_parity(plain, trained)


def test_residuals_are_saved_and_a_worker_that_loads_them_goes_on_as_if_nothing(
    tmp_path: Path,
) -> None:
    """The second half is a job of one shard more, with state of the first one's."""
    compression = psworker.Compression("topk", ratio=0.05)

    def trained(folder: Path, stops_at: int | None) -> list[torch.Tensor]:
        saved: dict[str, Any] = {}
        model = model_of(0)
        start = 0
        for stop in (STEP_COUNT,) if stops_at is None else (stops_at, STEP_COUNT):
            shard_count = 2 if start == 0 else 3
            job = Job(folder / str(start), shard_count=shard_count)
            with job, connect(job, "w0") as ps:
                given = copy.deepcopy(model)
                # With sequences of its own; topk has no noise that would follow.
                given, optimizer = ps.prepare(
                    given, optimizer_of(given), compression=compression
                )
                if saved:
                    optimizer.load_state_dict(saved)
                for step in range(start, stop):
                    backward(given, "w0", step)
                    optimizer.step()
                saved = optimizer.state_dict()
                model = given
            start = stop
        (first, *_) = saved["residuals"].values()
        assert first.shape == next(model.parameters()).shape
        assert first.count_nonzero() > first.numel() / 2
        plain = torch.optim.SGD(model.parameters())
        plain.load_state_dict(saved)
        return [*values_of(model), *saved["residuals"].values()]

    whole = trained(tmp_path / "whole", None)
    halves = trained(tmp_path / "halves", 5)

    # Another number of shards would cut other chunks, but not of these sizes.
    for mine, theirs in zip(whole, halves, strict=True):
        assert torch.equal(mine, theirs)


def test_a_residual_of_another_shape_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = model_of(0)
        model, optimizer = ps.prepare(model, optimizer_of(model), compression="topk")
        state = optimizer.state_dict()
        state["residuals"] = {1: torch.zeros(3)}
        text = (
            r"the loaded state has a residual of shape \[3\] for parameter 1, which "
            r"has the shape \[32\]: load the state of the same optimizer"
        )
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("push", ["topk", "onebit"])
def test_steps_are_applied_though_residuals_grow_to_the_limit(
    tmp_path: Path, push: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The gradients are finite, and with what was left out they would not be."""
    with Job(tmp_path, shard_count=1) as job, connect(job, "w0") as ps:
        model = torch.nn.Linear(16, 16, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-17)
        chosen = psworker.Compression(push=push, ratio=0.1)
        model, optimizer = ps.prepare(model, optimizer, compression=chosen)
        generator = torch.Generator().manual_seed(0)
        shape = model.weight.shape
        for _ in range(8):
            gradient = torch.randn(shape, generator=generator).abs() + 0.5
            model.weight.grad = gradient * (9e17 / gradient.norm())
            (before,) = values_of(model)
            optimizer.step()
            assert ps.last_push is not None
            assert ps.last_push.outcome == "applied"
            assert not ps.last_push.rejoined
            assert not torch.equal(model.weight, before)
            assert optimizer.state_dict()["residuals"][0].norm() <= 1e18

    assert not any("bytes are not finite" in line for line in caplog.messages)


def cut_answer(message_count: int) -> Fault:
    """The push is done; some messages of the answer arrive, then the call breaks."""

    def fault(inner: Stream) -> Stream:
        async def stream(requests: Messages, context: Context) -> Messages:
            sent_count = 0
            async for message in inner(requests, context):
                if sent_count < message_count:
                    yield message
                sent_count += 1
            yield await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")

        return stream

    return fault


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["int8", "topk", "onebit"])
def test_broken_calls_change_no_bit(
    tmp_path: Path, method: str, *, overlap: bool
) -> None:
    """What goes again is the same bytes, also of the answer, and counts once."""
    choice = Compression(method, method, 0.1)
    plain = OneProcess(choice)
    plain.train()
    faults = [lose_reply, cut_answer(1), cut_upload(1), cut_answer(2), cut_upload(2)]

    def break_one(worker_id: str, step: int) -> None:
        if worker_id == "w0" and step % 2 and faults:
            shards[step % 4 // 2].faults.append(faults.pop())

    with breakable_shards() as shards:
        trained = on_job(tmp_path, choice, overlap=overlap, before_step=break_one)

    assert not faults
    assert sum(handler.push_count for handler in shards.values()) > 4 * STEP_COUNT
    check_parity(plain, trained)


COMPOSED: dict[str, dict[str, Any]] = {
    "ssp": {"mode": Mode.SSP, "staleness_bound": 1},
    "asp": {"mode": Mode.ASP},
    "asp, overlapped": {"mode": Mode.ASP, "overlap": True},
    "asp, compensated": {"mode": Mode.ASP, "delay_compensation": 0.1},
    "clipped": {"clip_grad_norm": 0.5},
    "clipped, overlapped": {"clip_grad_norm": 0.5, "overlap": True},
    "clipped in asp": {"mode": Mode.ASP, "clip_grad_norm": 0.5},
    "adam": {"kind": "Adam"},
    "bf16 parameters": {"dtype": torch.bfloat16},
    "fp16 parameters, overlapped": {"dtype": torch.float16, "overlap": True},
}


@pytest.mark.parametrize("place", range(len(COMPOSED)), ids=list(COMPOSED))
def test_it_goes_with_everything_and_workers_stay_near_the_shards(
    tmp_path: Path, place: int
) -> None:
    """Near as of a worker that is one update behind and lacks a residual."""
    choice = (Compression("int8", "onebit"), Compression("topk", "topk", 0.1))[
        place % 2
    ]
    both = threading.Barrier(2, timeout=WAIT_TIMEOUT_S)

    def in_step(worker_id: str, step: int) -> None:
        both.wait()  # else one may be done in ASP before the other has begun

    trained = on_job(
        tmp_path,
        choice,
        step_count=8,
        before_step=in_step,
        **list(COMPOSED.values())[place],
    )

    assert trained.version == 16
    first = values_of(model_of(0))
    moved = deviation(trained.shards, [each.to(trained.shards[0]) for each in first])
    for values in trained.workers.values():
        assert deviation(values, trained.shards) < max(moved, 0.02)
    assert moved > 0.001


def test_a_worker_that_has_other_values_than_its_shard_thinks_pulls_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choice = Compression(pull="int8")
    plain = OneProcess(choice)
    plain.train(6)

    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = model_of(0)
        model, optimizer = ps.prepare(model, optimizer_of(model), compression=choice)
        for step in range(6):
            backward(model, "w0", step)
            if step == 3:
                for shard in job.shards:
                    forget_a_bit_of(shard)
            optimizer.step()
        job_values = [each for shard in job.shards for each in read_all(shard)]

    assert "has sent changes of other values than this worker has" in caplog.text
    mine = torch.cat([each.reshape(-1) for each in values_of(model)]).sort().values
    theirs = torch.cat(job_values).sort().values
    assert (mine - theirs).abs().max() < 1e-3


def forget_a_bit_of(shard: ShardHost) -> None:
    """Has a shard believe that the worker has other values."""
    (worker,) = shard.members
    assert worker.sent is not None
    for chunk_index, (sequence, sent) in worker.sent.chunks.items():
        other = replace(sent, values=torch.zeros_like(sent.values), digest=0)
        worker.sent.chunks[chunk_index] = sequence, other


def read_all(shard: ShardHost) -> list[torch.Tensor]:
    engine = shard.model.engine
    return [
        torch.frombuffer(
            bytearray(engine.vectors.read(chunk.index)), dtype=torch.float32
        )
        for chunk in shard.model.chunks
    ]


def test_buffers_go_as_they_are(tmp_path: Path) -> None:
    """Running statistics after a step are those of a job that sends everything so."""

    def train(folder: Path, choice: str | None) -> torch.Tensor:
        with Job(folder) as job, connect(job, "w0") as ps:
            model = torch.nn.BatchNorm1d(32)
            model, optimizer = ps.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), compression=choice
            )
            generator = torch.Generator().manual_seed(3)
            model(torch.randn(8, 32, generator=generator)).pow(3).sum().backward()
            optimizer.step()
            assert model.running_mean.any()
            return torch.cat((model.running_mean, model.running_var))

    plain = train(tmp_path / "plain", None)
    for method in ENCODINGS:
        assert torch.equal(train(tmp_path / method, method), plain)


def test_fewer_bytes_are_sent_both_ways(tmp_path: Path) -> None:
    def train(folder: str, choice: str | None) -> OnJob:
        return on_job(tmp_path / folder, choice, step_count=5)

    plain = train("plain", None)
    for method, ratio in {"bf16": 1.7, "int8": 2.8, "topk": 8, "onebit": 7}.items():
        fewer = train(method, method)
        for worker_id in ("w0", "w1"):
            sent = plain.bytes_sent[worker_id] / fewer.bytes_sent[worker_id]
            received = plain.bytes_received[worker_id] / fewer.bytes_received[worker_id]
            print(f"{method}: {sent:.1f} and {received:.1f} times fewer bytes")
            assert sent > ratio
            assert received > ratio


@pytest.mark.parametrize("choice", [None, "int8"])
def test_what_a_worker_has_already_is_not_pulled(
    tmp_path: Path, choice: str | None
) -> None:
    """Who begins with the values of the seed, and a late one with half of the job's."""
    with Job(tmp_path, workers_min=2) as job:

        def work(worker_id: str) -> int:
            model = model_of(0)
            with connect(job, worker_id) as ps:
                model, optimizer = ps.prepare(
                    model, optimizer_of(model), compression=choice
                )
                received = ps.bytes_received
                for step in range(3):
                    backward(model, worker_id, step)
                    optimizer.step(weight=BATCHES[worker_id])
                if worker_id == "w0":
                    exact.extend(values_of(model))
                return received

        exact: list[torch.Tensor] = []
        begun = run_workers(dict.fromkeys(BATCHES, work))
        with psworker.SnapshotReader(job.address) as reader:
            state = reader.latest().state_dict()
        late = model_of(5)
        with torch.no_grad():
            pairs = list(zip(late.parameters(), state.values(), strict=True))
            for mine, theirs in pairs[2:]:
                mine.copy_(theirs)
        with connect(job, "w2") as ps:
            late, optimizer = ps.prepare(late, optimizer_of(late), compression=choice)
            some = ps.bytes_received
            for mine, theirs in zip(late.parameters(), state.values(), strict=True):
                assert torch.equal(mine, theirs)
            backward(late, "w0", 9)
            optimizer.step()

    whole = sum(each.nbytes for each in exact)
    print(f"{begun}, then {some} of {whole} bytes")
    assert max(begun.values()) < whole / 4
    assert whole / 4 < some < whole * 0.7


@pytest.mark.parametrize("choice", [None, "bf16", Compression(push="topk", ratio=0.5)])
def test_in_asp_an_answer_brings_what_has_changed_since_the_last_one(
    tmp_path: Path, choice: str | Compression | None
) -> None:
    """Each worker trains one of two layers; both see what became of the other one."""

    class Trained:
        def __init__(self, ps: psworker.Connection, position: int) -> None:
            self.ps = ps
            self.layers = [torch.nn.Linear(64, 64) for _ in range(2)]
            self.position = position
            model = torch.nn.ModuleList(self.layers)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            self.model, self.optimizer = ps.prepare(
                model, optimizer, compression=choice
            )

        def step(self) -> int:
            """A step; returns the bytes that the answer had."""
            before = self.ps.bytes_received
            self.optimizer.zero_grad()
            self.layers[self.position](torch.ones(64)).sum().backward()
            self.optimizer.step()
            return self.ps.bytes_received - before

    with (
        Job(tmp_path, mode=Mode.ASP, shares_memory=False) as job,
        connect(job, "w0") as ps,
    ):
        mine = Trained(ps, 0)
        whole, half = mine.step(), mine.step()
        with connect(job, "w1") as other:
            Trained(other, 1).step()
            again = mine.step()
        shards = torch.cat([each for shard in job.shards for each in read_all(shard)])

    print(f"{whole}, {half} and {again} bytes")
    assert half < 0.75 * whole
    assert again > 0.9 * whole
    values = torch.cat([each.reshape(-1) for each in values_of(mine.model)])
    rounded = 2.0**-8 if choice == "bf16" else 0.0
    pair = values.sort().values, shards.sort().values
    assert torch.allclose(*pair, rtol=rounded, atol=0.0)


@pytest.mark.parametrize("fault", [lose_reply, cut_answer(1), cut_answer(3)])
def test_in_asp_an_answer_that_has_not_arrived_counts_for_nothing(
    tmp_path: Path, fault: Fault
) -> None:
    with (
        breakable_shards() as shards,
        Job(tmp_path, mode=Mode.ASP, shares_memory=False) as job,
        connect(job, "w0") as ps,
    ):
        model = model_of(0)
        model, optimizer = ps.prepare(model, optimizer_of(model))
        for step in range(4):
            backward(model, "w0", step)
            if step == 2:
                for handler in shards.values():
                    handler.faults.append(fault)
            optimizer.step()
            job_values = [each for shard in job.shards for each in read_all(shard)]
            mine = torch.cat([each.reshape(-1) for each in values_of(model)])
            assert torch.equal(mine.sort().values, torch.cat(job_values).sort().values)
    assert not any(handler.faults for handler in shards.values())


def test_another_choice_half_way_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = model_of(0)
        ps.prepare(model, optimizer_of(model), compression="int8")
        text = (
            r"the job sends as the first prepare\(\) said, push=int8 pull=int8 "
            r"ratio=0.01; leave compression out, or give the same"
        )
        with pytest.raises(psworker.ConfigurationError, match=text):
            ps.prepare(model, optimizer_of(model), compression="bf16")
        ps.prepare(model, optimizer_of(model), compression="int8")
