"""Local steps in a whole job: whatever a script does, as its paper has it."""

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from pswire.membership import Mode
from psworker.steps.stepper import Stepper
from psworker.strategies.sender import Sender
from psworker.strategies.strategy import InnerState
from tests.doubles.fault_proxy import FaultProxy
from tests.integration.interruptions import AtLine
from tests.integration.job import (
    WAIT_TIMEOUT_S,
    Crew,
    Job,
    connect,
    deviation,
    run_workers,
    worker_behind,
)

SAMPLE_COUNT = 60
WORKER_IDS = ("w0", "w1", "w2")


def _loader(**options: object) -> DataLoader[Any]:
    inputs = torch.linspace(-1, 1, SAMPLE_COUNT * 3).reshape(SAMPLE_COUNT, 3)
    indices = torch.arange(SAMPLE_COUNT)
    options.setdefault("batch_size", 4)
    return DataLoader(TensorDataset(inputs, indices), **options)  # type: ignore[arg-type]


def _model() -> nn.Linear:
    """The same every time, whatever other threads draw."""
    model = nn.Linear(3, 2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
    return model


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor
) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


Work = Callable[[str], tuple[list[list[int]], list[torch.Tensor], Any]]


def _training(job: Job, strategy: psworker.Strategy, epoch_count: int) -> Work:
    """A worker's work; what it saw, its parameters, and the last report."""

    def work(worker_id: str) -> tuple[list[list[int]], list[torch.Tensor], Any]:
        seen: list[list[int]] = []
        with connect(job, worker_id) as ps:
            model = _model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            returned = ps.prepare(model, optimizer, _loader(), strategy=strategy)
            assert returned[0] is model
            assert returned[1] is optimizer
            loader = returned[2]
            for _ in range(epoch_count):
                for inputs, indices in loader:
                    seen.append(indices.tolist())
                    _step(model, optimizer, inputs)
            values = [each.detach().clone() for each in model.parameters()]
            return seen, values, loader.report

    return work


EACH_ONCE = {(Mode.BSP, 3), (Mode.SSP, 1), (Mode.ASP, 50)}


@pytest.mark.parametrize(
    ("mode", "every"),
    [
        pytest.param(*case, marks=[] if case in EACH_ONCE else pytest.mark.repeat)
        for case in product((Mode.BSP, Mode.SSP, Mode.ASP), (1, 3, 50))
    ],
)
def test_every_sample_counts_once_whatever_the_length_of_a_round(
    tmp_path: Path, mode: Mode, every: int
) -> None:
    with Job(tmp_path, workers_min=3, mode=mode) as job:
        work = _training(job, psworker.LocalSteps(every), 2)
        results = run_workers(dict.fromkeys(WORKER_IDS, work))
    seen = sorted(i for batches, _, _ in results.values() for b in batches for i in b)
    assert seen == sorted(2 * list(range(SAMPLE_COUNT)))
    reports = [report for _, _, report in results.values()]
    assert all(each.seen_once == SAMPLE_COUNT for each in reports), reports


def test_a_worker_alone_averages_with_nobody(tmp_path: Path) -> None:
    plain = _plain(2)
    with Job(tmp_path) as job:
        _, values, _ = _training(job, psworker.LocalSteps(4), 2)("w0")
    assert deviation(values, plain) < 1e-6
    with psworker.LocalConnection() as ps:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        *_, loader = ps.prepare(
            model, optimizer, _loader(), strategy=psworker.LocalSteps(4)
        )
        for _ in range(2):
            for inputs, _ in loader:
                _step(model, optimizer, inputs)
        assert ps.clock == 8
        assert loader.report.is_complete
        values = [each.detach() for each in model.parameters()]
        assert deviation(values, plain) < 1e-6


def _plain(epoch_count: int) -> list[torch.Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epoch_count):
        for inputs, _ in _loader():
            _step(model, optimizer, inputs)
    return [each.detach() for each in model.parameters()]


