"""Values that a script sets by itself count on the job as they do in one process."""

import copy
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import psworker
from psserver.shard.core.push import PushEntry, PushId, StagedChunk, Trailer
from psserver.shard.core.shard import ShardCore
from pswire.membership import Mode, StepAtomicity, WorkerKey, WorkerState
from pswire.reasons import ErrorReason, Refusal
from psworker.errors import ConfigurationError, OptimizerMismatchError
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.integration.job import Job, connect, deviation, key, run_workers
from tests.integration.one_process import batch, loss_of, small_model

STEP_COUNT: Final = 6

Publish = Callable[..., None]

small_chunks = cut_into(24, 64)
"""Cuts tensors of a few elements into chunks, on both sides alike."""


def normed_model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)
    return nn.Sequential(*layers)


def clamped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def train(
    model: nn.Module,
    ps: Any = None,  # noqa: ANN401, a connection or none
    rows: slice = slice(None),
    *,
    edit: Callable[[nn.Module], object] = clamped,
    **options: Any,  # noqa: ANN401, as `prepare`
) -> list[torch.Tensor]:
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.02)
    if ps is not None:
        model, optimizer = ps.prepare(model, optimizer, **options)
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        loss_of(model, step, rows).backward()
        optimizer.step(**({} if ps is None else {"weight": 4.0}))
        if step % 2:
            if ps is not None:
                ps.wait()
            edit(model)
            if ps is not None:
                ps.publish(model)
    return [each.detach().clone() for each in model.state_dict().values()]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"step_atomicity": StepAtomicity.CLOCK}, {}),
        ({}, {"clip_grad_norm": 1e6}),
        ({}, {"overlap": True}),
        ({"mode": Mode.ASP}, {}),
    ],
    ids=["bsp", "two phases", "clipped", "overlap", "asp"],
)
def test_one_worker_that_publishes_is_one_process(
    tmp_path: Path, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    with Job(tmp_path, **settings) as job, connect(job, "w0") as ps:
        ours = train(normed_model(), ps, buffers="leader", **options)
        assert ps.clock == STEP_COUNT + STEP_COUNT // 2
    assert deviation(ours, train(normed_model())) <= DEVIATION_MAX


def test_two_workers_that_publish_are_one_process(tmp_path: Path) -> None:
    def work(worker_id: str) -> list[torch.Tensor]:
        rows = slice(0, 4) if worker_id == "w0" else slice(4, 8)
        with connect(job, worker_id) as ps:
            return train(small_model(), ps, rows)

    with Job(tmp_path, workers_min=2) as job:
        results = run_workers({"w0": work, "w1": work})
    plain = train(small_model())
    for ours in results.values():
        assert deviation(ours, plain) <= DEVIATION_MAX


def test_where_values_differ_those_of_the_longest_count_and_the_other_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(worker_id: str) -> list[torch.Tensor]:
        with connect(job, worker_id) as ps:
            number = int(worker_id[1])

            def draw(model: nn.Module) -> None:
                nn.init.constant_(next(model.parameters()), number)

            return train(small_model(), ps, edit=draw)

    caplog.set_level(logging.WARNING, "psworker")
    with Job(tmp_path, workers_min=2) as job:
        results = run_workers({"w0": work, "w1": work})
    assert all(torch.equal(a, b) for a, b in zip(*results.values(), strict=True))
    assert results["w1"][0].eq(0).all()
    texts = [each.getMessage() for each in caplog.records]
    (text, *_) = [each for each in texts if "has published of '0.weight'" in each]
    assert "worker w0" in text


def test_a_worker_that_steps_where_another_publishes_is_told_who_did_what(
    tmp_path: Path,
) -> None:
    errors: list[psworker.PsError] = []

    def work(worker_id: str) -> None:
        with connect(job, worker_id) as ps:  # the one goes on when the other has left
            model = small_model()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = ps.prepare(model, optimizer)
            loss_of(model, 0).backward()
            try:
                if worker_id == "w0":
                    ps.publish()
                else:
                    optimizer.step(weight=1)
            except psworker.PsError as error:
                errors.append(error)

    with Job(tmp_path, workers_min=2, shard_count=1) as job:
        run_workers({"w0": work, "w1": work})
    (refused,) = [each for each in errors if isinstance(each, OptimizerMismatchError)]
    assert "w0/1 publishes values in the clock in which w1/1 steps" in str(refused)


@pytest.mark.parametrize("overlap", [False, True])
def test_of_two_that_each_refuse_the_other_on_a_shard_one_goes_on_with_the_same_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, overlap: bool
) -> None:
    """Shard 0 hears first of the one who publishes, shard 1 of the one who steps."""
    add_push = ShardCore.add_push

    def in_order(
        core: ShardCore,
        push: PushId,
        entry: PushEntry,
        trailer: Trailer,
        chunks: Mapping[int, StagedChunk],
    ) -> None:
        first = key("w0") if core is job.shards[0].model.core else key("w1")
        if push.worker == first:
            add_push(core, push, entry, trailer, chunks)
            arrived.add(first)
            return
        # Not before the other shard has this one's push either: to be refused here
        # ends the call there.
        members = filter(core.clocks.member_of, (first, push.worker))
        if not arrived.issuperset(members):
            raise Refusal(ErrorReason.RECOVERING, "the other one comes first")
        add_push(core, push, entry, trailer, chunks)

    arrived: set[WorkerKey] = set()
    are_refused = threading.Barrier(2, timeout=20)
    is_done = threading.Event()

    def work(worker_id: str) -> list[torch.Tensor]:
        with connect(job, worker_id) as ps:
            model = small_model()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = ps.prepare(model, optimizer, overlap=overlap)
            if worker_id == "w1":
                loss_of(model, 0).backward()
                with pytest.raises(OptimizerMismatchError, match="w0/1 publishes"):
                    stepped(optimizer, ps)
                are_refused.wait()
                is_done.wait(20)
                return []
            clamped(model)
            with pytest.raises(OptimizerMismatchError, match="w0/1 publishes values"):
                ps.publish()
            are_refused.wait()
            loss_of(model, 1).backward()
            try:
                with pytest.raises(OptimizerMismatchError, match="w0/1 publishes"):
                    stepped(optimizer, ps)
            finally:
                is_done.set()
            job.wait_record(lambda record: len(record.members) == 1)
            stepped(optimizer, ps)
            return [each.detach().clone() for each in model.parameters()]

    with Job(tmp_path, workers_min=2) as job:
        monkeypatch.setattr(ShardCore, "add_push", in_order)
        ours = run_workers({"w0": work, "w1": work})["w0"]
    plain = small_model()
    clamped(plain)
    loss_of(plain, 1).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    values = [each.detach() for each in plain.parameters()]
    assert deviation(ours, values) <= DEVIATION_MAX


