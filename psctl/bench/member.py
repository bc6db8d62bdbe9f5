"""A process that does the measured work of a workload, its contenders in turn.

Writes a JSON object a line to stdout, which `command` reads: `cannot` and `why` for a
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
from psctl.bench.suite import any_workload_named
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
    pass


def measure(workload: Workload, member: Member) -> None:
    """Measures all contenders that can run, and compares their values."""
    contenders: dict[str, Contender] = {}
    for entry in workload.entries:
        try:
            contenders[entry.name] = entry.begin(member)
        except CannotRunError as error:
            _report({"cannot": entry.name, "why": str(error)})
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
                _report({"contender": name, "seconds": seconds / contender.amount})
            else:
                print(flush=True)  # a sign of life
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


def _report(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def main(name: str, rank: str, settings_text: str) -> None:
    """Measures as one member; the last argument is the JSON of `command`."""
    workload = any_workload_named(name)
    settings = json.loads(settings_text)
    member_count = settings["member_count"]
    if settings["thread_count"] is not None:
        torch.set_num_threads(settings["thread_count"])
    with ExitStack() as stack:
        if member_count > 1:
            distributed.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{settings['group_port']}",
                rank=int(rank),
                world_size=member_count,
            )
            stack.callback(distributed.destroy_process_group)
        # One loop for all contenders: gRPC can't follow to another.
        event_loop.acquire()
        stack.callback(event_loop.release)
        member = Member(
            rank=int(rank),
            count=member_count,
            sizes=Sizes(**settings["sizes"]),
            places=settings["places"],
            stack=stack,
        )
        measure(workload, member)


if __name__ == "__main__":
    main(*sys.argv[1:])
