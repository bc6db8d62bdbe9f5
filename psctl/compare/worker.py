"""A worker of the comparison: a training script whose steps take a set time.

The time of a step is a wait that leaves the processor free, so that two cores can
show four workers. Prints one line a step, which the comparison reads.

N updates from batches of B samples aren't one update from N x B: with the same
learning rate they go N times as far. So an update's rate here is proportional to the
samples that it is made of, so that the modes' accuracies can be compared, and there's
no momentum: in asynchronous modes the updates of several workers in a row act as one
already.
"""

import sys
import time
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

import psworker
from psctl.compare.figures import RunConditions, Step
from psctl.compare.loads import step_factors
from psctl.demo.tasks import load_task

TASK_NAME: Final = "mnist5k"

LEARNING_RATE: Final = 0.06
"""Of an update that is made of one worker's batch."""

_HOLD: Final = 0.5
"""Share of the training after which the learning rate falls, in a line to 0. It makes
the accuracy at the end one of the mode and not of the last few batches."""


def learning_rate(gradients_per_update: int, progress: float) -> float:
    """Of an update from so many gradients, after a share of the training."""
    left = min(1.0, max(0.0, 1 - progress) / (1 - _HOLD))
    return LEARNING_RATE * gradients_per_update * left


def batches(
    sample_count: int, *, batch_size: int, worker_index: int, seed: int
) -> Iterator[torch.Tensor]:
    """Positions of a worker's batches, for ever: passes over all data, shuffled.

    Each worker draws its own, whatever its pace: leases of one order would make the
    workers wait for each other at the end of each epoch, in every mode.
    """
    generator = torch.Generator().manual_seed(1_000 * seed + worker_index)
    while True:
        order = torch.randperm(sample_count, generator=generator)
        whole = sample_count - sample_count % batch_size
        yield from order[:whole].split(batch_size)


class Trainer:
    def __init__(self, conditions: RunConditions, worker_index: int) -> None:
        self._conditions = conditions
        self._worker_index = worker_index
        task = load_task(TASK_NAME)
        model = task.new_model()
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=learning_rate(conditions.gradients_per_update, 0.0),
        )
        self._connection = psworker.connect()
        self._model, self._optimizer = self._connection.prepare(model, optimizer)
        self._criterion = nn.CrossEntropyLoss()
        self._images, self._labels, _ = task.train_set.tensors
        self._batch_size = conditions.batch_size
        self._batches = batches(
            len(self._labels),
            batch_size=conditions.batch_size,
            worker_index=worker_index,
            seed=conditions.seed,
        )
        self._factors = step_factors(
            conditions.load,
            worker_index=worker_index,
            worker_count=conditions.worker_count,
            seed=conditions.seed,
        )

    def run(self) -> None:
        """Trains until all workers together have done enough."""
        while self._progress < 1:
            print(self._step().to_line(), flush=True)
        self._connection.close()

    @property
    def _progress(self) -> float:
        last = self._connection.last_push
        if last is None:
            return 0.0
        if self._conditions.mode.is_synchronous:
            done = self._connection.clock * self._conditions.gradients_per_update
        else:
            done = last.version
        return done / self._conditions.gradient_count

    def _step(self) -> Step:
        began_s = time.monotonic()
        rate = learning_rate(self._conditions.gradients_per_update, self._progress)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * self._conditions.rate_share
        positions = next(self._batches)
        loss = self._criterion(
            self._model(self._images[positions]), self._labels[positions]
        )
        loss.backward()
        attack = self._conditions.attack
        if attack is not None and attack.is_made_by(self._worker_index):
            attack.carry_out(each.grad for each in self._model.parameters())
        computed_s = time.monotonic()
        ready_s = began_s + self._conditions.base_s * next(self._factors)
        time.sleep(max(0.0, ready_s - computed_s))
        pushed_s = time.monotonic()
        self._optimizer.step(weight=self._batch_size)
        self._optimizer.zero_grad()
        last = self._connection.last_push
        assert last is not None, "it was just pushed"
        return Step(
            worker_index=self._worker_index,
            began_s=began_s,
            computed_s=computed_s,
            pushed_s=pushed_s,
            ended_s=time.monotonic(),
            clock=self._connection.clock,
            is_dropped=last.dropped,
            staleness=last.staleness,
        )


if __name__ == "__main__":
    # The processes share the machine's cores as it is.
    torch.set_num_threads(1)
    Trainer(RunConditions.from_argument(sys.argv[1]), int(sys.argv[2])).run()
