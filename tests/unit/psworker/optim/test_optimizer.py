import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
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
from psworker.optim.model_schema import bind_models, describe_optimizer
from psworker.optim.optimizer import PreparedOptimizer
from psworker.optim.optimizer_state import states_of
from psworker.optim.prepare import point_schedulers
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import OptimizerStep

if TYPE_CHECKING:
    from psworker.optim.optimizer_state import States
    from psworker.steps.stepper import Stepper


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

    steps: list[OptimizerStep] = field(default_factory=list)
    reads_state: bool = True
    held: "States" = field(default_factory=dict)
    fetch_count: int = 0
    declared: list[OptimizerSpec] = field(default_factory=list)
    refusal: Exception | None = None
    result: PushResult = field(default_factory=lambda: outcome("applied"))

    def step(self, wanted: OptimizerStep) -> PushResult:
        self.steps.append(wanted)
        if wanted.load is not None and not self.result.dropped:
            wanted.load.on_loaded()
        return self.result

    def push_nothing(self, wanted: OptimizerStep) -> PushResult:
        return self.step(wanted)

    def optimizer_state(self, optimizer: str, spec_digest: str) -> "States":
        self.fetch_count += 1
        return self.held

    def note_zeroed(self) -> None:
        """Nothing was drawn."""

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


def loads_of(step: OptimizerStep) -> Any:  # noqa: ANN401, `States`, or none
    return None if step.load is None else step.load.states


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
    assert step.groups[0][position] == 0.05
    assert step.weight == 12
    assert step.is_finite


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

    rates = [step.groups[0][position] for step in stepper.steps]
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
    digests = [step.spec_digest for step in stepper.steps]
    assert digests == ["", declared.digest]
    assert len(stepper.steps[1].groups) == 2
    assert optimizer.param_groups is inner.param_groups


