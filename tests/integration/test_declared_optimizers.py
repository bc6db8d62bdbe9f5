"""Optimizers that change while a job runs: by groups that are added, or for others."""

import collections
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import psworker
from pswire.membership import Mode, StepAtomicity
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.integration.job import (
    WAIT_TIMEOUT_S,
    Crew,
    Job,
    connect,
    deviation,
    run_workers,
)
from tests.integration.one_process import (
    Prepare,
    as_given,
    check_same,
    loss_of,
    small_model,
)

small_chunks = cut_into(24, 64)
"""Cuts tensors of a few elements into chunks, on both sides alike."""


def train(
    model: Any,  # noqa: ANN401, what prepare returns
    optimizer: Any,  # noqa: ANN401
    steps: range,
    rows: slice | None = None,
) -> None:
    how = {"weight": rows.stop - rows.start} if rows else {}
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rows or slice(0, 8)).backward()
        optimizer.step(**how)


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    states = optimizer.state_dict()["state"]
    for number in sorted(states):
        for name in sorted(states[number]):
            yield torch.as_tensor(states[number][name], dtype=torch.float64)


def group_added(prepare: Prepare) -> Iterator[torch.Tensor]:
    """Gradual unfreezing: the head first, then the body, in a group of its own."""
    model: Any = small_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    model, optimizer = prepare(model, torch.optim.Adam(model[2].parameters(), lr=0.05))
    train(model, optimizer, range(2))
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    train(model, optimizer, range(2, 4))
    optimizer.param_groups[1]["lr"] = 0.02
    train(model, optimizer, range(4, 6))
    yield from model.parameters()
    yield from state_of(optimizer)


def unfrozen(prepare: Prepare) -> Iterator[torch.Tensor]:
    """All parameters in the optimizer; some take gradients only from half-way on."""
    model: Any = small_model()
    model[0].requires_grad_(False)
    model, optimizer = prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    )
    train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    train(model, optimizer, range(2, 4))
    model[2].requires_grad_(False)
    train(model, optimizer, range(4, 6))
    yield from model.parameters()
    yield from state_of(optimizer)


def frozen_by_groups(prepare: Prepare) -> Iterator[torch.Tensor]:
    """A layer is taken out of its group while gradients go on, and comes back."""
    model: Any = small_model()
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    model, optimizer = prepare(model, torch.optim.Adam(groups, lr=0.05))
    train(model, optimizer, range(2))
    taken_out = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = []
    train(model, optimizer, range(2, 4))
    yield from [each.detach().clone() for each in model.parameters()]
    optimizer.param_groups[0]["params"] = taken_out
    optimizer.param_groups[1]["params"].reverse()
    train(model, optimizer, range(4, 6))
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups.append({**optimizer.param_groups[1], "params": [moved]})
    optimizer.param_groups[2]["lr"] = 0.01
    train(model, optimizer, range(6, 8))
    del optimizer.param_groups[0]
    train(model, optimizer, range(8, 10))
    yield from model.parameters()


def thrown_away(prepare: Prepare) -> Iterator[torch.Tensor]:
    """Moments of all parameters, of one, and some of what one has."""
    model: Any = small_model()
    model, optimizer = prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    train(model, optimizer, range(3))
    optimizer.state.clear()
    train(model, optimizer, range(3, 5))
    optimizer.state[model[0].weight] = {}
    optimizer.state.pop(model[2].bias)
    train(model, optimizer, range(5, 7))
    optimizer.state[model[0].weight]["exp_avg"].zero_()
    optimizer.state[model[2].weight]["step"] = torch.tensor(0.0)
    train(model, optimizer, range(7, 9))
    optimizer.state = collections.defaultdict(dict)
    train(model, optimizer, range(9, 10))
    for parameter in model.parameters():
        optimizer.state[parameter] = {}
    train(model, optimizer, range(10, 12))
    yield from model.parameters()
    yield from state_of(optimizer)