def stepped(optimizer: Any, ps: Any) -> None:  # noqa: ANN401, as prepared
    optimizer.step(weight=1)
    ps.wait()


def test_what_publish_takes(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = normed_model()
        with pytest.raises(ConfigurationError, match=r"call prepare\(\) first"):
            ps.publish(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ps.prepare(model, optimizer, buffers="leader")
        for what in (model, model[0], model[2].weight, list(model[2].parameters())):
            ps.publish(what)
        with pytest.raises(ConfigurationError, match="no prepared model"):
            ps.publish(torch.zeros(3))
        with pytest.raises(ConfigurationError, match="a Linear that has no tensor"):
            ps.publish(nn.Linear(2, 2))
        assert ps.clock == 4


def restarted(ps: Any, *, is_plain: bool) -> list[torch.Tensor]:  # noqa: ANN401
    model = normed_model()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.02)
    if not is_plain:
        model, optimizer = ps.prepare(model, optimizer, buffers="leader")
    saved: Any = None
    for step in range(STEP_COUNT):
        if step == 4:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step == 1:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return [each.detach().clone() for each in model.state_dict().values()]


def test_model_and_optimizer_that_are_loaded_after_prepare_count_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        ours = restarted(ps, is_plain=False)
    assert deviation(ours, restarted(None, is_plain=True)) <= DEVIATION_MAX
    assert not [each for each in caplog.records if "lost" in each.getMessage()]


def load_other(model: nn.Module, optimizer: Any) -> None:  # noqa: ANN401
    """Loads values of 0.5 and a momentum of 2 into a job that has neither."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    state = optimizer.state_dict()
    count = len(state["param_groups"][0]["params"])
    shapes = [each.shape for each in model.parameters()]
    state["state"] = {
        index: {"momentum_buffer": torch.full(shapes[index], 2.0)}
        for index in range(count)
    }
    optimizer.load_state_dict(state)


def check_loaded(model: nn.Module, values_before_step: float) -> None:
    """One step by a gradient of 0, which leaves the momentum of 2 alone to count."""
    expected = values_before_step - 0.1 * 0.5 * 2.0
    for parameter in model.parameters():
        assert parameter.detach().allclose(torch.full_like(parameter, expected))


def step_by_zeros(model: nn.Module, optimizer: Any) -> None:  # noqa: ANN401
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(weight=1)


@pytest.mark.parametrize("shard_count", [1, 2])
@pytest.mark.parametrize("is_by_step", [True, False], ids=["step", "publish"])
def test_loaded_values_that_a_shard_refuses_go_with_their_state_in_the_next_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shard_count: int,
    *,
    is_by_step: bool,
) -> None:
    add_push = ShardCore.add_push
    refused: list[ShardCore] = []

    def refuse_first(core: ShardCore, push: PushId, *given: Any) -> None:  # noqa: ANN401
        trailer: Trailer = given[1]
        if trailer.publishes and not refused:
            refused.append(core)
            raise Refusal(ErrorReason.OPTIMIZER_OUT_OF_PHASE, "another one steps")
        add_push(core, push, *given)

    with Job(tmp_path, shard_count=shard_count) as job, connect(job, "w0") as ps:
        model = small_model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        model, optimizer = ps.prepare(model, optimizer)
        step_by_zeros(model, optimizer)
        load_other(model, optimizer)
        monkeypatch.setattr(ShardCore, "add_push", refuse_first)
        with pytest.raises(OptimizerMismatchError, match="another one steps"):
            step_by_zeros(model, optimizer) if is_by_step else ps.publish()
        step_by_zeros(model, optimizer)
        check_loaded(model, 0.5)
        # Neither of them is sent again.
        clock = ps.clock
        step_by_zeros(model, optimizer)
        assert ps.clock == clock + 1


def test_loaded_values_that_are_dropped_keep_their_state_until_both_count(
    tmp_path: Path,
) -> None:
    has_begun, has_joined = threading.Event(), threading.Event()
    is_refused = threading.Event()

    def work(worker_id: str) -> None:
        assert worker_id == "w0" or has_begun.wait(20)
        with connect(job, worker_id) as ps:
            model = small_model()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
            model, optimizer = ps.prepare(model, optimizer)
            if worker_id == "w0":
                step_by_zeros(model, optimizer)
                has_begun.set()
                assert has_joined.wait(20)
                step_by_zeros(model, optimizer)
                step_by_zeros(model, optimizer)
                assert is_refused.wait(20)
                return
            has_joined.set()
            step_by_zeros(model, optimizer)
            load_other(model, optimizer)
            try:
                with pytest.raises(OptimizerMismatchError, match="loaded are not used"):
                    step_by_zeros(model, optimizer)
            finally:
                is_refused.set()
            job.wait_record(lambda record: len(record.members) == 1)
            step_by_zeros(model, optimizer)
            check_loaded(model, 0.5)

    with Job(tmp_path) as job:
        run_workers({"w0": work, "w1": work})


class Taught(nn.Module):
    """A student, and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = small_model()
        self.teacher = small_model().requires_grad_(False)

    def loss(self, step: int) -> torch.Tensor:
        inputs, targets = batch(step)
        outputs = self.student(inputs)
        own = nn.functional.mse_loss(outputs, targets)
        return own + nn.functional.mse_loss(outputs, self.teacher(inputs))

    @torch.no_grad()
    def follow(self) -> None:
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for mine, theirs in pairs:
            mine.lerp_(theirs, 0.2)


def teach(ps: Any = None) -> Taught:  # noqa: ANN401
    model = Taught()
    optimizer: Any = torch.optim.SGD(model.student.parameters(), lr=0.1)
    if ps is not None:
        model, optimizer = ps.prepare(model, optimizer)
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()
        model.follow()
    if ps is not None:
        loss_of(model.student, 9).backward()  # what the last step has left goes too
        optimizer.step()
    return model


def test_a_teacher_is_followed_and_a_later_worker_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        ours = teach(ps)
        late = Taught()
        with connect(job, "w1") as other:
            other.prepare(late, torch.optim.SGD(late.student.parameters(), lr=0.1))
            found = [each.detach().clone() for each in late.teacher.parameters()]
    plain = list(teach().teacher.parameters())
    assert deviation(list(ours.teacher.parameters()), plain) <= DEVIATION_MAX
    assert deviation(found, plain) <= DEVIATION_MAX
    assert not [each for each in caplog.records if "values of" in each.getMessage()]


def test_a_worker_is_told_what_it_brings_and_does_not_seed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(worker_id: str) -> float:
        with connect(job, worker_id) as ps:
            model = small_model()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            if worker_id == "w1":
                loss_of(model, 0).backward()
                optimizer.step()
            ps.prepare(model, optimizer)
            if worker_id == "w1":
                core = job.coordinator.core
                others = job.ask(
                    lambda: [
                        core.brought_other(each)
                        for each in core.roster.in_state(WorkerState.MEMBER)
                    ]
                )
                assert ("values", "optimizer state") in others
            return float(next(model.parameters()).detach().flatten()[0])

    caplog.set_level(logging.WARNING, "psworker")
    with Job(tmp_path, workers_min=2) as job:
        results = run_workers({"w0": work, "w1": work})
    assert results["w0"] == results["w1"]
    texts = [each.getMessage() for each in caplog.records]
    (text,) = [each for each in texts if "the job starts with" in each]
    assert "of worker w0" in text
    assert "'0.weight' of model and 3 more" in text


def test_what_a_late_worker_sets_before_its_first_step_does_not_undo_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = small_model()
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        loss_of(model, 0).backward()
        optimizer.step()
        trained = [each.detach().clone() for each in model.parameters()]
        with connect(job, "w1") as other:
            late = small_model()
            own: Any = torch.optim.Adam(late.parameters(), lr=0.1)
            late, own = other.prepare(late, own)
            late.load_state_dict(small_model().state_dict())
            other.publish(late)
            found = [each.detach().clone() for each in late.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, trained, strict=True))
    assert "joined a job that trains already" in caplog.text


