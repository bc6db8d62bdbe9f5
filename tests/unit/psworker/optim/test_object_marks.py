"""Marks tell models and loaders apart that have equal shapes, without touching them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from psworker.optim.object_marks import mark_loaders, mark_models


class Critic(nn.Linear):
    """As a Linear, by another name."""


class Rows(Dataset[Any]):
    """Loads nothing that nobody asks for."""

    def __init__(self, **held: Any) -> None:  # noqa: ANN401
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        raise AssertionError("a mark must not load samples")


def model_of(seed: int, kind: type[nn.Linear] = nn.Linear) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(kind(3, 3), nn.ReLU(), nn.BatchNorm1d(3))


def test_models_of_one_class_are_told_by_their_values() -> None:
    one, two = mark_models({"model": model_of(0), "model1": model_of(1)}, ())
    again, _ = mark_models({"model": model_of(0), "model1": model_of(1)}, ())

    assert one.structure == two.structure
    assert one.content
    assert one.content != two.content
    assert one == again


def test_models_of_other_classes_need_no_look_at_their_values() -> None:
    models = {"model": model_of(0), "model1": model_of(0, Critic)}
    one, two = mark_models(models, ())

    assert one.structure != two.structure
    assert (one.content, two.content) == ("", "")
    assert one.described == "Sequential"


def test_models_with_names_need_none_either() -> None:
    models = {"generator": model_of(0), "critic": model_of(1)}
    for mark in mark_models(models, models):
        assert mark.named
        assert not mark.content


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.BatchNorm1d(3)),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Dropout()),
        nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.BatchNorm1d(3)),
    ],
)
def test_structure_is_the_classes_of_all_modules_and_the_shapes(
    other: nn.Module,
) -> None:
    (mine,) = mark_models({"model": model_of(0)}, ())
    (theirs,) = mark_models({"model": other}, ())
    assert mine.structure != theirs.structure


def test_structure_does_not_depend_on_the_order_of_registration() -> None:
    names = ["a", "b", "c"]
    orders = (names, names[::-1])
    models = [nn.ModuleDict({n: nn.Linear(2, 2) for n in order}) for order in orders]
    one, two = (mark_models({"model": model}, ())[0] for model in models)
    assert one.structure == two.structure


def test_wrappers_are_no_part_of_a_model() -> None:
    plain = model_of(0)
    (one,) = mark_models({"model": plain}, ())
    (two,) = mark_models({"model": nn.DataParallel(plain)}, ())
    assert one == two


def loader(dataset: Dataset[Any], batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size)


def contents(one: Dataset[Any], two: Dataset[Any]) -> list[str]:
    marks = mark_loaders({"loader": loader(one), "loader1": loader(two)}, ())
    assert marks[0].structure == marks[1].structure
    return [mark.content for mark in marks]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (TensorDataset(torch.zeros(8, 1)), TensorDataset(torch.ones(8, 1))),
        (
            Subset(TensorDataset(torch.zeros(9)), range(8)),
            Subset(TensorDataset(torch.zeros(9)), range(1, 9)),
        ),
        (Rows(folder="train"), Rows(folder="extra")),
        (Rows(data=np.zeros((8, 2))), Rows(data=np.ones((8, 2)))),
        (Rows(files=[("a", 1), ("b", 2)]), Rows(files=[("a", 1), ("b", 3)])),
        (Rows(by_class={"x": [1]}), Rows(by_class={"y": [1]})),
        (Rows(scalar=torch.tensor(1.0)), Rows(scalar=torch.tensor(2.0))),
    ],
)
def test_loaders_of_equal_sizes_are_told_by_their_data(
    one: Dataset[Any], two: Dataset[Any]
) -> None:
    first, second = contents(one, two)
    assert first
    assert first != second


def test_a_data_set_of_any_kind_can_be_marked() -> None:
    own: dict[str, Any] = {"self": None}
    own["self"] = own
    odd = Rows(
        loop=own,
        sparse=torch.zeros(3, 3).to_sparse(),
        empty=torch.zeros(0, 3),
        complex=torch.zeros(2, dtype=torch.complex64).conj(),
        objects=np.array([object()], dtype=object),
        number=np.float32(2),
        module=nn.Linear(1, 1),
        many=[list(range(100))] * 100,
        where=open,
    )
    first, second = contents(odd, odd)
    assert first == second


def test_a_single_loader_needs_no_mark() -> None:
    assert mark_loaders({"loader": loader(Rows())}, ()) == ()


def test_loaders_of_other_sizes_need_no_look_at_their_data() -> None:
    loaders = {"loader": loader(Rows()), "loader1": loader(Rows(), batch_size=4)}
    one, two = mark_loaders(loaders, ())
    assert one.structure != two.structure
    assert (one.content, two.content) == ("", "")
    assert one.described == "Rows of 8 samples in batches of 2, by SequentialSampler"