def _pair(job: Job, work: Callable[[psworker.Connection, str], Any]) -> dict[str, Any]:
    """What two workers return, each with a connection of its own."""

    def connected(worker_id: str) -> Any:  # noqa: ANN401
        with connect(job, worker_id) as ps:
            return work(ps, worker_id)

    return run_workers(dict.fromkeys(("w0", "w1"), connected))


def _own_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, worker_id: str, number: int
) -> None:
    """A step on data of the worker's own."""
    generator = torch.Generator().manual_seed(1000 * int(worker_id[1:]) + number)
    _step(model, optimizer, torch.randn(4, 3, generator=generator))


def test_the_last_round_is_pushed_by_close_and_nothing_after_it(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        ps = connect(job, "w0")
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ps.prepare(model, optimizer, strategy=psworker.LocalSteps(10))
        for number in range(14):
            _own_step(model, optimizer, "w0", number)
        assert ps.clock == 1
        assert ps.last_push is not None
        ps.close()
        trained = [each.detach().clone() for each in model.parameters()]
        with pytest.raises(psworker.ClosedError):
            _own_step(model, optimizer, "w0", 0)
        again = _model()
        optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
        with connect(job, "w1") as ps:
            ps.prepare(again, optimizer, strategy=psworker.LocalSteps(10))
            values = [each.detach().clone() for each in again.parameters()]
            assert ps.clock == 2
        assert deviation(values, trained) < 1e-6
        # The same objects can be prepared again.
        with connect(job, "w2") as ps:
            ps.prepare(again, optimizer, strategy=psworker.LocalSteps(1))
            _own_step(again, optimizer, "w2", 0)
            assert ps.clock == 3


def test_a_handler_that_closes_within_a_push_leaves_the_last_round_to_be_pushed(
    tmp_path: Path,
) -> None:
    refusals: list[str] = []

    def close() -> None:
        try:
            ps.close()
        except psworker.ConfigurationError as error:
            refusals.append(str(error))

    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ps.prepare(model, optimizer, strategy=psworker.LocalSteps(2))
        _own_step(model, optimizer, "w0", 0)
        with AtLine() as seen:
            _own_step(model, optimizer, "w0", 1)
        *_, line = (each for each in seen.lines if each[0].endswith("stepper.py"))
        _own_step(model, optimizer, "w0", 2)
        with AtLine(line, close):
            _own_step(model, optimizer, "w0", 3)
        assert len(refusals) == 1
        _own_step(model, optimizer, "w0", 4)
        assert ps.clock == 2
        ps.close()
        assert ps.clock == 3


def test_a_handler_may_close_while_a_step_waits_for_a_push_beside(
    tmp_path: Path,
) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = psworker.StreamingDiLoCo(2, fragment_count=1, taken_after=1)
        ps.prepare(model, optimizer, strategy=strategy)
        for number in range(2):
            _own_step(model, optimizer, "w0", number)
        lines, first = inspect.getsourcelines(Sender.finish)
        (place,) = (place for place, text in enumerate(lines) if ".wait()" in text)
        with AtLine((inspect.getfile(Sender), first + place), ps.close) as waiting:
            _own_step(model, optimizer, "w0", 2)
        assert waiting.is_reached
        assert ps.is_closed
        # The answer may be there before the step.
        assert ps.clock in (1, 2)


def test_a_model_that_is_prepared_again_has_the_hooks_of_one_connection() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = set()
    for _ in range(3):
        with psworker.LocalConnection() as ps:
            ps.prepare(model, optimizer, strategy=psworker.LocalSteps(2))
            counts.add(
                (
                    len(model._forward_pre_hooks),
                    len(optimizer._optimizer_step_pre_hooks),
                    len(optimizer._optimizer_step_post_hooks),
                )
            )
    assert counts == {(1, 1, 1)}


def test_buffers_ties_and_parameters_without_an_optimizer_follow_the_job(
    tmp_path: Path,
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.norm = nn.BatchNorm1d(3)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.frozen = nn.Parameter(torch.ones(3))
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + 1  # another tensor each time
            found: torch.Tensor = self.second(self.norm(self.first(inputs)))
            return found * self.frozen

    def work(ps: psworker.Connection, worker_id: str) -> dict[str, torch.Tensor]:
        model = Tied()
        held = [model.first.weight, *model.norm.parameters()]
        optimizer = torch.optim.SGD(held, lr=0.1)
        with torch.no_grad():
            model.first.weight.copy_(torch.eye(3))
        strategy = psworker.LocalSteps(3)
        ps.prepare(model, optimizer, strategy=strategy, buffers={"norm*": "mean"})
        own = torch.full((4, 3), 1.0 + int(worker_id[1:]))
        own[0] = 0
        for _ in range(6):
            _step(model, optimizer, own)
        if ps.rank == 0:
            with torch.no_grad():
                model.frozen.fill_(2.0)
        for _ in range(3):
            _step(model, optimizer, own)
        assert model.second.weight is model.first.weight
        return {name: each.clone() for name, each in model.state_dict().items()}

    with Job(tmp_path, workers_min=2) as job:
        first, second = _pair(job, work).values()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, msg=name)
    assert first["seen"] == 9
    assert (first["frozen"] == 2).all()
    # Each batch has moved the mean to its own; what is there is of both workers'.
    assert first["norm.num_batches_tracked"] == 9
    assert first["norm.running_mean"].abs().max() > 0


def test_an_optimizer_of_any_class_with_a_closure_a_scaler_and_a_scheduler(
    tmp_path: Path,
) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:  # noqa: ANN401
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # noqa: ANN401
            for group in self.param_groups:
                for each in group["params"]:
                    each -= group["lr"] * each.grad.sign()

    def own(prepare: Any) -> Any:  # noqa: ANN401
        model = _model()
        optimizer = Own(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        prepare(model, optimizer, scheduler, scaler)
        for number in range(6):
            generator = torch.Generator().manual_seed(number)
            inputs = torch.randn(4, 3, generator=generator)
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
        return [each.detach() for each in model.parameters()]

    def quasi_newton(prepare: Any) -> Any:  # noqa: ANN401
        model = _model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
        prepare(model, optimizer)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4, 3, generator=generator)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).square().mean()
            loss.backward()
            return loss

        for _ in range(4):
            assert optimizer.step(closure) is not None
        return [each.detach() for each in model.parameters()]

    for script in (own, quasi_newton):
        plain = script(lambda *objects: objects)
        with Job(tmp_path / script.__name__) as job, connect(job, "w0") as ps:
            strategy = psworker.LocalSteps(2)
            values = script(
                lambda *objects, ps=ps, s=strategy: ps.prepare(*objects, strategy=s)
            )
            assert deviation(values, plain) < 1e-5, script
            assert ps.clock in (2, 3)