def test_a_group_that_is_refused_is_not_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer, stepper = prepared(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    stepper.refusal = LimitError("too many")

    with pytest.raises(LimitError):
        optimizer.add_param_group({"params": model[1].parameters()})

    assert len(optimizer.param_groups) == 1
    optimizer.step()
    assert stepper.steps[0].spec_digest == ""


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
    assert optimizer.state.keys() == set(model.parameters())
    assert optimizer.state_dict()["state"].keys() == {0, 1}
    stepper.result = outcome("dropped")
    optimizer.step()
    stepper.result = outcome("applied")
    optimizer.step()
    optimizer.step()

    loads = [loads_of(step) for step in stepper.steps]
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
        found, exact = loads_of(step)[index], other.state[parameter]
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

    load = stepper.steps[0].load
    assert load is not None
    load.on_loaded()
    optimizer.step()

    assert loads_of(stepper.steps[1]) is not None


def test_a_state_dict_of_other_groups_changes_nothing(model: nn.Module) -> None:
    optimizer, stepper = prepared(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    other = torch.optim.AdamW([nn.Parameter(torch.ones(1))])

    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(other.state_dict())

    optimizer.step()
    assert loads_of(stepper.steps[0]) is None
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
    assert (fine.is_finite, fine.scale) == (True, 4.0)
    assert not skipped.is_finite
    assert scaler.get_scale() == 2.0


def test_a_scaler_that_has_unscaled_hands_over_no_scale(model: nn.Module) -> None:
    optimizer, stepper = prepared(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    scaler.step(optimizer)

    assert stepper.steps[0].scale is None


def test_schedulers_say_nothing_about_the_order_of_steps(model: nn.Module) -> None:
    optimizer, _ = prepared(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in (1.0, 2.0, 3.0):
            optimizer.step()
            scheduler.step(loss)

    assert optimizer.param_groups[0]["lr"] < 0.1


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


GROUP_EDITS: dict[str, tuple[Callable[[Any, Any], None], list[tuple[int, ...]]]] = {
    "some taken out": (
        lambda o, m: o.param_groups[0].update(params=[m[0].weight]),
        [(0,), (2, 3)],
    ),
    "some removed in place": (
        lambda o, m: o.param_groups[0]["params"].pop(),
        [(0,), (2, 3)],
    ),
    "one appended": (
        lambda o, m: o.param_groups[0]["params"].append(
            o.param_groups[1]["params"].pop()
        ),
        [(0, 1, 3), (2,)],
    ),
    "a group deleted": (lambda o, m: o.param_groups.pop(0), [(2, 3)]),
    "a group emptied": (
        lambda o, m: o.param_groups[0]["params"].clear(),
        [(), (2, 3)],
    ),
    "groups turned around": (
        lambda o, m: o.param_groups.reverse(),
        [(2, 3), (0, 1)],
    ),
    "all groups replaced": (
        lambda o, m: setattr(
            o,
            "param_groups",
            [{**o.param_groups[0], "params": tuple(m.parameters())}],
        ),
        [(0, 1, 2, 3)],
    ),
    "a group appended": (
        lambda o, m: o.param_groups.append(
            {**o.param_groups[0], "params": [o.param_groups[0]["params"].pop()]}
        ),
        [(0,), (2, 3), (1,)],
    ),
}


def in_two_groups(model: nn.Sequential) -> tuple[Any, RecordingStepper]:
    groups = [{"params": list(layer.parameters())} for layer in model]
    return prepared(torch.optim.Adam(groups), model)


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("case", GROUP_EDITS)
def test_groups_that_the_script_has_changed_are_declared(
    case: str, is_watched: bool
) -> None:
    model = two_layers()
    optimizer, stepper = in_two_groups(model)
    if is_watched:
        optimizer.watch_parameters(lambda: None)
    edit, entries = GROUP_EDITS[case]

    optimizer.step()
    edit(optimizer, model)
    optimizer.step()
    optimizer.step()

    (declared,) = stepper.declared
    assert [group.entry_indexes for group in declared.groups] == entries
    digests = [step.spec_digest for step in stepper.steps]
    assert digests == ["", declared.digest, declared.digest]
    assert [len(step.groups) for step in stepper.steps] == [2, *[len(entries)] * 2]
    if is_watched:
        kinds = {type(group["params"]).__name__ for group in optimizer.param_groups}
        assert kinds == {"WatchedParameters"}


def test_other_orders_within_a_group_need_no_declaration(model: nn.Module) -> None:
    optimizer, stepper = prepared(torch.optim.SGD(model.parameters(), lr=0.1), model)

    optimizer.param_groups[0]["params"].reverse()
    optimizer.step()

    assert not stepper.declared
    assert len(stepper.steps) == 1


def replace_one(optimizer: PreparedOptimizer, model: nn.Module) -> None:
    optimizer.param_groups[1]["params"][0] = nn.Parameter(torch.ones(2, 2))


REFUSED_EDITS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "another tensor": (
        replace_one,
        r"group 1 of optimizer holds a parameter of shape \[2, 2\] that belongs to no",
    ),
    "one in two groups": (
        lambda o, m: o.param_groups[1]["params"].append(m[0].bias),
        "group 1 of optimizer holds '0.bias', which group 0 holds already",
    ),
    "no parameter": (
        lambda o, m: o.param_groups[0]["params"].append("bias"),
        "holds a str where a parameter belongs",
    ),
    "an iterator": (
        lambda o, m: o.param_groups[0].update(params=m.parameters()),
        "of type generator: they must be in a list",
    ),
    "no parameters at all": (
        lambda o, m: o.param_groups[0].pop("params"),
        "of type NoneType: they must be in a list",
    ),
    "no groups": (lambda o, m: o.param_groups.clear(), "has no parameter groups"),
    "the old one's": (
        lambda o, m: setattr(o._inner, "param_groups", list(o.param_groups)),
        "which steps no more",
    ),
    "moved between switches": (
        lambda o, m: (
            o.param_groups[1].update(amsgrad=True),
            o.param_groups[1]["params"].append(o.param_groups[0]["params"].pop()),
        ),
        "group 1 has another amsgrad than the one in which '",
    ),
}


@pytest.mark.parametrize("case", REFUSED_EDITS)
def test_groups_that_can_not_be_followed_are_refused_before_anything_is_sent(
    case: str,
) -> None:
    model = two_layers()
    optimizer, stepper = in_two_groups(model)
    edit, text = REFUSED_EDITS[case]
    edit(optimizer, model)

    for call in (optimizer.step, optimizer.push_nothing, optimizer.step):
        with pytest.raises(ConfigurationError, match=text):
            call()

    assert not stepper.steps
    assert not stepper.declared


def test_the_groups_may_be_mended_after_a_refusal() -> None:
    model = two_layers()
    optimizer, stepper = in_two_groups(model)
    replace_one(optimizer, model)
    with pytest.raises(ConfigurationError, match="param_groups of optimizer have ch"):
        optimizer.step()

    optimizer.param_groups[1]["params"][0] = model[1].weight
    optimizer.step()

    assert len(stepper.steps) == 1
    assert not stepper.declared


def test_switches_on_the_way_to_the_shards(model: nn.Module) -> None:
    optimizer, stepper = prepared(torch.optim.Adam(model.parameters()), model)
    (group,) = optimizer.param_groups
    names = optimizer.spec.hyperparameter_names

    group.update(
        foreach=True, fused=False, capturable=True, maximize=True, unknown="kept"
    )
    group["betas"] = (torch.tensor(0.5), torch.tensor(0.75))
    group["lr"] = torch.tensor(0.25)
    optimizer.step()
    group["lr"].fill_(0.125)
    optimizer.step()

    first, second = (
        dict(zip(names, step.groups[0], strict=True)) for step in stepper.steps
    )
    assert (first["lr"], second["lr"]) == (0.25, 0.125)
    assert (first["betas.0"], first["betas.1"], first["maximize"]) == (0.5, 0.75, 1.0)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("lr", "0.1", "lr is not a number: 0.1"),
        ("lr", None, "lr is not a number"),
        ("lr", torch.ones(2), "lr is not a number"),
        ("lr", -1.0, "lr = -1.0 is less than 0"),
        ("betas", (0.9,), "betas.1 is not a number"),
        ("betas", 0.9, "betas.0 is not a number"),
        ("amsgrad", True, "was 0 at prepare"),
    ],
)
def test_a_value_that_no_shard_would_take_is_not_sent(
    model: nn.Module, name: str, value: object, text: str
) -> None:
    optimizer, stepper = prepared(torch.optim.Adam(model.parameters()), model)
    optimizer.param_groups[0][name] = value

    with pytest.raises(HyperparameterError, match=text):
        optimizer.step()
    assert not stepper.steps


@pytest.mark.parametrize("name", ["lr", "maximize"])
def test_a_value_that_was_deleted_is_missed(model: nn.Module, name: str) -> None:
    optimizer, _ = prepared(torch.optim.Adam(model.parameters()), model)
    del optimizer.param_groups[0][name]

    with pytest.raises(HyperparameterError, match=f"{name} is not a number: missing"):
        optimizer.step()


def test_a_group_that_becomes_differentiable_is_refused(model: nn.Module) -> None:
    optimizer, stepper = prepared(torch.optim.Adam(model.parameters()), model)
    optimizer.param_groups[0]["differentiable"] = True

    with pytest.raises(UnsupportedError, match="differentiable"):
        optimizer.step()
    assert not stepper.steps


# State


def trained(model: nn.Module) -> tuple[Any, RecordingStepper]:
    """Shards hold the state that Adam has after a step."""
    plain = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    plain.step()
    optimizer, stepper = prepared(torch.optim.Adam(model.parameters()), model)
    indexes = {id(each): index for index, each in enumerate(model.parameters())}
    stepper.held = states_of(plain, indexes)
    return optimizer, stepper


def test_state_is_fetched_when_it_is_read_and_not_sent_back(model: nn.Module) -> None:
    optimizer, stepper = trained(model)
    optimizer.step()
    assert stepper.fetch_count == 0

    for _ in range(2):
        assert len(optimizer.state) == 2
        assert all(parameter in optimizer.state for parameter in model.parameters())
        entry = optimizer.state[next(model.parameters())]
        assert entry["exp_avg"].shape == (2, 2)
        assert float(entry["step"]) == 1
        assert optimizer.state.get(nn.Parameter(torch.ones(1))) is None
    assert stepper.fetch_count == 1
    optimizer.step()
    assert list(optimizer.state)
    assert stepper.fetch_count == 2

    assert [loads_of(step) for step in stepper.steps] == [None, None]


def clear(optimizer: PreparedOptimizer) -> None:
    optimizer.state.clear()


def assign_new(optimizer: PreparedOptimizer) -> None:
    optimizer.state = defaultdict(dict)


def empty_each(optimizer: PreparedOptimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {}


@pytest.mark.parametrize("reset", [clear, assign_new, empty_each])
@pytest.mark.parametrize("reads_state", [True, False])
def test_state_that_is_thrown_away_is_told_with_the_next_push(
    model: nn.Module, reset: Callable[[Any], None], reads_state: bool
) -> None:
    optimizer, stepper = trained(model)
    stepper.reads_state = reads_state

    reset(optimizer)
    optimizer.step()
    optimizer.step()

    assert [loads_of(step) for step in stepper.steps] == [{}, None]
    assert stepper.fetch_count == 0


STATE_EDITS: dict[str, Callable[[Any, Any], object]] = {
    "popped": lambda state, p: state.pop(p),
    "deleted": lambda state, p: state.__delitem__(p),
    "emptied": lambda state, p: state.__setitem__(p, {}),
    "entry cleared": lambda state, p: state[p].clear(),
}


@pytest.mark.parametrize("case", STATE_EDITS)
def test_state_of_one_parameter_is_thrown_away(model: nn.Linear, case: str) -> None:
    optimizer, stepper = trained(model)

    STATE_EDITS[case](optimizer.state, model.weight)
    optimizer.step()

    (step,) = stepper.steps
    assert loads_of(step).keys() == {1}
    for name, value in stepper.held[1].items():
        assert torch.equal(loads_of(step)[1][name], value)


def test_state_that_is_written_into_is_sent(model: nn.Linear) -> None:
    optimizer, stepper = trained(model)

    optimizer.state[model.weight]["exp_avg"].zero_()
    optimizer.state[model.bias]["step"] = 0
    optimizer.state[model.bias]["exp_avg_sq"] = torch.full((2,), 4.0)
    optimizer.step()

    loads = loads_of(stepper.steps[0])
    assert loads[0]["exp_avg"].eq(0).all()
    assert torch.equal(loads[0]["exp_avg_sq"], stepper.held[0]["exp_avg_sq"])
    assert float(loads[1]["step"]) == 0
    assert torch.equal(loads[1]["exp_avg_sq"], torch.full((2,), 4.0))
    assert torch.equal(loads[1]["exp_avg"], stepper.held[1]["exp_avg"])


def test_what_is_saved_is_what_the_script_has_written(model: nn.Linear) -> None:
    optimizer, stepper = trained(model)
    moments = optimizer.state[model.weight]["exp_avg"]

    moments.fill_(7.0)
    saved = optimizer.state_dict()["state"]
    moments.add_(1.0)
    optimizer.step()

    assert saved[0]["exp_avg"].eq(7.0).all()
    assert loads_of(stepper.steps[0])[0]["exp_avg"].eq(8.0).all()


def test_a_load_is_in_place_of_what_was_written(model: nn.Linear) -> None:
    optimizer, stepper = trained(model)
    saved = optimizer.state_dict()
    optimizer.state.clear()

    optimizer.load_state_dict(saved)
    optimizer.step()

    assert loads_of(stepper.steps[0]).keys() == {0, 1}


def test_writing_to_state_of_an_earlier_step_is_refused_once(model: nn.Linear) -> None:
    optimizer, stepper = trained(model)
    moments = optimizer.state[model.weight]["exp_avg"]
    entry = optimizer.state[model.bias]
    optimizer.step()
    optimizer.step()

    moments.zero_()
    with pytest.raises(ConfigurationError, match="state of 'weight' that it had read"):
        optimizer.step()
    entry["step"] = 0
    with pytest.raises(ConfigurationError, match="state of 'bias' that it had read"):
        optimizer.step()
    assert len(stepper.steps) == 2
    optimizer.step()

    assert [loads_of(step) for step in stepper.steps] == [None] * 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "is a int and no dict"),
        ({"exp_avg": torch.ones(3)}, "'exp_avg', which has the shape"),
        ({"slow": "yes"}, "'slow', which is no tensor of floats"),
        ({"step": "one"}, "'step', which is a str and no number"),
    ],
)
def test_what_is_no_state_of_the_class_is_refused(
    model: nn.Linear, value: object, text: str
) -> None:
    optimizer, stepper = trained(model)
    optimizer.state[model.bias] = value

    for _ in range(2):
        with pytest.raises(ConfigurationError, match=f"state of 'bias'.*{text}"):
            optimizer.step()
    del optimizer.state[model.bias]
    optimizer.step()

    assert loads_of(stepper.steps[0]).keys() == {0}


