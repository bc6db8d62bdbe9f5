"""A script's objects travel to processes that load data, and nowhere else."""

import copy
import multiprocessing
import pickle
from io import BytesIO
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from psworker.data.counted import CountedLoader
from psworker.data.loader import LeasedLoader
from psworker.errors import UnsupportedError
from psworker.left_behind import LeftBehind, reduced


class Worker:
    """Stands for any object that belongs to its process."""

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return reduced("the connection of worker w0", "it is this process")


class Trainer:
    """As people write them."""

    def __init__(self) -> None:
        self.ps = Worker()
        self.scale = 2.0

    def collate(self, items: list[Any]) -> torch.Tensor:
        return self.scale * torch.stack([x for (x,) in items])


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_to_keep_is_refused_by_name_with_the_way_round(act: Any) -> None:  # noqa: ANN401
    with pytest.raises(UnsupportedError, match=r"worker w0 can't be .* a __getstate__"):
        act(Worker())
    with pytest.raises(UnsupportedError, match="worker w0 can't be"):
        torch.save({"trainer": Trainer()} if act is copy.copy else Worker(), BytesIO())


@pytest.mark.parametrize("kind", [LeasedLoader, CountedLoader])
def test_a_prepared_loader_is_refused_by_name(kind: Any) -> None:  # noqa: ANN401
    source: Any = object()
    loader = kind(DataLoader(TensorDataset(torch.zeros(2))), source, name="loader1")
    with pytest.raises(
        UnsupportedError, match=r"loader1 can't be .* copy the DataLoader"
    ):
        copy.deepcopy(loader)


def travelled(what: Any) -> Any:  # noqa: ANN401
    """What arrives in a process that is being spawned."""
    popen: Any = object()
    set_spawning_popen(popen)
    try:
        data = ForkingPickler.dumps(what)
    finally:
        set_spawning_popen(None)
    return pickle.loads(data)


def test_to_a_process_that_loads_data_the_rest_of_a_trainer_travels() -> None:
    collate = travelled(Trainer().collate)

    assert collate([(torch.ones(1),)]).item() == 2.0
    left = collate.__self__.ps
    assert isinstance(left, LeftBehind)
    assert repr(left) == (
        "<the connection of worker w0, left in the process that started this one>"
    )
    with pytest.raises(UnsupportedError, match="worker w0 has no 'close' here"):
        left.close()
    assert not hasattr(left, "__len__")
    assert copy.deepcopy(left)._what == left._what


def test_a_trainer_collates_in_a_spawned_process() -> None:
    loader = DataLoader(
        TensorDataset(torch.ones(2, 1)),
        collate_fn=Trainer().collate,
        num_workers=1,
        multiprocessing_context=multiprocessing.get_context("spawn"),
    )
    assert [batch.item() for batch in loader] == [2.0, 2.0]