@pytest.mark.parametrize("shard_count", [1, 2])
def test_a_late_worker_neither_undoes_nor_ends_what_the_others_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shard_count: int
) -> None:
    joined = threading.Event()
    stepped = threading.Event()

    def work(worker_id: str) -> tuple[list[str], list[torch.Tensor]]:
        is_late = worker_id == "w1"
        assert not is_late or stepped.wait(20)
        with connect(job, worker_id) as ps:
            model: Any = small_model()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = ps.prepare(model, optimizer)
            if is_late:
                joined.set()
            outcomes = []
            for step in range(6 if is_late else 7):
                if step == 1 and not is_late:
                    stepped.set()
                    assert joined.wait(20)
                if step % 3 == 1:
                    clamped(model)
                    ps.publish(model)
                else:
                    optimizer.zero_grad()
                    loss_of(model, step).backward()
                    optimizer.step(weight=1)
                assert ps.last_push is not None
                outcomes.append(ps.last_push.outcome)
            return outcomes, [each.detach().clone() for each in model.parameters()]

    caplog.set_level(logging.WARNING, "psworker")
    with Job(tmp_path, shard_count=shard_count) as job:
        results = run_workers({"w0": work, "w1": work})
    assert results["w0"][0] == ["applied"] * 7
    # It is one clock behind: w0 publishes where it steps, and steps where it publishes.
    assert results["w1"][0] == ["dropped", "dropped", "applied"] * 2
    assert all(
        torch.equal(a, b)
        for a, b in zip(results["w0"][1], results["w1"][1], strict=True)
    )
    assert "what this worker has published is not used" in caplog.text


def test_a_frozen_part_may_be_taken_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = Taught()
        optimizer: Any = torch.optim.SGD(model.student.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        del model.teacher[0].weight
        model.teacher[0].weight = nn.Parameter(torch.zeros(2, 5), requires_grad=False)
        loss_of(model.student, 0).backward()
        optimizer.step(weight=1)
    assert "'teacher.0.weight' of model, which no optimizer has" in caplog.text
