"""State of optimizers comes from the shards and goes to them as torch writes it."""

import copy
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import pytest
import torch
from torch import nn

import psworker
from pswire.addresses import Address, parse_address
from pswire.membership import Mode, StepAtomicity
from pswire.optimizer_classes import class_named
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.fault_proxy import FaultProxy
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.integration.job import (
    Crew,
    Job,
    connect,
    deviation,
    run_workers,
    short_steps,
)
from tests.integration.one_process import (
    Prepare,
    as_given,
    loss_of,
    on_job,
    small_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_COUNT: Final = 3
READINESS: Final = "psserver.shard.rpc.readiness"

VARIANTS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("SGD", {"lr": 0.02}),
    ("SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("RMSprop", {"lr": 0.002, "eps": 1e-4}),
    ("RMSprop", {"lr": 0.001, "eps": 1e-4, "centered": True, "momentum": 0.9}),
    ("Adamax", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("Adadelta", {"lr": 0.5}),
    ("DelayedNesterov", {"lr": 0.05, "buffer_size": 2, "activation": 0.25}),
]


small_chunks = cut_into(24, 64)
"""Cuts tensors of a few elements into chunks, on both sides alike."""


class Run:
    """A script that saves what it ends with and may begin with what was saved.

    Attributes:
        model_state: The model's values at the end.
        optimizer_state: The optimizer's state at the end.
    """

    def __init__(
        self,
        class_name: str,
        settings: dict[str, Any],
        *,
        first_step: int = 0,
        begin_with: "Run | None" = None,
        load_late: bool = False,
    ) -> None:
        self._class: Callable[..., torch.optim.Optimizer] = class_named(class_name)
        self._settings = settings
        self._first_step = first_step
        self._begin_with = begin_with
        self._load_late = load_late
        self.model_state: dict[str, torch.Tensor] = {}
        self.optimizer_state: dict[str, Any] = {}

    def __call__(self, prepare: Prepare) -> list[torch.Tensor]:
        model: Any = small_model()
        optimizer = self._class(
            [
                {"params": model[0].parameters()},
                {"params": model[2].parameters(), "weight_decay": 0.01},
            ],
            **self._settings,
        )
        if self._begin_with is not None:
            model.load_state_dict(self._begin_with.model_state)
        saved = copy.deepcopy(self._begin_with and self._begin_with.optimizer_state)
        if saved and not self._load_late:
            optimizer.load_state_dict(saved)
        model, optimizer = prepare(model, optimizer)
        if saved and self._load_late:
            optimizer.load_state_dict(saved)
        for step in range(self._first_step, self._first_step + STEP_COUNT):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if step == 1:  # the last bias has no gradient: its history is another
                model[2].bias.requires_grad_(False)
                loss = loss_of(model, step)
                model[2].bias.requires_grad_(True)
            loss.backward()
            optimizer.step()
        self.optimizer_state = copy.deepcopy(optimizer.state_dict())
        self.model_state = copy.deepcopy(model.state_dict())
        return [*model.parameters(), *flat(self.optimizer_state)]


def flat(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    """All state in one order, with a shape that tells one number from an element."""
    return [
        torch.as_tensor(state_dict["state"][number][name], dtype=torch.float64)
        for number in sorted(state_dict["state"])
        for name in sorted(state_dict["state"][number])
        if state_dict["state"][number][name] is not None
    ]


def names(state_dict: dict[str, Any]) -> dict[int, set[str]]:
    return {
        number: {name for name, value in state.items() if value is not None}
        for number, state in state_dict["state"].items()
        if state
    }


@pytest.mark.parametrize(("class_name", "settings"), VARIANTS)
def test_state_is_that_of_one_process_and_goes_on_in_one(
    class_name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    plain = Run(class_name, settings)
    expected = [each.detach().clone() for each in plain(as_given)]
    served = Run(class_name, settings)
    found = on_job(served, tmp_path / "first")

    assert names(served.optimizer_state) == names(plain.optimizer_state)
    shapes = [each.shape for each in flat(served.optimizer_state)]
    assert shapes == [each.shape for each in flat(plain.optimizer_state)]
    assert deviation(found, expected) <= DEVIATION_MAX
    settings_of = [
        {key: value for key, value in group.items() if key != "foreach"}
        for group in served.optimizer_state["param_groups"]
    ]
    assert settings_of == [
        {key: value for key, value in group.items() if key != "foreach"}
        for group in plain.optimizer_state["param_groups"]
    ]

    # From what the job has saved: one process, a job that loads before prepare, and
    # one that loads after it.
    goes_on: dict[str, Any] = {"first_step": STEP_COUNT, "begin_with": served}
    expected = [
        each.detach().clone() for each in Run(class_name, settings, **goes_on)(as_given)
    ]
    early = on_job(Run(class_name, settings, **goes_on), tmp_path / "early")
    assert deviation(early, expected) <= DEVIATION_MAX
    late = Run(class_name, settings, **goes_on, load_late=True)
    assert deviation(on_job(late, tmp_path / "late"), expected) <= DEVIATION_MAX


def adam(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:  # noqa: ANN401
    return torch.optim.Adam(model.parameters(), lr=0.05, **settings)


def train(model: Any, optimizer: Any, rank: int | None, steps: range) -> None:  # noqa: ANN401
    rows = {None: slice(0, 8), 0: slice(0, 3), 1: slice(3, 8)}[rank]
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rows).backward()
        how = {} if rank is None else {"weight": rows.stop - rows.start}
        optimizer.step(**how)


@pytest.mark.parametrize("mode", ["bsp", "backup", "commit", "ssp"])
def test_workers_read_and_load_at_the_same_place(mode: str, tmp_path: Path) -> None:
    """Back to the state of two steps ago, as one process goes back."""

    def script(model: Any, optimizer: Any, rank: int | None) -> dict[str, Any]:  # noqa: ANN401
        train(model, optimizer, rank, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, rank, range(2, 4))
        optimizer.load_state_dict(saved)
        again = optimizer.state_dict()
        torch.testing.assert_close(flat(again), flat(saved), rtol=0, atol=0)
        train(model, optimizer, rank, range(4, 6))
        return dict(optimizer.state_dict())

    def work(worker_id: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
        model = small_model()
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(model, adam(model))
            state = script(model, optimizer, int(worker_id[1:]))
        return [each.detach().clone() for each in model.parameters()], state

    cases: dict[str, dict[str, Any]] = {
        "bsp": {},
        "backup": {"backup_worker_count": 1, "step_atomicity": StepAtomicity.CLOCK},
        "commit": {"step_atomicity": StepAtomicity.CLOCK},
        "ssp": {"mode": Mode.SSP, "staleness_bound": 1},
    }
    with Job(tmp_path, workers_min=2, **cases[mode]) as job:
        results = run_workers({"w0": work, "w1": work})
    plain = small_model()
    optimizer = adam(plain)
    expected = script(plain, optimizer, None)

    steps = {float(each["step"]) for each in results["w0"][1]["state"].values()}
    if mode in ("bsp", "commit"):
        exact = [*(each.detach() for each in plain.parameters()), *flat(expected)]
        for values, state in results.values():
            assert deviation([*values, *flat(state)], exact) <= DEVIATION_MAX
        assert steps == {4.0}
    elif mode == "ssp":
        # Each push is an update; the longest worker's has gone back, once: to at most 2
        # of its own and 3 of the other's, who then has 3 to make beside its own 2.
        assert steps <= {float(count) for count in range(4, 11)}
    else:  # of six steps two or more counted, all from one place of all tensors
        (count,) = steps
        assert 2 <= count <= 6


def test_state_of_other_switches_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    with Job(tmp_path / "late") as job, connect(job, "w0") as ps:
        model: Any = small_model()
        other = adam(model, amsgrad=True)
        train(model, other, None, range(1))
        saved = other.state_dict()
        saved["param_groups"][0]["amsgrad"] = False
        model, optimizer = ps.prepare(model, adam(model, amsgrad=True))
        train(model, optimizer, None, range(1))
        for state in saved["state"].values():
            del state["max_exp_avg_sq"]
        saved["param_groups"][0]["amsgrad"] = True
        optimizer.load_state_dict(saved)
        with pytest.raises(psworker.HyperparameterError, match="goes on from") as bad:
            train(model, optimizer, None, range(1, 2))
        assert "another class, or of other switches" in str(bad.value)
        assert ps.clock == 1

        optimizer.load_state_dict(adam(model, amsgrad=True).state_dict())
        train(model, optimizer, None, range(2, 3))
        assert ps.clock == 2
        assert job.step_counts(0) == {1}  # an empty state was loaded


def test_state_that_no_shard_can_use_ends_prepare(tmp_path: Path) -> None:
    model = small_model()
    optimizer = adam(model)
    train(model, optimizer, None, range(1))
    optimizer.param_groups[0]["amsgrad"] = True
    with (
        Job(tmp_path) as job,
        connect(job, "w0") as ps,
        pytest.raises(psworker.HyperparameterError, match="max_exp_avg_sq"),
    ):
        ps.prepare(model, optimizer)


def test_a_late_joiner_reads_the_state_too(tmp_path: Path) -> None:
    joined = threading.Event()

    with Job(tmp_path) as job, connect(job, "w0") as first:
        model = small_model()
        model, optimizer = first.prepare(model, adam(model))
        train(model, optimizer, None, range(3))

        def late(worker_id: str) -> dict[str, Any]:
            other = small_model()
            with connect(job, worker_id) as ps:
                other, other_optimizer = ps.prepare(other, adam(other))
                joined.set()
                state = dict(other_optimizer.state_dict())
                train(other, other_optimizer, 1, range(3, 4))
                return state

        def go_on(worker_id: str) -> dict[str, Any]:
            assert joined.wait(20)
            state = dict(optimizer.state_dict())
            train(model, optimizer, 0, range(3, 4))
            return state

        states = run_workers({"w0": go_on, "w1": late})
    torch.testing.assert_close(flat(states["w0"]), flat(states["w1"]), rtol=0, atol=0)


def test_state_for_a_push_under_way_comes_too_late(tmp_path: Path) -> None:
    """What a push loads does not change any more while its clock waits for others."""

    def prepared(ps: psworker.Connection) -> tuple[Any, Any]:
        model = small_model()
        found: tuple[Any, Any] = ps.prepare(model, adam(model))
        return found

    with (
        Job(tmp_path, workers_min=2) as job,
        connect(job, "w0") as first,
        connect(job, "w1") as second,
    ):
        joining = {"w0": lambda _: prepared(first), "w1": lambda _: prepared(second)}
        mine, other = run_workers(joining).values()
        with Crew({"w0": lambda _: train(*mine, 0, range(1))}) as crew:
            job.wait_pushed("w0", 1)
            with pytest.raises(psworker.ProtocolError, match="too late"):
                mine[1]._steps._states.stage("optimizer", 1, {})
            train(*other, 1, range(1))
            crew.results()
        assert job.step_counts(0) == {1}


@pytest.mark.parametrize("settled_by", ["step", "state_dict", "push_nothing"])
def test_state_loaded_after_a_step_that_was_late_goes_with_the_next(
    settled_by: str, tmp_path: Path
) -> None:
    """The push of the late step carries none, whoever brings it to its end."""

    def prepared(ps: psworker.Connection) -> tuple[Any, Any]:
        model = small_model()
        found: tuple[Any, Any] = ps.prepare(model, adam(model))
        return found

    with (
        Job(tmp_path, workers_min=2) as job,
        connect(job, "w0") as first,
        connect(job, "w1") as second,
    ):
        joining = {"w0": lambda _: prepared(first), "w1": lambda _: prepared(second)}
        mine, other = run_workers(joining).values()
        with short_steps(first, 2), pytest.raises(psworker.StepTimeoutError):
            train(*mine, 0, range(1))
        train(*other, 1, range(1))
        if settled_by == "state_dict":
            mine[1].state_dict()
        mine[1].load_state_dict(adam(small_model()).state_dict())  # an empty one
        if settled_by == "push_nothing":
            mine[1].push_nothing()
        else:
            mine[1].step()
        assert job.step_counts(0) == {1}

        works = {
            "w0": lambda _: train(*mine, 0, range(1, 2)),
            "w1": lambda _: train(*other, 1, range(1, 2)),
        }
        run_workers(works)

        assert first.clock == 2
        assert job.step_counts(0) == {1}  # from the empty state on


def test_a_wait_for_state_ends_with_who_is_late(tmp_path: Path) -> None:
    def prepared(ps: psworker.Connection) -> Any:  # noqa: ANN401
        model = small_model()
        return ps.prepare(model, adam(model))[1]

    with (
        Job(tmp_path, workers_min=2) as job,
        connect(job, "w0") as first,
        connect(job, "w1") as second,
    ):
        joining = {"w0": lambda _: prepared(first), "w1": lambda _: prepared(second)}
        states = run_workers(joining)["w0"]._steps._states
        # As a shard tells it, which takes it an interval.
        with (
            short_steps(first, 4),
            mock.patch(f"{READINESS}.WAITING_INTERVAL_MS", 100),
            pytest.raises(psworker.WaitTimeoutError) as caught,
        ):
            states.pull("optimizer", 1)
        # That they are alive a shard hears with its next report.
        assert str(caught.value).replace("alive, ", "") == (
            "the state of optimizer at clock 1 was not there within 4 s: waiting for "
            "clock 1 to be complete: w0 (no push yet), w1 (no push yet)"
        )
        with (
            short_steps(first, 1),
            mock.patch(f"{READINESS}.WAITING_INTERVAL_MS", 100),
            pytest.raises(psworker.WaitTimeoutError, match=r"^the settings of opti"),
        ):
            states.pull_settings("optimizer", 1)


def test_state_that_a_shard_does_not_take_in_time_is_told_by_its_step(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        proxies: list[FaultProxy] = []

        def through_proxy(address: Address) -> Address:
            proxies.append(stack.enter_context(FaultProxy(str(address))))
            return parse_address(proxies[0].address)

        job = stack.enter_context(Job(tmp_path, advertise={1: through_proxy}))
        ps = stack.enter_context(connect(job, "w0"))
        model = small_model()
        model, optimizer = ps.prepare(model, adam(model))
        train(model, optimizer, None, range(1))
        optimizer.load_state_dict(optimizer.state_dict())
        proxies[0].refuse()
        with (
            short_steps(ps, 4),
            pytest.raises(psworker.StepTimeoutError) as caught,
        ):
            train(model, optimizer, None, range(1, 2))
        proxies[0].heal()
        optimizer.step()
        assert ps.clock == 2
        assert job.step_counts(0) == {2}

    text = str(caught.value)
    assert text.startswith(
        "the shards have not taken the state loaded into optimizer within 4 s: shard 1 "
        f"at {proxies[0].address}"
    )
    assert text.endswith("; step() again sends it again")
