"""Differential privacy: the accountant's figures, and what can't have it."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from psworker.backends.host.backend import _refuse_unsupported
from psworker.errors import ConfigurationError, UnsupportedError
from psworker.optim.buffer_policies import BufferPolicy
from psworker.optim.prepare import Prepared, PrepareOptions, sort_objects
from psworker.optim.privacy import DifferentialPrivacy, check_private

DELTA: Final = 1e-5


def private(**changed: Any) -> DifferentialPrivacy:  # noqa: ANN401
    settings = {"noise_multiplier": 4.0, "max_grad_norm": 1.0, "delta": DELTA}
    return DifferentialPrivacy(**{**settings, **changed})


def model_of(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), *modules)


def loader() -> Any:  # noqa: ANN401
    return DataLoader(TensorDataset(torch.zeros(4, 2)), 2)


def sorted_of(model: nn.Module, *others: Any, **options: Any) -> Prepared:  # noqa: ANN401
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sort_objects(
        [model, optimizer, *others],
        PrepareOptions(differential_privacy=private(), **options),
    )


def test_figures_are_those_of_the_accountant() -> None:
    """And below Opacus' other accountant, whose bound is known to be a loose one."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.gdp import eps_from_mu

    epsilons = private().terms().epsilons
    assert len(epsilons) == 1000
    for count in (1, 2, 10, 1000):
        direct = eps_from_mu(mu=math.sqrt(count) / 4.0, delta=DELTA)
        assert epsilons[count - 1] == pytest.approx(direct, rel=1e-9)
    loose = RDPAccountant()
    for _ in range(10):
        loose.step(noise_multiplier=4.0, sample_rate=1.0)
    assert 0.8 < epsilons[9] / loose.get_epsilon(DELTA) < 1.0


def test_a_budget_allows_what_is_below_it() -> None:
    free = private().terms().epsilons
    assert private(epsilon_max=free[4]).terms().epsilons == free[:5]
    assert private(epsilon_max=free[4] * 0.999).terms().epsilons == free[:4]
    # Beyond that the accountant has no figures, nor would they promise anything.
    assert 0 < len(private(noise_multiplier=0.1).terms().epsilons) < 20


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_multiplier": 0.0},
        {"noise_multiplier": True},
        {"max_grad_norm": math.nan},
        {"delta": 1.0},
        {"delta": "1e-5"},
        {"epsilon_max": -1.0},
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(changes))}="):
        private(**changes)


def test_too_little_noise_for_one_step_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="choose more noise"):
        private(noise_multiplier=1.0, epsilon_max=1.0).terms()


def test_a_later_prepare_promises_the_same() -> None:
    terms = private().terms()
    check_private(None, terms)
    check_private(private(), terms)
    with pytest.raises(ConfigurationError, match="what the first"):
        check_private(private(noise_multiplier=5.0), terms)
    with pytest.raises(ConfigurationError, match=r"is no psworker\.Differential"):
        check_private({"noise_multiplier": 1.0})  # type: ignore[arg-type]


def test_a_seed_for_tests_is_told(caplog: pytest.LogCaptureFixture) -> None:
    chosen = private(insecure_seed=3)
    first = chosen.random_bytes("w0")(16)
    assert first == chosen.random_bytes("w0")(16) != chosen.random_bytes("w1")(16)
    assert "nothing is promised" in caplog.text
    caplog.clear()
    safe = private().random_bytes("w0")
    assert safe(16) != safe(16)
    assert not caplog.text


def test_no_buffer_nor_frozen_parameter_is_sent() -> None:
    model: Any = model_of(nn.Linear(2, 2))
    model.register_buffer("count", torch.zeros(1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    given = sort_objects(
        [model, optimizer, loader()], PrepareOptions(differential_privacy=private())
    )
    assert set(given.buffers.values()) == {BufferPolicy.LOCAL}
    assert not given.followed
    assert given.terms.privacy == private().terms()


class Endless(IterableDataset[torch.Tensor]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(())


MODULES: Final[list[tuple[Callable[[], Any], str]]] = [
    (lambda: nn.BatchNorm1d(2), "use nn.GroupNorm"),
    (lambda: nn.InstanceNorm1d(2, track_running_stats=True), "statistics of samples"),
    (lambda: nn.Embedding(3, 2, sparse=True), "sparse=False"),
    (lambda: nn.Embedding(3, 2, max_norm=1.0), "max_norm"),
    (lambda: nn.LSTM(2, 2), "LSTMCell"),
    (lambda: nn.MultiheadAttention(2, 1), "batch_first=True"),
    (lambda: nn.DataParallel(nn.Linear(2, 2)), "give prepare.. its module"),
    (lambda: torch.jit.script(nn.Linear(2, 2)), "do not compile"),
    (lambda: torch.compile(nn.Linear(2, 2)), "do not compile"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    "index",
    # The last one has torch import its compiler.
    [*range(len(MODULES) - 1), pytest.param(-1, marks=pytest.mark.repeat)],
)
def test_modules_that_tell_of_samples_or_mix_them_are_refused(index: int) -> None:
    make, text = MODULES[index]
    with pytest.raises(UnsupportedError, match=f"of model.*{text}"):
        sorted_of(model_of(make()), loader())


def others() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """By what is said of them: objects beside a model, and options."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {
        "leave overlap out": ([loader()], {"overlap": True}),
        "buffers='mean'": ([loader()], {"buffers": "mean"}),
        "GradScaler": ([loader(), torch.amp.GradScaler("cpu")], {}),
        "takes one optimizer": ([loader(), model, optimizer], {}),
        "takes one loader, not 0": ([], {}),
        "takes one loader, not 2": ([loader(), loader()], {}),
        "IterableDataset": ([DataLoader(Endless(), 2)], {}),
        "ReduceLROnPlateau": ([loader(), plateau], {}),
    }


@pytest.mark.parametrize("text", others())
def test_what_would_go_without_noise_or_is_not_counted_is_refused(text: str) -> None:
    given, options = others()[text]
    with pytest.raises(UnsupportedError, match=text):
        sorted_of(model_of(), *given, **options)


def test_a_group_that_pushes_as_one_is_refused() -> None:
    given = sorted_of(model_of(), loader())
    with pytest.raises(UnsupportedError, match="one push per host"):
        _refuse_unsupported(given, overlap=False)


def test_a_scaler_that_is_switched_off_is_none() -> None:
    given = sorted_of(model_of(), loader(), torch.amp.GradScaler("cpu", enabled=False))
    assert given.privacy is not None
