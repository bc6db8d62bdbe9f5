"""Runs a training script as one process, on the batches of a job.

    python one_process.py SEEDS forward|reversed SCRIPT ARGUMENTS...

A job shuffles each epoch by a seed that the coordinator deals, so that all workers draw
the same order. Here the samplers of the script, whatever it is, draw from those seeds
too, and with `-` for SEEDS as the script has it. `reversed` turns each batch around: so
the same samples come in another order, which shows what the order of additions alone
does to the losses of one process.
"""

import runpy
import sys
from collections.abc import Iterator
from itertools import count

import torch
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler


def draw_as_a_job(kind: type[RandomSampler | WeightedRandomSampler]) -> None:
    """Makes samplers of this class draw epoch after epoch from the job's seeds."""
    draw = kind.__iter__

    def drawn(self: RandomSampler | WeightedRandomSampler) -> Iterator[int]:
        epoch = next(self.__dict__.setdefault("epochs", count()))
        self.generator = torch.Generator().manual_seed(SEEDS[epoch])
        return draw(self)  # type: ignore[arg-type]

    kind.__iter__ = drawn  # type: ignore[method-assign]


def turn_batches_around() -> None:
    batches = BatchSampler.__iter__

    def turned(self: BatchSampler) -> Iterator[list[int]]:
        for batch in batches(self):
            yield batch[::-1]

    BatchSampler.__iter__ = turned  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] != "-":
        SEEDS = [int(seed) for seed in sys.argv[1].split(",")]
        draw_as_a_job(RandomSampler)
        draw_as_a_job(WeightedRandomSampler)
    if sys.argv[2] == "reversed":
        turn_batches_around()
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
