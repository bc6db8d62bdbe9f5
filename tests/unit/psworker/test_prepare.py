from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psworker.errors import ConfigurationError
from psworker.prepare import check_clip_norm, check_overlap, sort_objects


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


def test_another_kind_of_thing_is_named() -> None:
    with pytest.raises(ConfigurationError, match="does not take a dict"):
        sort_objects([nn.Linear(1, 1), {}])


def test_the_same_thing_twice_is_refused() -> None:
    model = nn.Linear(1, 1)

    with pytest.raises(ConfigurationError, match="a Linear was given twice"):
        sort_objects([model, model])
