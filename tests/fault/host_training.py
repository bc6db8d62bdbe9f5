"""A process of a host group, for the fault tests: every gradient has a slot of its own.

As `training.py`: the group's mean of n processes holds 1/n in each of their slots.
Arguments: position of the process's slots, folder, seconds of a step.
"""

import os
import sys
import time
from pathlib import Path

import torch

import psworker
from tests.fault.training import SLOTS_PER_WORKER, make_model, mark, say


def main() -> None:
    torch.set_num_threads(1)
    position, folder, pace_s = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    model, optimizer = make_model()
    with psworker.connect(
        connect_timeout_s=20.0, step_timeout_s=30.0, start_timeout_s=40.0
    ) as ps:
        model, optimizer = ps.prepare(model, optimizer)
        say("joined", clock=ps.clock, worker_id=ps.worker_id)
        count = 0
        while not (folder / "stop").exists():
            slot = position * SLOTS_PER_WORKER + count % SLOTS_PER_WORKER
            count += 1
            mark(model, slot)
            say("begins", slot=slot)
            optimizer.step()
            result = ps.last_push
            assert result is not None
            say(
                "step",
                slot=slot,
                clock=result.clock,
                outcome=result.outcome,
                rejoined=result.rejoined,
                worker_id=ps.worker_id,
                digest=hash(tuple(p.sum().item() for p in model.parameters())),
            )
            time.sleep(pace_s)
        say("done", clock=ps.clock, bytes_sent=ps.bytes_sent, pid=os.getpid())


if __name__ == "__main__":
    main()
