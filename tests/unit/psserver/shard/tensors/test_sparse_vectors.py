"""Sparse vectors, as a shard makes them."""

import subprocess
import sys
from typing import Final

FIRST_OF_A_PROCESS: Final = """
import warnings
import torch
from psserver.shard.tensors.chunk_optimizer import sparse_vector
from pswire.placement import Slice

warnings.simplefilter("error")
piece = Slice(entry_index=0, start=0, stop=4)
vector = torch.zeros(4)
vector.grad = sparse_vector([piece], [torch.tensor([1, 3])], torch.ones(2))
torch.optim.Adagrad([vector], lr=1.0).step()
print(vector.tolist())
"""


def test_torch_does_not_warn_of_the_first_update_of_a_process() -> None:
    """It warns once in a process, so that only a new one can tell."""
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_OF_A_PROCESS],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ran.stdout, ran.stderr) == ("[0.0, -1.0, 0.0, -1.0]\n", "")
