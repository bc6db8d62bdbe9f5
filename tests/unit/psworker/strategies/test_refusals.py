"""What strategies refuse: numbers, and what one of a script's own says and answers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

import psworker
from psworker import (
    EASGD,
    AsyncLocalSGD,
    DecoupledDiLoCo,
    DiLoCo,
    Downpour,
    FedAvg,
    FedProx,
    Growing,
    LocalSteps,
    PostLocalSGD,
    ShareOfTime,
    StreamingDiLoCo,
)

MADE = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
EIGHT: dict[str, Any] = {"every": 8, "fragment_count": 2, "taken_after": 4}


@pytest.mark.parametrize(
    ("made", "given", "words"),
    [
        *(
            (LocalSteps, {"every": every}, "every=.*whole number of local steps from 1")
            for every in (0, -1, True, 2.5, "50", None, 1_000_001, Growing)
        ),
        (LocalSteps, {"every": 2, "outer": 3}, "outer=3 makes no optimizer"),
        (LocalSteps, {"every": 2, "outer": MADE}, r"outer=SGD\(\.\.\.\) makes no opt"),
        (Growing, {"by": 0}, "Growing: by=0 is not a number of local steps above 0"),
        (Growing, {"by": "x"}, "by='x' is not"),
        (Growing, {"by": math.nan}, "by=nan is not"),
        (Growing, {"first": 10, "most": 5}, "most=5 is not.* from 10 to"),
        *(
            (
                ShareOfTime,
                {"share": share},
                "ShareOfTime: share=.* above 0, less than 1",
            )
            for share in (0, 1, -0.1, math.nan, "x")
        ),
        (ShareOfTime, {"least": 5, "most": 4}, "most=4 is not.* from 5 to"),
        (PostLocalSGD, {"first_steps": True}, "first_steps=True is not"),
        (PostLocalSGD, {"first_steps": -1}, "first_steps=-1 is not"),
        (DiLoCo, {"lr": -0.1}, "lr=-0.1 is not a number from 0 to 1000"),
        (DiLoCo, {"lr": math.nan}, "lr=nan is not"),
        (DiLoCo, {"momentum": "0.9"}, "momentum='0.9' is not"),
        (DiLoCo, {"momentum": 1.0}, "momentum=1.0 is not a number from 0, less than 1"),
        (DecoupledDiLoCo, {"taken_after": 0}, "taken_after=0 .* from 1 to 25"),
        *(
            (kind, {**EIGHT, **given}, words)
            for kind in (StreamingDiLoCo, DecoupledDiLoCo)
            for given, words in (
                ({"fragment_count": 0}, "fragment_count=0 .* from 1 to 8"),
                ({"fragment_count": 9}, "in the steps of every=8"),
                ({"fragment_count": 1.5}, "fragment_count=1.5 is not a whole number"),
                ({"fragment_count": True}, "fragment_count=True is not"),
                ({"taken_after": -1}, "taken_after=-1 is not"),
                ({"taken_after": 5}, "taken_after=5 .* to 4: .* one at a time"),
                ({"taken_after": 1.5}, "taken_after=1.5 is not a whole number"),
                ({"own_share": 1.0}, "own_share=1.0 .*less than 1"),
                ({"own_share": -0.1}, "own_share=-0.1 is not"),
                ({"own_share": "half"}, "own_share='half' is not.*or \"trained\""),
            )
        ),
        (AsyncLocalSGD, {"lr": -1}, "lr=-1 is not"),
        (AsyncLocalSGD, {"momentum": -1}, "momentum=-1 is not"),
        (AsyncLocalSGD, {"buffer_size": 0}, "buffer_size=0 is not"),
        (AsyncLocalSGD, {"activation": 0.5}, "from 0 to 0.25: that is 1 / buffer_size"),
        (Downpour, {"n_push": 0}, "n_push=0 is not"),
        (Downpour, {"n_push": 2, "n_fetch": 3}, "n_fetch=3 is no multiple of n_push=2"),
        (EASGD, {"beta": 0}, "beta=0 is not a number above 0, at most 1"),
        (EASGD, {"beta": "b"}, "beta='b' is not"),
        (FedAvg, {"every": 2, "fraction": 1.1}, "fraction=1.1 is not"),
        (FedAvg, {"every": 2, "fraction": 0}, "=0 is not a number above 0, at most 1"),
        (FedProx, {"every": 2, "mu": 1, "fraction": 0}, "fraction=0 is not a number"),
        (FedAvg, {"every": 2, "fraction": math.nan}, "fraction=nan is not"),
        (FedAvg, {"every": 2, "seed": "a"}, "seed='a' is not a whole number"),
        (FedProx, {"every": 2, "mu": -1}, "mu=-1 is not"),
        (FedProx, {"every": 2, "mu": "x"}, "mu='x' is not"),
    ],
)
def test_a_number_that_is_none_or_out_of_range_is_refused(
    made: Callable[..., object],
    given: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises(psworker.ConfigurationError, match=words):
        made(**given)


def test_numbers_at_their_limits_are_taken() -> None:
    assert StreamingDiLoCo(**EIGHT).taken_after == 4
    assert StreamingDiLoCo(taken_after=0, own_share=0).taken_after == 0
    assert DecoupledDiLoCo(1, fragment_count=1, taken_after=1).taken_after == 1
    assert EASGD(beta=1).beta == 1
    assert FedAvg(1, fraction=1, seed=0).fraction == 1
    assert FedAvg(1, fraction=1e-9).fraction == 1e-9


class _Own(LocalSteps):
    """A strategy of a script's own, which says and answers what it likes."""

    def __init__(self, **says: object) -> None:
        super().__init__(1)
        vars(self).update(says)

    @override
    def take(self, local: object, anchor: object) -> None:
        """Its own values stay, so that they are those of its local steps alone."""


