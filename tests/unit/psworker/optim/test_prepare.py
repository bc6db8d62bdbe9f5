from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psworker.errors import ConfigurationError
from psworker.optim.checks import check_clip_norm, check_loss, check_overlap
from psworker.optim.prepare import PrepareOptions, sort_objects


def test_things_get_the_names_of_their_kind_in_order() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(2, 2)
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    second = torch.optim.Adam(two.parameters())
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)))
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1)

    given = sort_objects([first, one, loader, two, second, scheduler])

    assert given.models == {"model": one, "model1": two}
    assert given.optimizers == {"optimizer": first, "optimizer1": second}
    assert given.loaders == {"loader": loader}
    assert given.schedulers == (scheduler,)
    assert given.specs["optimizer1"].groups[0].entry_indexes == (2, 3)


def test_all_that_goes_by_tensors_takes_the_order_of_the_job() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters()},
        {"params": model[1].parameters(), "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    given = sort_objects([model, optimizer])
    names = [entry.name for entry in given.bound.schema.entries]
    count = len(names)

    other = given.in_order([*range(1, count), 0])

    entries = other.bound.schema.entries
    assert [entry.name for entry in entries] == [names[-1], *names[:-1]]
    for entry, tensor in zip(entries, other.bound.tensors, strict=True):
        assert model.state_dict(keep_vars=True)[entry.name] is tensor
    indexes = [each.entry_indexes for each in other.specs["optimizer"].groups]
    assert indexes == [(1, 2), (3, 4)]
    assert {entries[index].name for index in other.buffers} == {
        names[index] for index in given.buffers
    }
    assert {
        entries[index].name: state for index, state in other.states["optimizer"].items()
    } == {names[index]: state for index, state in given.states["optimizer"].items()}
    assert other.bound.schema.marks == given.bound.schema.marks


@pytest.mark.parametrize("missing", ["model", "optimizer"])
def test_a_model_and_an_optimizer_are_needed(missing: str) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ConfigurationError, match="at least one model and one"):
        sort_objects([optimizer if missing == "model" else model])


@pytest.mark.parametrize("overlap", ["yes", 1, None])
def test_overlap_is_on_or_off(overlap: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigurationError, match="is neither True nor False: give one"):
        check_overlap(overlap)


def test_a_norm_beyond_all_floats_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is no norm to clip to"):
        check_clip_norm(10**400)


@pytest.mark.parametrize("loss", ["total", "", True, nn.MSELoss()])
def test_a_loss_is_a_mean_or_a_sum(loss: Any) -> None:  # noqa: ANN401
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match='is neither "mean" nor "sum": say'):
        sort_objects([model, optimizer], PrepareOptions(loss=loss))


@pytest.mark.parametrize(
    ("loss", "found"), [(None, "mean"), ("mean", "mean"), ("sum", "sum")]
)
def test_the_word_of_the_loss_goes_with_each_optimizer(
    loss: str | None, found: str
) -> None:
    model = nn.Linear(1, 1)
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]

    given = sort_objects([model, *optimizers], PrepareOptions(loss=loss))

    assert given.loss == found
    assert [spec.loss_is_sum for spec in given.specs.values()] == [found == "sum"] * 2
    check_loss(None, given.loss)
    check_loss(found, given.loss)
    other = "mean" if found == "sum" else "sum"
    with pytest.raises(ConfigurationError, match=f'first .* said, loss="{found}"; '):
        check_loss(other, given.loss)


def test_another_kind_of_thing_is_named() -> None:
    with pytest.raises(ConfigurationError, match="does not take a list"):
        sort_objects([nn.Linear(1, 1), []])


def test_the_same_thing_twice_is_refused() -> None:
    model = nn.Linear(1, 1)

    with pytest.raises(ConfigurationError, match="a Linear was given twice"):
        sort_objects([model, model])
