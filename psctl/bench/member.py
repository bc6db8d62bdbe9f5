"""A process that does the measured work of a workload, its contenders in turn.

Writes a JSON object a line to stdout, which `measuring` reads: `cannot` and `why` for a
contender that can't run, then `contender` and `seconds` for each repetition of each.
"""

import json
import sys
import time
from contextlib import ExitStack
from itertools import pairwise

import torch
from torch import distributed

from psctl.bench.figures import turn_order
from psctl.bench.suite import STEP, workload_named
from psctl.bench.workload import (
    WARM_UP_COUNT,
    CannotRunError,
    Contender,
    Member,
    Sizes,
    Workload,
)
from psworker import event_loop


class DifferentValuesError(Exception):
    """Contenders have computed different values."""


def measure(workload: Workload, member: Member) -> None:
    """Measures all contenders that can run.

    Raises:
        DifferentValuesError: They computed different values.
    """
    contenders: dict[str, Contender] = {}
    for entry in workload.entries:
        try:
            contenders[entry.name] = entry.begin(member)
        except CannotRunError as error:
            _tell({"cannot": entry.name, "why": str(error)})
    for repetition in range(-WARM_UP_COUNT, member.sizes.repetition_count):
        for name in turn_order(list(contenders), repetition):
            contender = contenders[name]
            contender.before()
            if member.count > 1:
                distributed.barrier()
            began = time.perf_counter()
            counted_s = contender.run()
            took_s = time.perf_counter() - began
            seconds = took_s if counted_s is None else counted_s
            if repetition >= 0:
                _tell({"contender": name, "seconds": seconds / contender.amount})
    check_values(contenders, workload.tolerance)


def check_values(contenders: dict[str, Contender], tolerance: float) -> None:
    """Checks that contenders with values have the same ones.

    Raises:
        DifferentValuesError: They don't, with the names and how far they are apart.
    """
    computed = [
        (name, contender.values())
        for name, contender in contenders.items()
        if contender.values is not None
    ]
    for (name, ours), (other, theirs) in pairwise(computed):
        for one, another in zip(ours, theirs, strict=True):
            scale = float(another.abs().max())
            apart = float((one - another).abs().max())
            if not apart <= tolerance * scale:
                raise DifferentValuesError(
                    f"{name} and {other} computed different values, which is a bug: "
                    f"they are {apart:g} apart, with values up to {scale:g}"
                )


def _tell(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def main(name: str, rank: str, settings_text: str) -> None:
    """Measures in this process.

    Args:
        name: Of the workload.
        rank: Of this member.
        settings_text: JSON with `sizes` and `places`, and `group_port` for more
            than one member.
    """
    workload = STEP if name == STEP.name else workload_named(name)
    settings = json.loads(settings_text)
    if workload.thread_count is not None:
        torch.set_num_threads(workload.thread_count)
    with ExitStack() as stack:
        if workload.member_count > 1:
            distributed.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{settings['group_port']}",
                rank=int(rank),
                world_size=workload.member_count,
            )
            stack.callback(distributed.destroy_process_group)
        # One loop for all contenders: gRPC can't follow to another.
        event_loop.acquire()
        stack.callback(event_loop.release)
        member = Member(
            rank=int(rank),
            count=workload.member_count,
            sizes=Sizes(**settings["sizes"]),
            places=settings["places"],
            stack=stack,
        )
        measure(workload, member)


if __name__ == "__main__":
    main(*sys.argv[1:])
