"""A worker of `psctl compare --strategies`: a training script like any other.

It leases its samples from the job, each of which is trained once by one of the workers.
A step takes at least a set time, by a wait that leaves the processor free, so that two
cores can show four machines. Prints now and then where it is, which the comparison
reads.
"""

import math
import sys
import time
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import psworker
from psctl.compare.characters import Characters
from psctl.compare.loads import step_factors
from psctl.compare.strategy_runs import Point, StrategyRun

LEARNING_RATE: Final = 2e-3
"""Of AdamW."""

_WARMUP_STEPS: Final = 50
_HOLD: Final = 0.5
"""Share of the training after which the learning rate falls, in a line."""
_LAST_SHARE: Final = 0.1
"""Of the learning rate, at the end."""

_SAY_INTERVAL_S: Final = 0.1


def learning_rate_share(step: int, step_count: int) -> float:
    """Of the learning rate, at a step of about so many."""
    warm = min(1.0, (step + 1) / _WARMUP_STEPS)
    left = max(0.0, 1 - step / step_count) / (1 - _HOLD)
    return warm * max(_LAST_SHARE, min(1.0, left))


def strategy_options(run: StrategyRun) -> dict[str, Any]:
    """What `ps.prepare` takes for it."""
    contender = run.contender
    options: dict[str, Any] = {}
    if contender.compression:
        options["compression"] = contender.compression
    if contender.strategy:
        options["strategy"] = contender.made()
    return options


def train(run: StrategyRun, worker_index: int) -> None:
    """Trains until every sample is in the model."""
    text = Characters()
    model = text.new_model()
    rate = LEARNING_RATE
    if not run.contender.strategy and not run.contender.mode.is_synchronous:
        # Several updates in place of one: by the usual rule for a smaller batch.
        rate /= math.sqrt(run.worker_count)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    data = text.samples(run.sample_count, run.seed)
    loader = DataLoader(data, batch_size=run.batch_size, shuffle=True)
    step_count = math.ceil(run.sample_count / run.batch_size / run.worker_count)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_share(step, step_count))
    connection = psworker.connect()
    model, optimizer, loader, schedule = connection.prepare(
        model, optimizer, loader, schedule, **strategy_options(run)
    )
    factors = step_factors(
        run.load,
        worker_index=worker_index,
        worker_count=run.worker_count,
        seed=run.seed,
    )
    steps = samples = 0

    def say() -> float:
        at_s = time.monotonic()
        point = Point(
            worker_index=worker_index,
            at_s=at_s,
            step_count=steps,
            sample_count=samples,
            sent_bytes=connection.bytes_sent,
            received_bytes=connection.bytes_received,
            clock=connection.clock,
        )
        print(point.to_line(), flush=True)
        return at_s

    said_s = say()
    for characters, following in loader:
        ready_s = time.monotonic() + run.base_s * next(factors)
        model.loss(characters, following).backward()
        time.sleep(max(0.0, ready_s - time.monotonic()))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        steps += 1
        samples += len(characters)
        if time.monotonic() - said_s >= _SAY_INTERVAL_S:
            said_s = say()
    connection.close()
    say()


if __name__ == "__main__":
    # The processes share the machine's cores as it is.
    torch.set_num_threads(1)
    train(StrategyRun.from_argument(sys.argv[1]), int(sys.argv[2]))
