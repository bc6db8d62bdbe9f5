"""Which buffers a worker has to send: what changed since the shards' value came."""

import pytest
import torch
from torch import nn

from pswire.membership import FenceKind, Member, Mode, Record, WorkerKey
from pswire.placement import place
from psworker.errors import ConfigurationError
from psworker.optim.buffer_policies import BufferChoice, choose_policies
from psworker.optim.buffers import Buffers, leads
from psworker.optim.declared_tensors import DeclaredTensors
from psworker.optim.model_schema import bind_models, describe_optimizer
from psworker.tensors.value_store import ValueStore


class Model(nn.Module):
    def __init__(self, mask_size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mask", torch.ones(mask_size))
        self.register_buffer("statistic", torch.zeros(3))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("count", torch.tensor(0))
        self.mask: torch.Tensor
        self.statistic: torch.Tensor
        self.count: torch.Tensor


class Worker:
    """Buffers of a model right after the shards' values have come."""

    def __init__(self, model: Model, choice: BufferChoice = "mean") -> None:
        bound = bind_models({"model": model})
        policies = choose_policies(bound, choice)
        self.names = {
            index: bound.schema.entries[index].name for index in sorted(policies)
        }
        self.buffers = Buffers(bound, policies)
        self._declared = DeclaredTensors(bound, policies)
        self.store = ValueStore(
            bound.tensors,
            place(bound.schema, 1),
            buffers=policies,
            local=self.buffers.local,
        )
        self.buffers.note_all(self.store)

    def sent(self, *, is_leader: bool = False) -> set[str]:
        for index in self._declared.look():
            self.store.put(index, self._declared.tensors[index])
            self.buffers.forget(index)
        changed = self.buffers.changed(self.store, is_leader=is_leader)
        return {self.names[index] for index in changed}


def test_only_what_has_changed_is_sent_and_again_until_a_value_came() -> None:
    model = Model()
    worker = Worker(model)
    assert worker.sent() == set()

    model.statistic += 1
    model.count.add_(1)
    assert worker.sent() == worker.sent() == {"statistic", "count"}

    worker.store.written = {2}  # the statistic's entry
    worker.buffers.note_written(worker.store)
    assert worker.names[2] == "statistic"
    assert worker.sent() == {"count"}
    assert worker.store.written == set()


def test_what_is_sent_is_a_copy() -> None:
    model = Model()
    worker = Worker(model)
    model.statistic += 1
    ((_, sent),) = worker.buffers.changed(worker.store, is_leader=False).items()
    model.statistic += 1
    assert sent.tolist() == [1, 1, 1]


def test_a_write_through_data_is_seen_in_buffers_of_up_to_64_kib() -> None:
    for mask_size, expected in ((1 << 14, {"mask"}), ((1 << 14) + 1, set())):
        model = Model(mask_size)
        worker = Worker(model)
        model.mask.data.mul_(2)
        assert worker.sent() == expected


def test_large_buffers_are_known_by_torchs_count_and_their_memory() -> None:
    for change in ("mul_", "data"):
        model = Model(1 << 20)
        worker = Worker(model)
        if change == "data":
            model.mask.data = torch.zeros(1 << 20)
        else:
            model.mask.mul_(2)
        assert worker.sent() == {"mask"}


def test_a_buffer_that_was_replaced_is_found() -> None:
    model = Model()
    worker = Worker(model)
    model.count = model.count + 1
    assert worker.sent() == {"count"}
    assert any(held is model.count for held in worker.store.tensors)


def test_the_leader_sends_more_and_nobody_what_is_local() -> None:
    model = Model()
    choice = {"statistic": "mean", "count": "leader", "*": "local"}
    worker = Worker(model, choice)
    for buffer in (model.statistic, model.count, model.mask):
        buffer.add_(1)
    assert worker.sent() == {"statistic"}
    assert worker.sent(is_leader=True) == {"statistic", "count"}
    assert {worker.names[index] for index in worker.buffers.local} == {"mask", "empty"}


def test_the_trailer_tells_which_are_averaged() -> None:
    model = Model()
    worker = Worker(model, {"statistic": "mean", "*": "leader"})
    assert list(worker.names.values()) == ["mask", "statistic", "empty", "count"]
    held: list[torch.Tensor | None] = [None] * 5
    assert worker.buffers.add_to(held, worker.store, is_leader=True) == b""
    assert held == [None] * 5

    model.count += 1
    bits = worker.buffers.add_to(held, worker.store, is_leader=True)
    assert bits == bytes([0b0010])
    assert [each is not None for each in held] == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            torch.zeros(4),
            "buffer 'statistic' of model is of shape [4] and type float32, but the "
            "job has it as buffer [3] float32: keep it so, or leave it to every worker "
            "with prepare(..., buffers={'statistic': 'local'})",
        ),
        (torch.zeros(3).double(), "is of shape [3] and type float64, but the job"),
        (None, "buffer 'statistic' of model is gone, but the job"),
    ],
)
def test_a_buffer_of_another_shape_is_refused(
    value: torch.Tensor | None, says: str
) -> None:
    model = Model()
    worker = Worker(model)
    model.statistic = value  # type: ignore[assignment]
    with pytest.raises(ConfigurationError) as caught:
        worker.sent()
    assert says in str(caught.value)

    model = Model()
    free = Worker(model, {"statistic": "local"})
    model.statistic = value  # type: ignore[assignment]
    assert free.sent() == set()


