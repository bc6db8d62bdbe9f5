"""Sparse tables on a CUDA device; shards stay on the CPU."""

from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

from tests.integration.job import Job, connect, deviation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

STEP_COUNT: Final = 5


def trained(
    table: nn.Embedding, optimizer: torch.optim.Optimizer, device: str
) -> list[torch.Tensor]:
    for step in range(STEP_COUNT):
        ids = torch.tensor([step, 7, 7, 99 - step], device=device)
        table.zero_grad()
        table(ids).square().sum().backward()
        optimizer.step()
    return [table.weight.detach().cpu()]


@pytest.mark.parametrize("class_name", ["SGD", "Adagrad", "SparseAdam"])
def test_rows_on_cuda_train_as_on_the_cpu(class_name: str, tmp_path: Path) -> None:
    make = getattr(torch.optim, class_name)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn((100, 16), generator=generator)
    plain, table = (
        nn.Embedding.from_pretrained(values.clone(), freeze=False, sparse=True)
        for _ in range(2)
    )
    expected = trained(plain, make(plain.parameters(), lr=0.1), "cpu")
    table = table.to("cuda")

    with Job(tmp_path, sockets=True) as job, connect(job, "w0") as ps:
        table, optimizer = ps.prepare(table, make(table.parameters(), lr=0.1))
        found = trained(table, optimizer, "cuda")

    assert deviation(found, expected) <= 1e-6
