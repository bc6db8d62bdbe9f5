"""Residuals in a saved state: what is loaded, and what is refused in which words."""

import re
from typing import Any

import pytest
import torch

from psworker.errors import ConfigurationError
from psworker.optim.optimizer_state import pack_residuals, unpack_residuals

PARAMETERS = [torch.zeros(2, 3), torch.zeros(4)]
GROUPS: list[dict[str, Any]] = [{"params": [each]} for each in PARAMETERS]
INDEXES = {id(PARAMETERS[0]): 5, id(PARAMETERS[1]): 2}


def test_what_was_saved_is_loaded() -> None:
    residuals = {5: torch.arange(6.0), 2: torch.full((4,), -1e17)}

    saved = pack_residuals(GROUPS, INDEXES, residuals)
    loaded = unpack_residuals(GROUPS, INDEXES, saved)

    assert [list(each.shape) for each in saved.values()] == [[2, 3], [4]]
    assert loaded.keys() == residuals.keys()
    assert all(torch.equal(loaded[each], residuals[each]) for each in residuals)


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        ([1, 2], "has a list as 'residuals', in place of a dict of tensors by number"),
        (None, "has a NoneType as 'residuals', in place of a dict of tensors"),
        ({"x": torch.zeros(4)}, "of shape [4] for parameter 'x', which is not there"),
        ({True: torch.zeros(4)}, "of shape [4] for parameter True, which is not there"),
        ({-1: torch.zeros(4)}, "of shape [4] for parameter -1, which is not there"),
        ({2: torch.zeros(4)}, "of shape [4] for parameter 2, which is not there"),
        ({1: torch.zeros(3)}, "of shape [3] for parameter 1, which has the shape [4]"),
        ({1: 5.0}, "a float as the residual for parameter 1, which has the shape [4]"),
        (
            {1: torch.zeros(4).to_sparse()},
            "a residual of torch.float32 and torch.sparse_coo for parameter 1",
        ),
    ],
)
def test_what_is_no_residual_of_a_parameter_is_refused(
    saved: object, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)) as caught:
        unpack_residuals(GROUPS, INDEXES, saved)

    assert str(caught.value).endswith(": load the state of the same optimizer")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e38, 1e300])
def test_residuals_that_no_shard_takes_are_refused(value: float) -> None:
    residual = torch.zeros(4, dtype=torch.float64)
    residual[3] = value

    with pytest.raises(ConfigurationError) as caught:
        unpack_residuals(GROUPS, INDEXES, {1: residual})

    assert str(caught.value) == (
        "the loaded state has a residual for parameter 1 with elements that are not "
        "finite, or larger than 1e+18, which no shard takes: load an earlier state, or "
        "leave residuals out with `state.pop('residuals')`"
    )
