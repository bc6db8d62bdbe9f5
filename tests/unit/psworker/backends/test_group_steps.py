"""Steps of a group, of one process: what it has drawn, and whose state was loaded."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pswire.schema import OptimizerSpec
from psworker.backends.backend import WorkerPlace
from psworker.backends.group import GroupChannel, GroupSteps
from psworker.data.counted import CountedLoader
from psworker.errors import UnsupportedError
from psworker.optim.buffers import Buffers
from psworker.optim.declared_tensors import DeclaredTensors
from psworker.optim.model_schema import bind_models
from psworker.optim.optimizer_state import States
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import OptimizerStep, StateLoad
from psworker.transport.values import OptimizerSettings
from psworker.work_log import WorkLog
from tests.doubles.core_values import sgd

SPEC = sgd(groups=((0, 1),))
PLACE = WorkerPlace(
    worker_id="w0",
    rank=0,
    worker_count=1,
    clock=0,
    generation=1,
    mode="bsp",
    last_push=None,
)
RESULT = PushResult(
    outcome="applied",
    clock=1,
    version=1,
    frontier=1,
    staleness=0,
    mode="bsp",
    duplicate=False,
)


@dataclass
class RecordingSteps:
    """Stands in for the leader's own steps: notes what it was asked."""

    reads_state: bool = True
    steps: list[OptimizerStep] = field(default_factory=list)

    def step(self, wanted: OptimizerStep) -> PushResult:
        self.steps.append(wanted)
        return RESULT

    def note_zeroed(self) -> None:
        raise AssertionError("the group notes it itself")

    def push_nothing(self, wanted: OptimizerStep) -> PushResult:
        raise AssertionError("every test has data")

    def optimizer_state(self, optimizer: str, spec_digest: str) -> States:
        return {}

    def settings_used(self, optimizer: str) -> OptimizerSettings:
        raise NotImplementedError

    def declare(self, spec: OptimizerSpec) -> None:
        raise NotImplementedError


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[GroupChannel]:
    meet = f"file://{tmp_path / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    try:
        yield GroupChannel(timeout_s=20)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.fixture
def steps(channel: GroupChannel, model: nn.Module) -> GroupSteps:
    bound = bind_models({"model": model})
    return GroupSteps(
        channel,
        DeclaredTensors(bound, {}),
        Buffers(bound, {}, [SPEC]),
        None,
        place=PLACE,
        look=lambda: PLACE,
        work=WorkLog(),
    )


@pytest.fixture
def leader(steps: GroupSteps) -> RecordingSteps:
    own = RecordingSteps()
    steps.lead(own)
    return own


def test_a_batch_that_a_loop_breaks_at_is_not_of_the_next_step(
    steps: GroupSteps, leader: RecordingSteps, model: nn.Module
) -> None:
    batches = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    loader = CountedLoader(batches, steps)
    for _ in range(2):
        for count, (inputs,) in enumerate(loader):
            if count == 1:
                break
            model.zero_grad()
            model(inputs).sum().backward()
            steps.step(OptimizerStep(spec=SPEC, groups=()))

    assert [each.weight for each in leader.steps] == [2, 2]


def test_a_sum_is_told_over_how_many_processes_its_gradient_was_averaged(
    steps: GroupSteps, leader: RecordingSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps._channel, "process_count", 3)
    for spec in (SPEC, replace(SPEC, loss_is_sum=True)):
        steps.step(OptimizerStep(spec=spec, groups=(), weight=1.0))

    assert [each.averaged_over for each in leader.steps] == [1, 3]


def test_a_process_that_does_not_lead_has_no_optimizer_state(steps: GroupSteps) -> None:
    with pytest.raises(UnsupportedError) as caught:
        steps.optimizer_state("optimizer", "")

    assert str(caught.value) == (
        "only rank 0 of a process group speaks to the shards, where the optimizer's "
        "state is: call state_dict() there, as for saving"
    )


def test_state_is_loaded_when_the_push_that_carried_it_says_so(
    steps: GroupSteps, leader: RecordingSteps
) -> None:
    loaded: list[str] = []
    first = StateLoad({}, lambda: loaded.append("first"))
    other = StateLoad({}, lambda: loaded.append("other"))

    steps.step(OptimizerStep(spec=SPEC, groups=(), weight=1, load=first))
    assert not loaded

    class Loading(RecordingSteps):
        def push_nothing(self, wanted: OptimizerStep) -> PushResult:
            assert wanted.load is not None
            wanted.load.on_loaded()
            return RESULT

    steps.lead(Loading())
    steps.push_nothing(OptimizerStep(spec=SPEC, groups=(), load=other))
    assert loaded == ["other"]