class _Undecided(psworker.Strategy):
    """Says not when to push."""


def _raise(*_: object) -> None:
    raise ZeroDivisionError("by nothing")


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()  # so that each gradient is 1
    optimizer.step()


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (DiLoCo, r"is the class DiLoCo, which is no strategy.*DiLoCo\(every=50\)"),
        ("diloco", r"'diloco', which is no strategy.*DiLoCo\(every=50\)"),
        (False, "False, which is no strategy"),
        (_Undecided(), "_Undecided does not say when to push.*is_due"),
        (LocalSteps(2, inner_state="avg"), "'keep' or 'reset' or 'average'"),  # type: ignore[arg-type]
        (
            LocalSteps(2, lambda each: torch.optim.SGD([*each, torch.ones(1)], lr=1.0)),
            r"SGD of 2 parameters, and there are 1: have it",
        ),
        (_Own(outer=lambda _: torch.optim.SGD), "returned the class SGD, which is no"),
        (_Own(outer=lambda _: 3), "returned 3, which is no optimizer"),
        (_Own(outer=lambda _: None), "returned None"),
        (_Own(outer=_raise), "_raise.* raised ZeroDivisionError: by nothing"),
        (_Own(fragment_order="zigzag"), "'sequential' or 'strided'"),
        (_Own(fragment_count=0), "_Own: fragment_count=0 is not a whole number from 1"),
        (_Own(fragment_count=True), "_Own: fragment_count=True is not"),
        (_Own(taken_after=1.5), "_Own: taken_after=1.5 is not a whole number from 0"),
        (_Own(shared=("every",)), "_Own.shared names 'every', and there is no such"),
        (
            _Own(shared=("x",), x="y" * 2000),
            r"strategy \"_Own\(x='yy.* has 2010 bytes in UTF-8.*; have `shared` name",
        ),
        (_Own(shared=None), "_Own has shared=None: give a tuple of names of its attr"),
        (_Own(shared="every"), "_Own has shared='every': give a tuple of names"),
        (_Own(shared=(1,)), r"_Own has shared=\(1,\): give a tuple of names"),
        (_Own(modes=None), "_Own has modes=None: give a tuple"),
        (_Own(modes=([],)), r"_Own has modes=\(\[\],\): give a tuple"),
        (_Own(modes="bsp"), "_Own has modes='bsp': give a tuple"),
        (_Own(modes=()), r"_Own has modes=\(\): give a tuple"),
        (_Own(modes=("bsb",)), "from 'bsp', 'ssp', 'asp', 'quorum'"),
    ],
)
def test_what_is_no_strategy_is_refused_before_anything_is_joined(
    strategy: Any,  # noqa: ANN401
    words: str,
) -> None:
    with psworker.LocalConnection() as ps:
        model, optimizer = _model()
        with pytest.raises(psworker.ConfigurationError, match=words):
            ps.prepare(model, optimizer, strategy=strategy)
        ps.prepare(model, optimizer, strategy=LocalSteps(2))


