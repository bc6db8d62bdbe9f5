"""What becomes of which buffer: defaults, choices, and what is refused."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from psworker.errors import ConfigurationError
from psworker.optim.buffer_policies import (
    BufferChoice,
    BufferPolicy,
    choose_policies,
    read_choice,
    warn_of_defaults,
)
from psworker.optim.model_schema import bind_models

MEAN, LEADER, LOCAL = BufferPolicy.MEAN, BufferPolicy.LEADER, BufferPolicy.LOCAL


class Table(nn.Module):
    """Buffers that are no statistics, though one is called so, and one that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.plain = nn.Linear(2, 2)
        self.register_buffer("running_mean", torch.zeros(2))
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def policies(
    choice: BufferChoice = None, **models: nn.Module
) -> dict[str, BufferPolicy]:
    bound = bind_models(models or {"model": Table()})
    return {
        f"{bound.schema.entries[index].model}:{bound.schema.entries[index].name}": each
        for index, each in sorted(choose_policies(bound, choice).items())
    }


def test_statistics_of_batch_norm_are_averaged_and_the_rest_is_the_leaders() -> None:
    assert policies() == {
        "model:norm.running_mean": MEAN,
        "model:norm.running_var": MEAN,
        "model:running_mean": LEADER,
        "model:norm.num_batches_tracked": LEADER,
        "model:positions": LEADER,
    }


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(3),
        nn.SyncBatchNorm(3),
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.Sequential(nn.BatchNorm3d(3)),
    ],
)
def test_every_kind_of_batch_norm_is_known(norm: nn.Module) -> None:
    found = policies(None, model=norm)
    assert [each for name, each in found.items() if "running" in name] == [MEAN, MEAN]
    assert [each for name, each in found.items() if "tracked" in name] == [LEADER]


def test_a_parameter_of_integers_counts_as_a_buffer() -> None:
    model = nn.Linear(2, 2)
    model.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    assert policies(None, model=model) == {"model:codes": LEADER}


@pytest.mark.parametrize("policy", BufferPolicy)
def test_one_policy_is_for_all(policy: BufferPolicy) -> None:
    assert set(policies(policy.value).values()) == {policy}


def test_patterns_are_for_those_they_fit_and_the_first_one_counts() -> None:
    assert policies({"norm.running_var": "local", "*running_*": "leader"}) == {
        "model:norm.running_mean": LEADER,
        "model:norm.running_var": LOCAL,
        "model:running_mean": LEADER,
        "model:norm.num_batches_tracked": LEADER,
        "model:positions": LEADER,
    }
    assert policies({"positions": "mean"})["model:norm.running_mean"] is MEAN


def test_several_models_have_their_names_before() -> None:
    found = policies(
        {"model1.norm.*": "local"}, model=nn.Sequential(Table()), model1=Table()
    )
    assert found["model1:norm.running_mean"] is LOCAL
    assert found["model1:running_mean"] is LEADER
    assert found["model:0.norm.running_mean"] is MEAN


def test_a_tied_buffer_is_found_under_each_of_its_names() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    found = policies({"1.running_mean": "local"}, model=model)
    assert found["model:0.running_mean"] is LOCAL


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (
            "average",
            "buffers is 'average', which is no policy: it is 'mean' (the mean over the "
            "workers), 'leader' (the value of the worker of the lowest rank) or "
            "'local' (every worker keeps its own)",
        ),
        ({"*": None}, "buffers['*'] is None, which is no policy: it is 'mean'"),
        (
            {1: "mean"},
            "buffers[1] is no pattern of names but of type int: give names as in "
            "state_dict(), such as buffers={'*running_*': 'mean'}",
        ),
        (
            7,
            "buffers takes a policy or a dict of them by name, not int, such as "
            "buffers={'*running_*': 'mean'}",
        ),
        (
            {"norm.mean": "mean"},
            "buffers['norm.mean'] fits no buffer of state_dict(): there are "
            "'running_mean', 'norm.running_mean', 'norm.running_var', 'positions', "
            "'norm.num_batches_tracked'",
        ),
        # The model's name is for where there are several; not part of state_dict.
        ({"model.positions": "mean"}, "buffers['model.positions'] fits no buffer"),
        ({"scratch": "mean"}, "buffers['scratch'] fits no buffer of state_dict()"),
    ],
)
def test_what_is_no_choice_is_refused(choice: Any, says: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigurationError) as caught:
        policies(choice)
    assert str(caught.value).startswith(says)


def test_a_long_list_of_buffers_is_cut() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(4)))
    with pytest.raises(ConfigurationError, match=r"'3\.running_var' and 4 more$"):
        policies({"0.mean": "mean"}, model=model)


def test_a_pattern_for_a_model_without_buffers_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        policies({"*": "mean"}, model=nn.Linear(2, 2))
    assert str(caught.value) == (
        "buffers['*'] fits no buffer of state_dict(): the models have none; leave "
        "buffers out"
    )


def test_a_choice_is_read_without_a_model() -> None:
    assert read_choice(None) == {}
    assert read_choice("local") is LOCAL
    assert read_choice({"*": "mean"}) == {"*": MEAN}


def test_the_defaults_of_batch_norm_are_told_with_the_cure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "psworker"):
        warn_of_defaults(choose_policies(bind_models({"model": Table()}), None))
    (record,) = caplog.records
    assert record.getMessage() == (
        "the model has batch norm, whose running statistics come out different on "
        "every worker: at every step all workers take the mean of them (2 buffers); 3 "
        "other buffers are the leader's. To choose, and to silence this: prepare(..., "
        "buffers='mean'), 'leader' (those of the worker of the lowest rank) or 'local' "
        "(every worker its own), or by name, as in buffers={'*running_*': 'mean', "
        "'*': 'leader'}"
    )


def test_nothing_is_told_of_a_model_without_batch_norm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(2))
    warn_of_defaults(choose_policies(bind_models({"model": model}), None))
    assert not caplog.records
