"""The other side of the comparison: a parameter server on `torch.distributed.rpc`.

A process holds one parameter, receives its gradient, runs SGD and returns the values:
what PyTorch's own tutorial on parameter servers does. The worker's side is a process
too, which is stopped between its turns: where both sides choose shared memory, torch
RPC polls it, with a core and more, though nothing happens, and another contender would
be measured on what is left.
"""

import os
import signal
import subprocess
import sys
import time
import warnings
from enum import StrEnum
from pathlib import Path

import torch
from torch import nn
from torch.distributed import rpc

from psctl.bench.machine import free_port
from psctl.bench.workload import CannotRunError, Contender, Ground, Member
from psctl.folders import scratch_folder


class Transports(StrEnum):
    """How the two sides exchange tensors."""

    TCP = "tcp"
    CHOSEN = "chosen"
    """As RPC chooses: shared memory on one host."""


class _Held:
    """The parameter of the server's process, which the first call makes."""

    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer


def hold(values: torch.Tensor, learning_rate: float) -> None:
    """Stores the first values. Called over RPC."""
    _Held.parameter = nn.Parameter(values)
    _Held.optimizer = torch.optim.SGD([_Held.parameter], lr=learning_rate)


def push_pull(gradient: torch.Tensor) -> torch.Tensor:
    """Applies a gradient and returns the values. Called over RPC."""
    _Held.parameter.grad = gradient
    _Held.optimizer.step()
    return _Held.parameter.detach()


def start_server(ground: Ground, transports: Transports) -> str:
    """Starts the server if this torch has RPC; the port where the two sides join."""
    port = str(free_port())
    if rpc.is_available():
        ground.start(
            "rpc server", "psctl.bench.torch_rpc", "server", port, transports.value
        )
    return port


def rpc_steps(
    member: Member,
    transports: Transports,
    *,
    first: torch.Tensor,
    gradient: torch.Tensor,
    rate: float,
) -> Contender:
    """Steps of a parameter on that server, by SGD with a learning rate.

    Raises:
        CannotRunError: This torch has no RPC.
    """
    if not rpc.is_available():
        raise CannotRunError(
            "this torch was built without torch.distributed.rpc; use one of the "
            "builds for Linux"
        )
    scratch = member.stack.enter_context(scratch_folder("paramserver-bench-"))
    tensors_file = scratch / "tensors"
    torch.save((first, gradient), tensors_file)
    client = _StoppedClient(
        scratch / "values",
        *(member.places["rpc"], transports.value, str(rate), str(tensors_file)),
    )
    member.stack.callback(client.close)
    return Contender(client.step, before=client.go_on, values=client.values)


class _StoppedClient:
    """Client and server, both stopped but for their turns."""

    def __init__(self, values_file: Path, *arguments: str) -> None:
        self._values_file = values_file
        self._process = subprocess.Popen(
            [sys.executable, "-m", "psctl.bench.torch_rpc", "client", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._pids = [int(self._answer()), self._process.pid]
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def step(self) -> float:
        """One step; its seconds, as the client has measured them."""
        seconds = float(self._ask("step"))
        self._signal(signal.SIGSTOP)
        return seconds

    def values(self) -> list[torch.Tensor]:
        self.go_on()
        self._ask(f"values {self._values_file}")
        return [torch.load(self._values_file, weights_only=True)]

    def close(self) -> None:
        self.go_on()
        self._process.communicate()

    def _ask(self, text: str) -> str:
        assert self._process.stdin is not None
        print(text, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CannotRunError(
                "the process with torch RPC has ended; its error is above"
            )
        return line

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)


def join(role: str, port: str, transports: str) -> None:
    """Joins the group of two."""
    is_tcp = Transports(transports) is Transports.TCP
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        _transports=["uv"] if is_tcp else None,
        _channels=["basic"] if is_tcp else None,
    )
    with warnings.catch_warnings():
        # torch warns of how its own RPC uses its process groups.
        warnings.filterwarnings("ignore", message="You are using a Backend")
        rank = int(role == "client")
        rpc.init_rpc(role, rank=rank, world_size=2, rpc_backend_options=options)


def run_client(learning_rate: str, tensors_file: str) -> None:
    """Answers each line of stdin until it ends.

    `step` with the step's seconds, `values FILE` when they are in the file. The file of
    tensors has the first values and the gradient.
    """
    first, gradient = torch.load(tensors_file, weights_only=True)
    rpc.rpc_sync("server", hold, args=(first, float(learning_rate)))
    held = first
    print(rpc.rpc_sync("server", os.getpid), flush=True)
    for line in sys.stdin:
        word, _, argument = line.rstrip("\n").partition(" ")
        if word == "step":
            began = time.perf_counter()
            held = rpc.rpc_sync("server", push_pull, args=(gradient,))
            print(time.perf_counter() - began, flush=True)
        else:
            torch.save(held, argument)
            print(word, flush=True)


if __name__ == "__main__":
    # RPC names functions by module, and this one would be `__main__`.
    from psctl.bench import torch_rpc

    own_role, group_port, chosen, *of_client = sys.argv[1:]
    torch_rpc.join(own_role, group_port, chosen)
    if of_client:
        torch_rpc.run_client(*of_client)
    rpc.shutdown()
