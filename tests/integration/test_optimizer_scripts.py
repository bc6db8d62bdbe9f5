"""What scripts do around an optimizer has the numbers of one process."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import psworker
from psworker.errors import ConfigurationError, UnsupportedError
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.integration.job import Job, connect, deviation, run_workers
from tests.integration.one_process import (
    SEED,
    Prepare,
    batch,
    check_same,
    loss_of,
    small_model,
)

STEP_COUNT: Final = 5


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def accumulation(prepare: Prepare) -> Iterator[torch.Tensor]:
    model = small_model()
    model, optimizer = prepare(model, adam(model))
    for step in range(STEP_COUNT):
        for rows in (slice(0, 3), slice(3, 8)):
            loss_of(model, step, rows).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    yield from model.parameters()


def clipping_by_norm(prepare: Prepare) -> Iterator[torch.Tensor]:
    model = small_model()
    model, optimizer = prepare(model, adam(model))
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        yield nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    yield from model.parameters()


def clipping_by_value(prepare: Prepare) -> Iterator[torch.Tensor]:
    model = small_model()
    model, optimizer = prepare(model, adam(model))
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    yield from model.parameters()


def hooks(prepare: Prepare) -> Iterator[torch.Tensor]:
    model = small_model()
    inner = adam(model)
    seen: list[str] = []
    inner.register_step_pre_hook(lambda *_: seen.append("early pre"))
    inner.register_step_post_hook(lambda *_: seen.append("early post"))
    model, optimizer = prepare(model, inner)

    def halve(*_: object) -> None:
        seen.append("pre")
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    late = optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if step == 0:
            late.remove()
    assert " ".join(seen) == "early pre pre early post post early pre pre early post"
    yield from model.parameters()


def frozen_and_unused(prepare: Prepare) -> Iterator[torch.Tensor]:
    model: Any = small_model()
    spare = nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in spare.parameters():
            parameter.fill_(0.25)
    model.add_module("spare", spare)
    model[0].bias.requires_grad_(False)
    model, optimizer = prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    )
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        found = model[2](model[1](model[0](inputs)))
        if step % 2:  # the spare part has no gradient in every other step
            found = found + model.spare(inputs)
        nn.functional.mse_loss(found, targets).backward()
        optimizer.step()
    yield from model.parameters()


class Tied(nn.Module):
    """A transformer's embedding and output layer, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.output(self.embedding(tokens).tanh())
        return found


def tied(prepare: Prepare) -> Iterator[torch.Tensor]:
    model: Any = Tied()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        model.embedding.weight.copy_(torch.randn(7, 4, generator=generator))
    model, optimizer = prepare(model, adam(model))
    for step in range(STEP_COUNT):
        tokens = torch.arange(step, step + 6) % 7
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), (tokens + 1) % 7).backward()
        optimizer.step()
    assert model.output.weight is model.embedding.weight
    yield from model.parameters()


def compiled(prepare: Prepare) -> Iterator[torch.Tensor]:
    plain = small_model()
    model, optimizer = prepare(torch.compile(plain, backend="eager"), adam(plain))
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    yield from plain.parameters()


def data_parallel(prepare: Prepare) -> Iterator[torch.Tensor]:
    model: nn.Module = nn.DataParallel(small_model())
    model, optimizer = prepare(model, adam(model))
    for step in range(STEP_COUNT):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    yield from model.parameters()


def two_optimizers(prepare: Prepare) -> Iterator[torch.Tensor]:
    """A GAN: two models, two optimizers, one step of each in turn."""
    generator_net, critic = nn.Linear(3, 5), small_model()
    with torch.no_grad():
        for parameter in generator_net.parameters():
            parameter.fill_(0.1)
    generator_net, critic, first, second = prepare(
        generator_net,
        critic,
        torch.optim.RMSprop(generator_net.parameters(), lr=0.01, eps=1e-4),
        torch.optim.Adam(critic.parameters(), lr=0.02, betas=(0.5, 0.9)),
    )
    for step in range(STEP_COUNT):
        inputs, noise = batch(step)
        second.zero_grad()
        made = generator_net(noise)
        (critic(made.detach()).mean() - critic(inputs).mean()).backward()
        second.step()
        first.zero_grad()
        (-critic(made).square().mean()).backward()
        first.step()
    yield from (*generator_net.parameters(), *critic.parameters())


