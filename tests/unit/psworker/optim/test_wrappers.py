import torch
from torch import nn

from psworker.optim.wrappers import data_parallel_in, without_wrappers


def test_the_plain_model_is_found_in_wrappers_of_wrappers() -> None:
    plain = nn.Linear(2, 1)
    wrapped = torch.compile(nn.DataParallel(plain), backend="eager")
    assert isinstance(wrapped, nn.Module)
    assert without_wrappers(wrapped) is plain
    assert without_wrappers(plain) is plain
    assert data_parallel_in(wrapped) is None