def refuse_all_use(old: torch.optim.Optimizer) -> None:
    uses: tuple[tuple[str, Callable[[], object]], ...] = (
        ("step", old.step),
        ("save", old.state_dict),
        ("load", lambda: old.load_state_dict({})),
        ("add groups to", lambda: old.add_param_group({"params": []})),
    )
    for verb, use in uses:
        text = f"put another optimizer in place.*: {verb} the one that it returned"
        with pytest.raises(psworker.ConfigurationError, match=text):
            use()


def exchanged(prepare: Prepare) -> Iterator[torch.Tensor]:
    """Adam first, then SGD, then another SGD: each begins without state."""
    model: Any = small_model()
    model, optimizer = prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    train(model, optimizer, range(2))
    old = optimizer
    for first_step in (2, 4):
        plain = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        model, optimizer, scheduler = prepare(model, plain, scheduler)
        if is_job(prepare):
            refuse_all_use(old)
        yield torch.tensor(float(len(optimizer.state_dict()["state"])))
        train(model, optimizer, range(first_step, first_step + 2))
        scheduler.step()
        old = optimizer
    yield from model.parameters()
    yield from state_of(optimizer)


def exchanged_with_state(prepare: Prepare) -> Iterator[torch.Tensor]:
    """Back to an optimizer that was saved, by building it anew and loading it."""
    model: Any = small_model()
    model, optimizer = prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(saved)
    model, optimizer = prepare(model, again)
    yield from state_of(optimizer)
    train(model, optimizer, range(2, 4))
    yield from model.parameters()
    yield from state_of(optimizer)


def one_of_two_exchanged(prepare: Prepare) -> Iterator[torch.Tensor]:
    model: Any = small_model()
    other: Any = small_model()
    model, other, first, second = prepare(
        model,
        other,
        torch.optim.Adam(model.parameters(), lr=0.05),
        torch.optim.Adam(other.parameters(), lr=0.02),
    )
    train(model, first, range(2))
    train(other, second, range(2))
    plain = torch.optim.SGD(other.parameters(), lr=0.02)
    first, second = prepare(first, plain) if is_job(prepare) else (first, plain)
    train(other, second, range(2, 4))
    train(model, first, range(2, 4))
    yield from (*model.parameters(), *other.parameters(), *state_of(first))


def is_job(prepare: Prepare) -> bool:
    return prepare is not as_given


@pytest.mark.parametrize(
    "script",
    [
        group_added,
        unfrozen,
        frozen_by_groups,
        thrown_away,
        exchanged,
        exchanged_with_state,
        one_of_two_exchanged,
    ],
    ids=lambda script: script.__name__,
)
def test_a_change_has_the_numbers_of_one_process(
    script: Callable[[Prepare], Iterator[torch.Tensor]], tmp_path: Path
) -> None:
    check_same(lambda prepare: list(script(prepare)), tmp_path)


@pytest.mark.parametrize(
    "script",
    [group_added, frozen_by_groups, thrown_away, exchanged],
    ids=lambda script: script.__name__,
)
def test_a_change_has_the_same_numbers_with_overlap(
    script: Callable[[Prepare], Iterator[torch.Tensor]], tmp_path: Path
) -> None:
    def overlapping(prepare: Prepare) -> list[torch.Tensor]:
        if prepare is as_given:
            return list(script(prepare))
        return list(script(functools.partial(prepare, overlap=True)))

    check_same(overlapping, tmp_path)


ROWS: Final = {"w0": slice(0, 3), "w1": slice(3, 8)}