def test_keys_of_the_script_stay_with_it(model: nn.Linear) -> None:
    optimizer, stepper = trained(model)

    optimizer.state["epoch"] = 3
    optimizer.step()
    saved = optimizer.state_dict()
    other, _ = trained(model)
    other.load_state_dict(copy.deepcopy(saved))

    assert loads_of(stepper.steps[0]) is None
    assert saved["state"]["epoch"] == other.state["epoch"] == 3
    assert optimizer.state["epoch"] == 3


def test_a_copy_of_the_state_is_torchs(model: nn.Linear) -> None:
    optimizer, _ = trained(model)

    for made in (
        copy.copy(optimizer.state),
        copy.deepcopy(optimizer.state),
        optimizer.state | {},
    ):
        assert type(made) is defaultdict
        assert len(made) == 2
    assert optimizer.state == optimizer.state.copy()
    assert {type(each) for each in optimizer.state.copy().values()} == {dict}


def test_a_parameter_that_was_taken_out_is_not_saved(model: nn.Linear) -> None:
    optimizer, _ = trained(model)

    optimizer.param_groups[0]["params"] = [model.bias]

    assert optimizer.state_dict()["state"].keys() == {0}
    assert len(optimizer.state) == 2


def test_a_step_that_is_set_after_prepare_is_around_the_jobs(model: nn.Module) -> None:
    optimizer: Any
    optimizer, stepper = prepared(torch.optim.SGD(model.parameters(), lr=0.1), model)
    inner = optimizer.step
    called: list[str] = []

    def step() -> None:
        called.append("mine")
        inner(weight=3)

    optimizer.step = step
    optimizer.step()

    assert called == ["mine"]
    assert [each.weight for each in stepper.steps] == [3]
