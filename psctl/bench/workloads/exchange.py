"""Push, apply and pull of one big parameter over TCP, as bare as others do it."""

from typing import Final

from psctl.bench.bare_stream import BareStreamClient
from psctl.bench.machine import free_port
from psctl.bench.rpc_server import Transports
from psctl.bench.workload import (
    OVER_TCP,
    Contender,
    Entry,
    Ground,
    Member,
    Workload,
    time_at_most,
)
from psctl.bench.workloads.big_parameter import (
    LEARNING_RATE,
    big_tensors,
    stepping,
)
from psctl.bench.workloads.rpc_steps import rpc_steps, start_rpc
from psworker import event_loop


def _start(ground: Ground) -> dict[str, str]:
    coordinator = ground.start_job()
    bare_port = str(free_port())
    ground.start(
        "bare stream",
        "psctl.bench.bare_stream_server",
        *(bare_port, str(ground.sizes.element_count), str(LEARNING_RATE)),
    )
    return {
        "coordinator": coordinator,
        "bare": bare_port,
        "rpc": start_rpc(ground, Transports.TCP),
    }


def _paramserver(member: Member) -> Contender:
    return stepping(member, member.places["coordinator"])


def _torch_rpc(member: Member) -> Contender:
    return rpc_steps(member, member.places["rpc"], Transports.TCP)


def _bare_stream(member: Member) -> Contender:
    first, gradient = big_tensors(member)
    loop = event_loop.acquire()
    member.stack.callback(event_loop.release)
    client = BareStreamClient(loop, int(member.places["bare"]), first)
    member.stack.callback(client.close)
    return Contender(
        lambda: client.step(gradient), values=lambda: [client.values.clone()]
    )


EXCHANGE: Final = Workload(
    name="exchange",
    about_s=20,
    title="push + apply (SGD) + pull of one big parameter, 1 worker, 1 shard, TCP",
    entries=(
        Entry("paramserver", "optimizer.step() of a prepared optimizer", _paramserver),
        Entry(
            "torch_rpc",
            "torch.distributed.rpc over TCP alone, the same SGD on its server",
            _torch_rpc,
        ),
        Entry(
            "bare_stream",
            "asyncio gRPC stream of 1 MiB chunks on uvloop, SGD in the handler, "
            "nothing checked",
            _bare_stream,
        ),
    ),
    targets=(
        time_at_most("paramserver", 1.1, "torch_rpc"),
        time_at_most("paramserver", 0.95, "bare_stream"),
    ),
    start=_start,
    environment=OVER_TCP,
)