def test_rounds_of_a_gan_are_counted_by_its_first_optimizer(tmp_path: Path) -> None:
    def work(ps: psworker.Connection, worker_id: str) -> tuple[int, Any]:
        maker, judge = _model(), nn.Linear(2, 1)
        steps = [
            torch.optim.Adam(maker.parameters(), lr=0.01),
            torch.optim.Adam(judge.parameters(), lr=0.01),
        ]
        *_, loader = ps.prepare(
            maker, judge, *steps, _loader(), strategy=psworker.LocalSteps(2)
        )
        for inputs, _ in loader:
            for step in reversed(steps):
                maker.zero_grad()
                judge.zero_grad()
                judge(maker(inputs)).square().mean().backward()
                step.step()
        return ps.clock, loader.report

    with Job(tmp_path, workers_min=2) as job:
        found = _pair(job, work)
    for clock, report in found.values():
        assert report.is_complete, report
        # 15 batches: 8 and 7, and the last round of both is of what is left.
        assert clock == 4


def test_a_push_that_timed_out_is_made_again_by_the_next_step(tmp_path: Path) -> None:
    with Job(tmp_path, workers_min=2) as job:
        other_goes_on = threading.Event()

        def work(worker_id: str) -> tuple[int, list[torch.Tensor]]:
            timeout_s = WAIT_TIMEOUT_S if worker_id == "w1" else 1.0
            with connect(job, worker_id, step_timeout_s=timeout_s) as ps:
                model = _model()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                ps.prepare(model, optimizer, strategy=psworker.LocalSteps(2))
                stepper = worker_behind(ps)._stepper
                assert stepper is not None
                for number in range(4):
                    if worker_id == "w1" and number == 1:
                        assert other_goes_on.wait(WAIT_TIMEOUT_S)
                    try:
                        _own_step(model, optimizer, worker_id, number)
                    except psworker.StepTimeoutError:
                        assert (worker_id, number) == ("w0", 1)
                        stepper._timeout_s = WAIT_TIMEOUT_S
                        other_goes_on.set()
                        job.wait_pushed("w1", 1)
                values = [each.detach().clone() for each in model.parameters()]
                return ps.clock, values

        found = run_workers(dict.fromkeys(("w0", "w1"), work))
    assert [clock for clock, _ in found.values()] == [2, 2]
    assert deviation(found["w0"][1], found["w1"][1]) == 0