@pytest.mark.parametrize("case", ["one phase", "two phases", "asp"])
def test_workers_change_at_the_same_place(case: str, tmp_path: Path) -> None:
    def script(
        model: Any,  # noqa: ANN401, what prepare returns
        optimizer: Any,  # noqa: ANN401
        prepare: Callable[..., Any],
        rows: slice | None,
    ) -> Any:  # noqa: ANN401
        train(model, optimizer, range(2), rows)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        train(model, optimizer, range(2, 4), rows)
        optimizer = prepare(torch.optim.RMSprop(model.parameters(), eps=1e-4))
        train(model, optimizer, range(4, 6), rows)
        return optimizer

    def work(worker_id: str) -> list[torch.Tensor]:
        model: Any = small_model()
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(
                model, torch.optim.Adam(model[2].parameters(), lr=0.05)
            )
            optimizer = script(model, optimizer, ps.prepare, ROWS[worker_id])
            found = [*model.parameters(), *state_of(optimizer)]
        return [each.detach().clone() for each in found]

    settings: dict[str, dict[str, Any]] = {
        "one phase": {},
        "two phases": {"step_atomicity": StepAtomicity.CLOCK},
        "asp": {"mode": Mode.ASP},
    }
    with Job(tmp_path, workers_min=2, **settings[case]) as job:
        results = run_workers(dict.fromkeys(ROWS, work))
        assert job.ask(lambda: len(job.terms.declared)) == 2
    if case == "asp":
        finite = [found.isfinite().all() for each in results.values() for found in each]
        assert all(finite)
        return
    plain: Any = small_model()
    optimizer = torch.optim.Adam(plain[2].parameters(), lr=0.05)
    optimizer = script(plain, optimizer, lambda each: each, None)
    exact = [each.detach() for each in (*plain.parameters(), *state_of(optimizer))]
    for found in results.values():
        assert deviation(found, exact) <= DEVIATION_MAX


