"""The big parameter on a server of torch.distributed.rpc."""

from torch.distributed import rpc

from psworker.ctl.bench.machine import free_port
from psworker.ctl.bench.rpc_server import (
    SERVER_NAME,
    WORKER_NAME,
    Transports,
    hold,
    join_rpc,
    push_pull,
)
from psworker.ctl.bench.workload import CannotRunError, Contender, Ground, Member
from psworker.ctl.bench.workloads.big_parameter import LEARNING_RATE, big_tensors


def start_rpc(ground: Ground, transports: Transports) -> str:
    """Starts the server if this torch has one; the port where the two meet."""
    port = str(free_port())
    if rpc.is_available():
        ground.start(
            "rpc server", "psworker.ctl.bench.rpc_server", port, transports.value
        )
    return port


def rpc_steps(member: Member, port: str, transports: Transports) -> Contender:
    """Steps of the big parameter on that server.

    Raises:
        CannotRunError: This torch has no RPC.
    """
    if not rpc.is_available():
        raise CannotRunError(
            "this torch was built without torch.distributed.rpc; use one of the "
            "builds for Linux"
        )
    first, gradient = big_tensors(member)
    join_rpc(WORKER_NAME, 1, int(port), transports)
    member.stack.callback(rpc.shutdown)
    rpc.rpc_sync(SERVER_NAME, hold, args=(first, LEARNING_RATE))
    held = first

    def run() -> None:
        nonlocal held
        held = rpc.rpc_sync(SERVER_NAME, push_pull, args=(gradient,))

    return Contender(run, values=lambda: [held])