def test_a_change_that_is_not_finite_is_nobodys(tmp_path: Path) -> None:
    def work(ps: psworker.Connection, worker_id: str) -> Any:  # noqa: ANN401
        model = _model()
        first = [each.detach().clone() for each in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ps.prepare(model, optimizer, strategy=psworker.LocalSteps(2))
        for number in range(2):
            _own_step(model, optimizer, worker_id, number)
            if worker_id == "w1":
                with torch.no_grad():
                    model.weight[0, 0] = torch.nan
        assert ps.last_push is not None
        assert ps.last_push.nonfinite_worker_ids == ("w1",)
        values = [each.detach() for each in model.parameters()]
        return deviation(values, first)

    with Job(tmp_path, workers_min=2) as job:
        assert set(_pair(job, work).values()) == {0.0}


def test_what_a_script_publishes_is_the_anchor(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ps.prepare(model, optimizer, strategy=psworker.LocalSteps(2))
        for number in range(2):
            _own_step(model, optimizer, "w0", number)
        with torch.no_grad():
            model.weight.zero_()
        ps.publish(model.weight)
        other = _model()
        with connect(job, "w1") as second:
            second.prepare(
                other,
                torch.optim.SGD(other.parameters(), lr=0.1),
                strategy=psworker.LocalSteps(2),
            )
            assert not other.weight.any()
            torch.testing.assert_close(other.bias, model.bias)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"clip_grad_norm": 1.0},
        {"loss": "sum"},
    ],
)
def test_what_makes_no_sense_with_local_steps_is_refused(options: Any) -> None:  # noqa: ANN401
    with psworker.LocalConnection() as ps:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = psworker.LocalSteps(2)
        with pytest.raises(psworker.UnsupportedError, match="leave"):
            ps.prepare(model, optimizer, strategy=strategy, **options)
        ps.prepare(model, optimizer, strategy=strategy)
        with pytest.raises(psworker.ConfigurationError, match="called once"):
            ps.prepare(model, optimizer, strategy=strategy)
        with pytest.raises(psworker.ConfigurationError, match="called once"):
            ps.prepare(model, optimizer)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (psworker.FedProx(2, mu=0.5), ""),
        (
            psworker.LocalSteps(1, inner_state="average"),
            "the momentum_buffer of a SGD is sparse.*leave inner_state out",
        ),
    ],
)
def test_gradients_may_be_sparse_where_they_can_be(
    strategy: psworker.Strategy, said: str
) -> None:
    with psworker.LocalConnection() as ps:
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        model, optimizer = ps.prepare(model, optimizer, strategy=strategy)
        before = model.weight.detach().clone()
        with (
            pytest.raises(psworker.UnsupportedError, match=said)
            if said
            else nullcontext()
        ):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.tensor([1])).sum().backward()
                optimizer.step()
            moved = (model.weight - before).abs().sum(1) > 0
            assert moved.tolist() == [False, True, False, False, False]


