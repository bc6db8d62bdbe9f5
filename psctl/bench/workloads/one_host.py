"""Push, apply and pull on one host, with what each side chooses there."""

from typing import Final

from psctl.bench.rpc_server import Transports
from psctl.bench.workload import (
    Contender,
    Entry,
    Ground,
    Member,
    Workload,
    time_at_most,
)
from psctl.bench.workloads.big_parameter import stepping
from psctl.bench.workloads.rpc_steps import rpc_steps, start_rpc


def _start(ground: Ground) -> dict[str, str]:
    return {
        "coordinator": ground.start_job(),
        "rpc": start_rpc(ground, Transports.CHOSEN),
    }


def _paramserver(member: Member) -> Contender:
    return stepping(member, member.places["coordinator"])


def _torch_rpc(member: Member) -> Contender:
    return rpc_steps(member, member.places["rpc"], Transports.CHOSEN)


ONE_HOST: Final = Workload(
    name="one_host",
    about_s=15,
    title="push + apply (SGD) + pull of one big parameter, transports as each chooses",
    entries=(
        Entry("paramserver", "optimizer.step() of a prepared optimizer", _paramserver),
        Entry(
            "torch_rpc",
            "torch.distributed.rpc, which uses shared memory on one host",
            _torch_rpc,
        ),
    ),
    targets=(time_at_most("paramserver", 0.4, "torch_rpc"),),
    start=_start,
)
