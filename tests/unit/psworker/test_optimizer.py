import copy
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from pswire.schema import OptimizerSpec
from psworker.errors import (
    ConfigurationError,
    HyperparameterError,
    LimitError,
    UnsupportedError,
)
from psworker.model_schema import bind_models, describe_optimizer
from psworker.optimizer import PreparedOptimizer
from psworker.prepare import point_schedulers
from psworker.push_result import PushResult

if TYPE_CHECKING:
    from psworker.optimizer_state import States
    from psworker.stepper import Stepper


def outcome(name: str) -> PushResult:
    return PushResult(
        outcome=name,
        clock=1,
        version=1,
        frontier=1,
        staleness=0,
        mode="bsp",
        duplicate=False,
    )


@dataclass
class RecordingStepper:
    """Stands in for the steps of a member: notes what it was asked."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    declared: list[OptimizerSpec] = field(default_factory=list)
    refusal: Exception | None = None
    result: PushResult = field(default_factory=lambda: outcome("applied"))

    def step(self, spec: object, groups: object, **how: Any) -> PushResult:  # noqa: ANN401
        self.steps.append({"groups": groups, **how})
        on_loaded = how["extras"].on_loaded
        if on_loaded is not None and not self.result.dropped:
            on_loaded()
        return self.result

    def optimizer_state(self, optimizer: str, spec_digest: str) -> "States":
        return {}

    def declare(self, spec: OptimizerSpec) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.declared.append(spec)


def prepared(
    inner: torch.optim.Optimizer, model: nn.Module
) -> tuple[PreparedOptimizer, RecordingStepper]:
    stepper = RecordingStepper()
    bound = bind_models({"model": model})
    spec = describe_optimizer("optimizer", inner, bound)
    return PreparedOptimizer(inner, spec, cast("Stepper", stepper), bound), stepper


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 2)


def test_it_is_an_optimizer_over_the_same_groups(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    optimizer, _ = prepared(inner, model)

    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert "optimizer" in repr(optimizer)
    assert "SGD" in repr(optimizer)


def test_step_sends_the_current_hyperparameters(model: nn.Module) -> None:
    optimizer, stepper = prepared(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model
    )
    position = optimizer.spec.hyperparameter_names.index("lr")

    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.step(weight=12)

    (step,) = stepper.steps
    assert step["groups"][0][position] == 0.05
    assert step["weight"] == 12
    assert step["is_finite"]


def test_zero_grad_works(model: nn.Module) -> None:
    optimizer, _ = prepared(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(1, 2)).sum().backward()

    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and p.grad.eq(0).all() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_step_hooks_fire_also_those_from_before(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    fired: list[str] = []
    inner.register_step_pre_hook(lambda *_: fired.append("early"))
    optimizer, _ = prepared(inner, model)
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))

    optimizer.step()

    assert fired == ["early", "pre", "post"]


def test_schedulers_from_before_and_after_reach_the_shards(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    before = lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(inner, step_size=1, gamma=0.1)]
    )
    optimizer, stepper = prepared(inner, model)
    point_schedulers([before], {id(inner): optimizer})
    after = lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**step)
    position = optimizer.spec.hyperparameter_names.index("lr")

    optimizer.step()
    before.step()
    optimizer.step()
    after.step()
    optimizer.step()

    rates = [step["groups"][0][position] for step in stepper.steps]
    assert rates == pytest.approx([1.0, 0.1, 2.0])


def test_a_scheduler_that_prepare_was_not_given_works_too(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    optimizer, _ = prepared(inner, model)

    optimizer.step()
    scheduler.step()

    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_old_optimizer_refuses_to_step(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared(inner, model)

    with pytest.raises(ConfigurationError, match="the one that prepare"):
        inner.step()


def test_a_closure_is_refused_with_the_reason(model: nn.Module) -> None:
    optimizer, stepper = prepared(torch.optim.SGD(model.parameters(), lr=0.1), model)

    with pytest.raises(UnsupportedError, match="can't compute the loss again"):
        optimizer.step(lambda: 0.0)
    assert not stepper.steps


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_a_number_of_samples(model: nn.Module, weight: float) -> None:
    optimizer, stepper = prepared(torch.optim.SGD(model.parameters(), lr=0.1), model)

    with pytest.raises(ConfigurationError, match="number of samples"):
        optimizer.step(weight=weight)
    assert not stepper.steps


def test_a_group_that_is_added_is_declared_and_named_by_pushes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer, stepper = prepared(inner, model)

    optimizer.step()
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.2})
    optimizer.step()

    (declared,) = stepper.declared
    assert [group.entry_indexes for group in declared.groups] == [(0, 1), (2, 3)]
    digests = [step["extras"].spec_digest for step in stepper.steps]
    assert digests == ["", declared.digest]
    assert len(stepper.steps[1]["groups"]) == 2
    assert optimizer.param_groups is inner.param_groups


def test_a_group_that_is_refused_is_not_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer, stepper = prepared(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    stepper.refusal = LimitError("too many")

    with pytest.raises(LimitError):
        optimizer.add_param_group({"params": model[1].parameters()})

    assert len(optimizer.param_groups) == 1
    optimizer.step()
    assert stepper.steps[0]["extras"].spec_digest == ""


def test_a_hyperparameter_that_is_no_number_is_named(model: nn.Module) -> None:
    optimizer, _ = prepared(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.param_groups[0]["lr"] = "fast"

    with pytest.raises(HyperparameterError, match="lr is not a number: fast"):
        optimizer.step()


def test_loaded_state_goes_with_each_step_until_one_has_counted(
    model: nn.Module,
) -> None:
    other = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(torch.ones(1, 2)).sum().backward()
    other.step()
    optimizer, stepper = prepared(torch.optim.AdamW(model.parameters()), model)

    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert not optimizer.state
    assert optimizer.state_dict()["state"].keys() == {0, 1}
    stepper.result = outcome("dropped")
    optimizer.step()
    stepper.result = outcome("applied")
    optimizer.step()
    optimizer.step()

    loads = [step["extras"].loads for step in stepper.steps]
    assert [each is not None for each in loads] == [True, True, False]
    assert loads[0].keys() == {0, 1}
    assert loads[0][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_loaded_state_is_not_rounded_to_the_type_of_the_parameters(
    dtype: torch.dtype,
) -> None:
    """As one process has it that trains float32 masters of 16 bits."""
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    masters = nn.Linear(2, 2).to(kept)
    other = torch.optim.NAdam(masters.parameters())
    (masters(torch.ones(1, 2, dtype=kept)).sum() * 1e-5).backward()
    other.step()
    model = nn.Linear(2, 2).to(dtype)
    optimizer, stepper = prepared(torch.optim.NAdam(model.parameters()), model)
    optimizer.register_load_state_dict_pre_hook(lambda o, d: copy.deepcopy(d))

    optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict()["state"][0]["exp_avg"].dtype is kept
    optimizer.step()

    (step,) = stepper.steps
    for index, parameter in enumerate(masters.parameters()):
        found, exact = step["extras"].loads[index], other.state[parameter]
        assert found.keys() == exact.keys()
        assert found["exp_avg_sq"].gt(0).all()
        for name, value in exact.items():
            assert torch.equal(found[name], value.reshape(found[name].shape)), name


def test_state_loaded_while_other_state_is_under_way_is_kept(model: nn.Module) -> None:
    optimizer, stepper = prepared(torch.optim.AdamW(model.parameters()), model)
    optimizer.load_state_dict(optimizer.state_dict())
    stepper.result = outcome("dropped")
    optimizer.step()  # with the first
    optimizer.load_state_dict(optimizer.state_dict())

    stepper.steps[0]["extras"].on_loaded()
    optimizer.step()

    assert stepper.steps[1]["extras"].loads is not None


def test_a_state_dict_of_other_groups_changes_nothing(model: nn.Module) -> None:
    optimizer, stepper = prepared(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    other = torch.optim.AdamW([nn.Parameter(torch.ones(1))])

    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(other.state_dict())

    optimizer.step()
    assert stepper.steps[0]["extras"].loads is None
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_hooks_of_state_dicts_fire_also_those_from_before(model: nn.Module) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    fired: list[object] = []
    inner.register_state_dict_pre_hook(lambda o: fired.append(o))
    optimizer, _ = prepared(inner, model)
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, d: fired.append(d["more"]))
    optimizer.register_load_state_dict_post_hook(lambda o: fired.append("loaded"))

    optimizer.load_state_dict(optimizer.state_dict())

    assert fired == [optimizer, 1, "loaded"]


def test_a_gradient_scaler_leaves_the_verdict_to_the_shards(model: nn.Module) -> None:
    optimizer, stepper = prepared(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()

    scaler.step(optimizer)
    scaler.update()
    next(iter(model.parameters())).grad = torch.full((2, 2), float("inf"))
    scaler.step(optimizer)
    scaler.update()

    fine, skipped = stepper.steps
    assert (fine["is_finite"], float(fine["scale"])) == (True, 4.0)
    assert not skipped["is_finite"]
    assert scaler.get_scale() == 2.0


def test_a_scaler_that_has_unscaled_hands_over_no_scale(model: nn.Module) -> None:
    optimizer, stepper = prepared(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    scaler.step(optimizer)

    assert stepper.steps[0]["scale"] is None


def test_schedulers_say_nothing_about_the_order_of_steps(model: nn.Module) -> None:
    optimizer, _ = prepared(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in (1.0, 2.0, 3.0):
            optimizer.step()
            scheduler.step(loss)

    assert optimizer.param_groups[0]["lr"] < 0.1