def test_two_runs_in_step_end_with_the_same_bits(tmp_path: Path) -> None:
    found = []
    for run in "ab":
        with Job(tmp_path / run, workers_min=3) as job:
            work = _training(job, psworker.LocalSteps(3), 2)
            results = run_workers(dict.fromkeys(WORKER_IDS, work))
        found.append([values for _, values, _ in results.values()])
    for first, second in zip(*found, strict=True):
        assert deviation(first, second) == 0


def test_inner_state_is_kept_reset_or_averaged_as_said(tmp_path: Path) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in get_args(InnerState):

        def work(
            ps: psworker.Connection,
            worker_id: str,
            kind: InnerState = kind,
        ) -> dict[str, Any]:
            model = _model()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            ps.prepare(
                model, optimizer, strategy=psworker.LocalSteps(3, inner_state=kind)
            )
            for number in range(3):
                _own_step(model, optimizer, worker_id, number)
            state = optimizer.state_dict()["state"]
            return state[0] if state else {}

        with Job(tmp_path / kind, workers_min=2) as job:
            found[kind] = list(_pair(job, work).values())
            if kind == "average":
                with psworker.SnapshotReader(job.address) as reader:
                    snapshot = reader.latest()
                assert snapshot.models == ("model",)
                assert set(snapshot.state_dict()) == {"weight", "bias"}
    assert found["reset"] == [{}, {}]
    kept, averaged = found["keep"], found["average"]
    assert deviation([kept[0]["exp_avg"]], [kept[1]["exp_avg"]]) > 0.01
    for key in ("exp_avg", "exp_avg_sq"):
        mean = (kept[0][key] + kept[1][key]) / 2
        for each in averaged:
            assert deviation([each[key]], [mean]) < 1e-6
    assert averaged[0]["step"] == 3