@pytest.mark.parametrize(
    ("question", "answer", "words"),
    [
        ("is_due", _raise, "_raise.* raised ZeroDivisionError: by nothing"),
        ("is_due", lambda _: None, "returned None"),
        ("weight", _raise, "_raise.* raised ZeroDivisionError: by nothing"),
        ("weight", lambda _: None, "returned None"),
        ("weight", lambda _: math.nan, r"_Own.weight\(\): weight=nan is not a number"),
        ("weight", lambda _: -1, "weight=-1 is not"),
        ("weight", lambda _: "1", "weight='1' is not"),
        ("weight", lambda _: 1e19, r"weight=1e\+19 is not a number from 0 to 1e\+18"),
        ("push", lambda *_: None, "returned a NoneType of no tensors for 1"),
        ("push", lambda *_: [], "returned a list of 0 tensors for 1 parameters"),
        ("push", lambda anchor, *_: (each for each in anchor), "a generator of no"),
        (
            "push",
            lambda *_: [1.0],
            r"returned 1.0 for a float32 tensor of shape \[2",
        ),
        ("push", lambda *_: [torch.ones(6)], r"a float32 tensor of shape \[6\] on cpu"),
        ("push", lambda *_: [torch.ones(2, 3).double()], "a float64 tensor"),
        ("push", lambda *_: [torch.ones(2, 3, device="meta")], "on meta for"),
        ("outer_hyperparameters", lambda _: None, "returned None"),
        ("outer_hyperparameters", lambda _: 0.5, "returned 0.5: have it return a dict"),
        ("outer_hyperparameters", lambda _: {"rate": 1}, "optimizer: dampening, .*lr"),
        ("outer_hyperparameters", lambda _: {"lr": "1"}, r"\(\): lr='1' is not"),
        ("outer_hyperparameters", lambda _: {"lr": math.nan}, "lr=nan is not"),
        (
            "outer_hyperparameters",
            lambda _: {"lr": -1},
            "of _Own returned numbers that SGD refuses: Invalid learning rate: -1",
        ),
        (
            "outer_hyperparameters",
            lambda _: {"nesterov": 1},
            "SGD refuses: Nesterov momentum requires a momentum",
        ),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused_and_the_next_push_has_all(
    question: str, answer: Callable[..., object], words: str
) -> None:
    strategy = _Own(**{question: answer})
    with psworker.LocalConnection() as ps:
        model, optimizer = _model()
        ps.prepare(model, optimizer, strategy=strategy)
        with pytest.raises(psworker.ConfigurationError, match=words):
            _step(model, optimizer)
        assert ps._engine is not None
        (fragment,) = ps._engine._anchors.fragments
        assert torch.equal(fragment.anchor[0], torch.ones(2, 3))
        delattr(strategy, question)  # mended
        _step(model, optimizer)
        assert torch.equal(fragment.local[0], torch.zeros(2, 3))
        assert torch.equal(fragment.anchor[0], torch.zeros(2, 3))


def test_what_could_not_be_taken_is_taken_in_the_next_step() -> None:
    strategy = LocalSteps(1, lambda each: torch.optim.SGD(each, lr=0.5))
    vars(strategy)["take"] = _raise
    model, optimizer = _model()
    ps = psworker.LocalConnection()
    ps.prepare(model, optimizer, strategy=strategy)
    with pytest.raises(ZeroDivisionError):
        _step(model, optimizer)
    del strategy.take
    _step(model, optimizer)
    # From 1 the step goes to 0.5, and the anchor half of the way; and so once more.
    (parameter,) = model.parameters()
    assert torch.equal(parameter, torch.full((2, 3), 0.5))
    vars(strategy)["take"] = _raise
    with pytest.raises(ZeroDivisionError):
        _step(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        ps.close()
    with pytest.raises(psworker.ClosedError):
        ps.prepare(model, optimizer)