def record(mode: Mode, *members: tuple[str, int, int]) -> Record:
    return Record(
        fence_number=1,
        generation=1,
        kind=FenceKind.START,
        members=tuple(
            Member(worker=WorkerKey(name, 1), rank=rank, base_clock=base_clock)
            for name, rank, base_clock in members
        ),
        mode=mode,
    )


def test_the_leader_is_the_lowest_rank_that_contributes() -> None:
    bases = {"a": 0, "b": 0, "c": 5}
    in_bsp = record(Mode.BSP, ("a", 2, 0), ("b", 1, 0), ("c", 0, 5))
    for clock, leader in ((5, "b"), (6, "c")):
        for name, base in bases.items():
            sequence = clock - base
            is_leader = leads(in_bsp, WorkerKey(name, 1), sequence)
            assert is_leader is (name == leader), (clock, name)
    # Clocks of pushes by themselves say nothing of the others'.
    in_asp = record(Mode.ASP, ("b", 1, 0), ("c", 0, 5))
    assert leads(in_asp, WorkerKey("c", 1), 1)
    assert not leads(in_asp, WorkerKey("b", 1), 5)


def test_who_is_no_member_leads_nobody() -> None:
    in_bsp = record(Mode.BSP, ("a", 0, 0))
    assert not leads(in_bsp, WorkerKey("a", 2), 1)
    assert not leads(None, WorkerKey("a", 1), 1)


def test_a_push_leaves_the_buffers_of_other_optimizers_modules_alone() -> None:
    def half() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))

    model = nn.ModuleDict({"g": half(), "d": half(), "frozen": nn.BatchNorm1d(2)})
    other = nn.BatchNorm1d(2)
    bound = bind_models({"model": model, "model1": other})
    specs = [
        describe_optimizer(name, torch.optim.SGD(model[name].parameters(), 0.1), bound)
        for name in ("g", "d")
    ]
    buffers = Buffers(bound, choose_policies(bound, "mean"), specs)

    entries = bound.schema.entries
    for name, theirs in (("g", "d."), ("d", "g.")):
        scope = buffers.scope_of(name)
        withheld = [entries[index].name for index in scope.withheld]
        assert len(withheld) == 3
        assert {each[:2] for each in withheld} == {theirs}
        assert {entries[index].name for index in scope.updated} == {
            f"{name}.0.weight",
            f"{name}.0.bias",
        }


def test_what_was_passed_over_goes_with_the_next_push() -> None:
    model = Model()
    worker = Worker(model)
    assert worker.sent() == set()
    worker.store.passed_over = {2}  # the statistic's entry
    worker.buffers.note_written(worker.store)
    assert worker.sent() == {"statistic"}
    assert worker.store.passed_over == set()