def test_a_joiner_has_the_rates_of_the_job(tmp_path: Path) -> None:
    def prepared(ps: psworker.Connection) -> tuple[Any, Any, Any]:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        strategy = psworker.LocalSteps(2)
        objects: tuple[Any, Any, Any] = ps.prepare(
            model, optimizer, scheduler, strategy=strategy
        )
        return objects

    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model, optimizer, scheduler = prepared(ps)
        for number in range(6):
            _own_step(model, optimizer, "w0", number)
            scheduler.step()
        with connect(job, "w1") as late:
            _, own, _ = prepared(late)
            # The last push of the job was within its sixth step.
            assert own.param_groups[0]["lr"] == 0.5**5


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_copies_of_a_model_are_the_scripts_own(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = nn.Sequential(_model(), nn.Dropout(0.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ps.prepare(model, optimizer, strategy=psworker.LocalSteps(2))
        inputs = torch.ones(4, 3)
        copies: list[Any] = [
            copy.deepcopy(model),
            torch.optim.swa_utils.AveragedModel(model),
            torch.jit.script(model),
        ]
        torch.save(model, tmp_path / "model.pt")
        copies.append(torch.load(tmp_path / "model.pt", weights_only=False))
        copied = copy.deepcopy(optimizer)
        for each in copies:
            torch.testing.assert_close(each(inputs), model(inputs))
        for _ in range(2):
            copies[0](inputs).sum().backward()
            copied.step()
        assert ps.clock == 0
    for each in (model, *copies):
        each.train()
        each(inputs)  # after the connection


def test_layers_that_an_optimizer_takes_up_later_train_from_then_on(
    tmp_path: Path,
) -> None:
    def work(ps: psworker.Connection, worker_id: str) -> Any:  # noqa: ANN401
        base, head = _model(), nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            head.weight.copy_(torch.eye(2))
        model = nn.Sequential(base, head)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        ps.prepare(model, optimizer, strategy=psworker.LocalSteps(2))
        first = base.weight.detach().clone()
        for number in range(4):
            _own_step(model, optimizer, worker_id, number)
        assert deviation([base.weight.detach()], [first]) == 0
        optimizer.add_param_group({"params": [*base.parameters()]})
        for number in range(4):
            _own_step(model, optimizer, worker_id, number)
        assert ps.clock == 4
        assert deviation([base.weight.detach()], [first]) > 0.01
        return [each.detach().clone() for each in model.parameters()]

    with Job(tmp_path, workers_min=2) as job:
        found = _pair(job, work)
    assert deviation(found["w0"], found["w1"]) == 0


def _one_ahead(loader: Any, stepper: Stepper) -> Iterator[Any]:  # noqa: ANN401
    """Batches, each after the next one was drawn, and rejoins until it was drawn."""
    held: list[Any] = []
    for batch in loader:
        held.append((stepper.rejoin_count, *batch))
        if len(held) > 1:
            yield held.pop(0)
    yield from held


def test_the_data_of_a_round_that_is_lost_goes_back_and_its_worker_begins_anew(
    tmp_path: Path,
) -> None:
    is_out, has_begun = threading.Event(), threading.Event()
    both_are_here = threading.Barrier(2, timeout=WAIT_TIMEOUT_S)
    seen: dict[str, list[int]] = {"w0": [], "w1": []}
    voids: list[list[int]] = []
    # Of each clock those values that the worker had first, with no step upon them yet.
    taken: dict[str, dict[int, list[torch.Tensor]]] = {"w0": {}, "w1": {}}
    last: dict[str, tuple[int, list[torch.Tensor]]] = {}
    with (
        Job(tmp_path, sockets=True) as job,
        FaultProxy(job.address) as proxy,
    ):

        def work(worker_id: str) -> tuple[Any, int]:
            address = proxy.address if worker_id == "w0" else job.address
            with connect(job, worker_id, address=address) as ps:
                model = _model()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                *_, loader = ps.prepare(
                    model, optimizer, _loader(), strategy=psworker.LocalSteps(4)
                )
                stepper = worker_behind(ps)._stepper
                assert stepper is not None

                def values() -> list[torch.Tensor]:
                    return [each.detach().clone() for each in model.parameters()]

                both_are_here.wait()
                for rejoin_count, inputs, indices in _one_ahead(loader, stepper):
                    taken[worker_id].setdefault(ps.clock, values())
                    seen[worker_id] += indices.tolist()
                    before = model.weight.detach().clone()
                    is_void = stepper.rejoin_count > rejoin_count
                    _step(model, optimizer, inputs)
                    taken[worker_id].setdefault(ps.clock, values())
                    if is_void:  # others have it by now
                        assert torch.equal(model.weight, before)
                        voids.append(indices.tolist())
                    if worker_id == "w0" and len(seen["w0"]) == 8:
                        has_begun.set()
                        assert is_out.wait(WAIT_TIMEOUT_S)
                report = loader.report  # once the epoch is over for both
                last[worker_id] = ps.clock, values()
                taken[worker_id].setdefault(*last[worker_id])
                return report, stepper.rejoin_count

        with Crew(dict.fromkeys(("w0", "w1"), work)) as crew:
            assert has_begun.wait(WAIT_TIMEOUT_S)
            proxy.refuse()
            job.wait_record(lambda record: len(record.members) == 1)
            proxy.heal()
            is_out.set()
            found = crew.results()
    for report, _ in found.values():
        assert report.is_complete, report
    assert found["w0"][1] == 1
    assert len(voids) == 1
    clock, values_of_lost = last["w0"]
    assert clock
    assert deviation(values_of_lost, taken["w1"][clock]) == 0
    everything = seen["w0"] + seen["w1"]
    assert set(everything) == set(range(SAMPLE_COUNT))
    # The batches of the lost round, and at most one in hand, were trained again.
    assert len(everything) - SAMPLE_COUNT in (8, 12, 16, 20)