def scaled(prepare: Prepare) -> Iterator[torch.Tensor]:
    """`GradScaler` and autocast, with clipping and one infinite gradient."""
    model = small_model()
    model, optimizer = prepare(model, adam(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(2 * STEP_COUNT):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step == 3:
            model[0].weight.grad.fill_(float("inf"))
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        yield torch.tensor(scaler.get_scale())
    yield from model.parameters()


SCRIPTS: Final = [
    accumulation,
    clipping_by_norm,
    clipping_by_value,
    hooks,
    frozen_and_unused,
    tied,
    compiled,
    data_parallel,
    two_optimizers,
    scaled,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_has_the_numbers_of_one_process(
    script: Callable[[Prepare], Iterator[torch.Tensor]], tmp_path: Path
) -> None:
    check_same(lambda prepare: list(script(prepare)), tmp_path)


def test_an_infinite_gradient_of_one_worker_skips_the_step_of_all_once(
    tmp_path: Path,
) -> None:
    """As one process that has the samples of both, and an infinite loss in step 2."""

    def train(
        model: Any,  # noqa: ANN401, what prepare returns
        optimizer: Any,  # noqa: ANN401
        rank: int | None,
    ) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        rows = {None: slice(0, 8), 0: slice(0, 3), 1: slice(3, 8)}[rank]
        scales = []
        for step in range(STEP_COUNT):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, rows)).backward()
            if step == 2 and rank != 0:
                model[2].bias.grad[0] = float("inf")
            how = {} if rank is None else {"weight": rows.stop - rows.start}
            scaler.step(optimizer, **how)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    def work(worker_id: str) -> tuple[list[torch.Tensor], list[float]]:
        model = small_model()
        with connect(job, worker_id) as ps:
            model, optimizer = ps.prepare(model, adam(model))
            scales = train(model, optimizer, int(worker_id[1:]))
        return [each.detach() for each in model.parameters()], scales

    with Job(tmp_path, workers_min=2) as job:
        results = run_workers({"w0": work, "w1": work})
        assert job.step_counts(0) == {STEP_COUNT - 1}
    plain = small_model()
    expected = train(plain, adam(plain), None)

    # The scale of a worker follows its own gradients, as torch says.
    assert results["w1"][1] == expected
    assert results["w0"][1] == [256.0] * STEP_COUNT
    exact = [each.detach() for each in plain.parameters()]
    measured = deviation(results["w0"][0], exact)
    print(f"seed {SEED}: deviation {measured:.2e}")
    assert measured <= DEVIATION_MAX


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prepared_scaler_hears_of_what_others_found(
    tmp_path: Path, overlap: bool
) -> None:
    """Scales fall, and grow, as that of one process that has the samples of both."""
    step_count = 3 * STEP_COUNT

    def train(prepare: Callable[..., Any], rank: int | None) -> tuple[Any, list[float]]:
        model = small_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        model, optimizer, mine = prepare(model, adam(model), scaler)
        assert mine is scaler
        rows = {None: slice(0, 8), 0: slice(0, 3), 1: slice(3, 8)}[rank]
        infinite = {2: 1, 3: 0, 9: 1}  # by step, whose gradient it is in
        scales = []
        for step in range(step_count):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, rows)).backward()
            if step in infinite and rank in (infinite[step], None):
                model[2].bias.grad[0] = float("inf")
            how = {} if rank is None else {"weight": rows.stop - rows.start}
            scaler.step(optimizer, **how)
            scaler.update()
            scales.append(scaler.get_scale())
        return model, scales

    def work(worker_id: str) -> tuple[list[torch.Tensor], list[float]]:
        with connect(job, worker_id) as ps:
            prepare = partial(ps.prepare, overlap=overlap)
            model, scales = train(prepare, int(worker_id[1:]))
        return [each.detach() for each in model.parameters()], scales

    with Job(tmp_path, workers_min=2) as job:
        results = run_workers({"w0": work, "w1": work})
        assert job.step_counts(0) == {step_count - 3}
    plain, expected = train(lambda *objects: objects, None)

    assert results["w0"][1] == results["w1"][1] == expected
    assert min(expected) == 64.0
    exact = [each.detach() for each in plain.parameters()]
    measured = deviation(results["w0"][0], exact)
    print(f"seed {SEED}: deviation {measured:.2e}")
    assert measured <= DEVIATION_MAX


def test_a_scaler_that_is_off_or_exchanged_may_be_prepared(tmp_path: Path) -> None:
    with Job(tmp_path) as job, connect(job, "w0") as ps:
        model = small_model()
        off = torch.amp.GradScaler("cpu", enabled=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model, optimizer, *_ = ps.prepare(model, adam(model), off, scaler)
        for again in ((scaler,), ()):
            loss_of(model, 0).backward()
            model[2].bias.grad[0] = float("inf")
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            optimizer, *_ = ps.prepare(adam(model), *again, model)
        assert scaler.get_scale() == 1.0
        with pytest.raises(psworker.ConfigurationError, match="gradient scalers"):
            ps.prepare(optimizer, "scaler")


@pytest.fixture(scope="module")
def ps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[psworker.Connection]:
    folder = tmp_path_factory.mktemp("edited")
    with Job(folder) as job, connect(job, "w0") as connection:
        yield connection


@pytest.fixture(scope="module")
def trained(ps: psworker.Connection) -> tuple[Any, Any]:
    model = small_model()
    prepared: tuple[Any, Any] = ps.prepare(model, adam(model))
    return prepared


def step(trained: tuple[Any, Any]) -> None:
    model, optimizer = trained
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the worker has said; daemons of its job may say more."""
    return [
        each.getMessage() for each in caplog.records if each.name.startswith("psworker")
    ]


def test_values_edited_between_steps_are_warned_about_once(
    trained: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained
    with caplog.at_level(logging.WARNING, "psworker"):
        step(trained)
        step(trained)
        assert not said(caplog)
        with torch.no_grad():
            model[2].weight.clamp_(-0.01, 0.01)
        optimizer.state_dict()  # brings no values
        step(trained)
        model.load_state_dict(small_model().state_dict())
        step(trained)

    (text,) = said(caplog)
    assert "'2.weight'" in text
    assert "are lost" in text
    assert "ps.publish(model)" in text


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_the_wrapper_is_refused(
    trained: tuple[Any, Any], copied: Callable[[object], object]
) -> None:
    with pytest.raises(UnsupportedError, match=r"can't be copied.*state_dict\(\)"):
        copied(trained[1])


def test_a_module_without_values_is_refused(ps: psworker.Connection) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ConfigurationError, match="run one batch through the model"):
        psworker.optim.prepare.sort_objects(
            [model, torch.optim.SGD(model.parameters())]
        )