def test_a_late_joiner_begins_with_the_first_groups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the worker that was there first count, and its own are left out."""
    joined = threading.Event()
    changed = threading.Event()

    with Job(tmp_path) as job, connect(job, "w0") as first:
        model: Any = small_model()
        model, optimizer = first.prepare(
            model, torch.optim.SGD(model[2].parameters(), lr=0.05)
        )
        train(model, optimizer, range(1))
        optimizer.add_param_group({"params": model[0].parameters()})
        train(model, optimizer, range(1, 2))
        optimizer = first.prepare(torch.optim.SGD(model[0].parameters(), lr=0.5))
        head = [each.detach().clone() for each in model[2].parameters()]

        def late(worker_id: str) -> None:
            other: Any = small_model()
            with connect(job, worker_id) as ps:
                other, own = ps.prepare(
                    other, torch.optim.SGD(other[2].parameters(), lr=0.05)
                )
                joined.set()
                train(other, own, range(2, 4), slice(3, 8))
                assert changed.wait(WAIT_TIMEOUT_S)

        def go_on(worker_id: str) -> None:
            assert joined.wait(WAIT_TIMEOUT_S)
            with caplog.at_level(logging.WARNING, "psserver.shard"):
                train(model, optimizer, range(2, 4), slice(0, 3))
            changed.set()

        run_workers({"w0": go_on, "w1": late})
        same = [
            torch.equal(old, new)
            for old, new in zip(head, model[2].parameters(), strict=True)
        ]
    assert all(same), "the longest worker's optimizer does not have them"
    told = [r.getMessage() for r in caplog.records if "different parameter" in r.msg]
    assert len(told) == 2, "once on each shard"


def test_declarations_survive_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model: Any = small_model()
        model, optimizer = ps.prepare(
            model, torch.optim.Adam(model[2].parameters(), lr=0.05)
        )
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        train(model, optimizer, range(2))
        job.stop_coordinator()
        job.start_coordinator()
        job.wait_record(lambda record: True)
        (declared,) = job.ask(lambda: job.terms.declared)
        assert declared == optimizer.spec
        train(model, optimizer, range(2, 3))
        optimizer = ps.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer, range(3, 4))
        assert ps.clock == 4


def test_a_group_of_a_foreign_parameter_changes_nothing(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model: Any = small_model()
        model, optimizer = ps.prepare(
            model, torch.optim.Adam(model.parameters(), lr=0.05)
        )
        with pytest.raises(psworker.ConfigurationError, match="belongs to no model"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
        train(model, optimizer, range(1))
        assert len(optimizer.param_groups) == 1
        assert not job.ask(lambda: job.terms.declared)


def test_groups_can_not_be_changed_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psserver.coordinator.core.job_model.DECLARATION_COUNT_MAX", 1)
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model: Any = small_model()
        model, optimizer = ps.prepare(
            model, torch.optim.Adam([model[2].weight], lr=0.05)
        )
        optimizer.add_param_group({"params": [model[2].bias]})
        with pytest.raises(psworker.LimitError, match="give the optimizer its groups"):
            optimizer.add_param_group({"params": [model[0].weight]})
        train(model, optimizer, range(1))
        assert len(optimizer.param_groups) == 2


REFUSALS: Final[dict[str, tuple[str, Callable[[Any, Any], tuple[Any, ...]]]]] = {
    "another model": (
        "the models of the first call only",
        lambda model, optimizer: (small_model(), optimizer),
    ),
    "a new loader": (
        "the loaders of the first call only",
        lambda model, optimizer: (
            optimizer,
            torch.utils.data.DataLoader([1, 2]),  # type: ignore[arg-type]
        ),
    ),
    "two optimizers": (
        "as many optimizers as the job has",
        lambda model, optimizer: (
            optimizer,
            torch.optim.SGD(model.parameters(), lr=0.1),
        ),
    ),
    "no optimizer": (
        "as many optimizers as the job has",
        lambda model, optimizer: (model,),
    ),
    "the user's old optimizer": (
        "was prepared already",
        lambda model, optimizer: (model, optimizer._inner),
    ),
    "something else": ("does not take a int", lambda model, optimizer: (optimizer, 3)),
}


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[psworker.Connection, Any, Any]]:
    with Job(tmp_path_factory.mktemp("again")) as job, connect(job, "w0") as ps:
        model: Any = small_model()
        yield (ps, *ps.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05)))


@pytest.mark.parametrize("case", REFUSALS)
def test_what_prepare_does_not_take_again_is_refused(
    case: str, running: tuple[psworker.Connection, Any, Any]
) -> None:
    text, make = REFUSALS[case]
    ps, model, optimizer = running

    with pytest.raises(psworker.ConfigurationError, match=text):
        ps.prepare(*make(model, optimizer))

    clock = ps.clock
    train(model, optimizer, range(1))
    assert ps.clock == clock + 1


def test_overlap_is_not_switched_on_later(
    running: tuple[psworker.Connection, Any, Any],
) -> None:
    ps, model, optimizer = running
    with pytest.raises(psworker.ConfigurationError, match="if the first prepare"):
        ps.prepare(model, optimizer, overlap=True)


def test_another_norm_to_clip_to_is_refused(
    running: tuple[psworker.Connection, Any, Any],
) -> None:
    ps, model, optimizer = running
    with pytest.raises(psworker.ConfigurationError, match="clips as the first"):
        ps.prepare(model, optimizer, clip_grad_norm=1.0)
    assert ps.prepare(model, optimizer) == (model, optimizer)


def test_a_shard_holds_a_push_until_it_has_heard_of_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a worker is quicker than the coordinator's watch."""
    with Job(tmp_path, shard_count=1) as job, connect(job, "w0") as ps:
        model: Any = small_model()
        model, optimizer = ps.prepare(model, torch.optim.SGD([model[2].bias], lr=0.1))
        (host,) = job.shards
        declared, asked = host.model.engine.declared, threading.Event()
        has_declared = declared.has

        def has(name: str, digest: str) -> bool:
            asked.set()
            return has_declared(name, digest)

        monkeypatch.setattr(declared, "has", has)
        # The worker goes ahead as if all knew.
        monkeypatch.setattr(
            optimizer._steps._states, "declare", lambda spec, clock: None
        )
        optimizer.add_param_group({"params": [model[2].weight]})
        terms = host.model.terms
        changed = replace(terms, optimizers=(*terms.optimizers, optimizer.spec))
        with Crew({"w0": lambda _: train(model, optimizer, range(1))}) as crew:
            assert asked.wait(WAIT_TIMEOUT_S)
            assert not job.ask(lambda: host.model.core.clocks.applied_clock)
            job.ask(lambda: host.adopt(changed))
            crew.results()
        assert job.step_counts(2) == {1}, "of the group that was added"
