"""The other side of the comparison: a parameter server on `torch.distributed.rpc`.

A process that holds one parameter, takes its gradient, runs SGD and answers with the
values: what PyTorch's own tutorial on parameter servers does.
"""

import sys
import warnings
from enum import StrEnum
from typing import Final

import torch
from torch import nn
from torch.distributed import rpc

SERVER_NAME: Final = "server"
WORKER_NAME: Final = "worker"


class HeldParameter:
    """The parameter of the server's process, made by the first call."""

    parameter: nn.Parameter | None = None
    optimizer: torch.optim.Optimizer | None = None


def hold(values: torch.Tensor, learning_rate: float) -> None:
    """Takes the first values. Called over RPC."""
    HeldParameter.parameter = nn.Parameter(values)
    HeldParameter.optimizer = torch.optim.SGD(
        [HeldParameter.parameter], lr=learning_rate
    )


def push_pull(gradient: torch.Tensor) -> torch.Tensor:
    """Applies a gradient, answers with the values. Called over RPC."""
    parameter, optimizer = HeldParameter.parameter, HeldParameter.optimizer
    assert parameter is not None
    assert optimizer is not None
    parameter.grad = gradient
    optimizer.step()
    return parameter.detach()


class Transports(StrEnum):
    """How the two talk to each other."""

    TCP = "tcp"
    CHOSEN = "chosen"
    """As RPC chooses: shared memory on one host."""


def join_rpc(
    name: str, rank: int, port: int, transports: Transports = Transports.TCP
) -> None:
    """Joins the group of two."""
    is_tcp = transports is Transports.TCP
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        _transports=["uv"] if is_tcp else None,
        _channels=["basic"] if is_tcp else None,
    )
    with warnings.catch_warnings():
        # torch warns of how its own RPC uses its process groups.
        warnings.filterwarnings("ignore", message="You are using a Backend")
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


if __name__ == "__main__":
    # RPC names functions by module, and this one would be `__main__`.
    from psctl.bench import rpc_server

    meeting_port, *chosen = sys.argv[1:]
    rpc_server.join_rpc(
        SERVER_NAME, 0, int(meeting_port), *map(rpc_server.Transports, chosen)
    )
    rpc.shutdown()
