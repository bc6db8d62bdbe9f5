"""The big parameter on a server of torch.distributed.rpc."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch.distributed import rpc

from psctl.bench.machine import free_port
from psctl.bench.rpc_server import Transports
from psctl.bench.workload import CannotRunError, Contender, Ground, Member
from psctl.folders import scratch_folder


def start_rpc(ground: Ground, transports: Transports) -> str:
    """Starts the server if this torch has one; the port where the two meet."""
    port = str(free_port())
    if rpc.is_available():
        ground.start("rpc server", "psctl.bench.rpc_server", port, transports.value)
    return port


def rpc_steps(
    member: Member,
    transports: Transports,
    *,
    first: torch.Tensor,
    gradient: torch.Tensor,
    rate: float,
) -> Contender:
    """Steps of a parameter on that server.

    Args:
        member: Of the workload, with the server's port among its places.
        transports: As those of the server.
        first: Values of the parameter before the first step.
        gradient: Of each step.
        rate: Learning rate of the server's SGD.

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
    """Both sides of torch RPC, stopped but for their turns: see `rpc_client`."""

    def __init__(self, values_file: Path, *arguments: str) -> None:
        self._values_file = values_file
        self._process = subprocess.Popen(
            [sys.executable, "-m", "psctl.bench.rpc_client", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._pids = [int(self._answer()), self._process.pid]
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets both run again."""
        self._signal(signal.SIGCONT)

    def step(self) -> float:
        """One step; its seconds, as the client has measured them."""
        seconds = float(self._ask("step"))
        self._signal(signal.SIGSTOP)
        return seconds

    def values(self) -> list[torch.Tensor]:
        """What the last step has brought."""
        self.go_on()
        self._ask(f"values {self._values_file}")
        return [torch.load(self._values_file)]

    def close(self) -> None:
        """Ends both."""
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
