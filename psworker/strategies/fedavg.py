"""Federated averaging: in each round a part of the workers trains by itself."""

import hashlib
from typing import ClassVar, Final

import torch
from typing_extensions import override

from pswire.limits import NUMBER_MAX
from pswire.number_range import NumberRange
from psworker.errors import refuse_numbers
from psworker.strategies.local_steps import LocalSteps
from psworker.strategies.pace import Every, Pace
from psworker.strategies.strategy import Tensors, Turn

_FRACTION: Final = NumberRange(
    0.0,
    1.0,
    why="it is a share of the workers, of whom at least one trains",
    is_above=True,
)


class FedAvg(LocalSteps):
    """FederatedAveraging.

    Of B. McMahan and others, "Communication-efficient learning of deep networks from
    decentralized data", AISTATS 2017, algorithm 1. In each round a share of the
    workers, drawn anew, trains from the anchor for some steps by itself. The anchor
    becomes the mean of their values, each weighted by its samples. The others wait,
    and take the new anchor.
    """

    shared: ClassVar[tuple[str, ...]] = (*LocalSteps.shared, "fraction", "seed")
    modes: ClassVar[tuple[str, ...]] = ("bsp",)

    def __init__(
        self, every: Every | Pace, *, fraction: float = 0.1, seed: int = 0
    ) -> None:
        """Takes the numbers of the paper.

        Args:
            every: Local steps of a round. E epochs are E times the batches of this
                worker's data; workers may have different ones.
            fraction: Share of the workers that trains in a round (C), above 0 and at
                most 1; at least one of them trains.
            seed: Of the choice; the same on all workers.

        Raises:
            ConfigurationError: A value is out of its range.
        """
        super().__init__(every)
        refuse_numbers(_FRACTION, fraction=fraction)
        refuse_numbers(NumberRange(0, NUMBER_MAX), seed=seed)
        self.fraction = fraction
        self.seed = seed

    @override
    def takes_part(self, turn: Turn) -> bool:
        chosen_count = max(1, round(self.fraction * turn.worker_count))
        # By a digest, and not by a generator of random numbers: those of another
        # release of Python may draw others, and all workers must agree.
        drawn = sorted(
            range(turn.worker_count),
            key=lambda place: hashlib.sha256(
                b"%d/%d/%d" % (self.seed, turn.clock, place)
            ).digest(),
        )
        return turn.place in drawn[:chosen_count]


class FedProx(FedAvg):
    """FedAvg with a proximal term, for workers whose data differ.

    Of T. Li and others, "Federated optimization in heterogeneous networks", MLSys
    2020, algorithm 2. Each local loss has `mu / 2` times the squared distance from the
    anchor more, which holds a worker back from its own data's optimum.
    """

    def __init__(
        self, every: Every | Pace, *, mu: float, fraction: float = 0.1, seed: int = 0
    ) -> None:
        """Takes the numbers of FedAvg, and those of the paper.

        Args:
            every: Local steps of a round.
            mu: Weight of the term; the paper tries 0.001, 0.01, 0.1 and 1.
            fraction: Share of the workers that trains in a round.
            seed: Of the choice.

        Raises:
            ConfigurationError: A value is out of its range.
        """
        super().__init__(every, fraction=fraction, seed=seed)
        refuse_numbers(NumberRange(0.0, 1e6), mu=mu)
        self.mu = mu

    @override
    def before_step(self, local: Tensors, anchor: Tensors) -> None:
        """Adds the gradient of the term."""
        for own, job in zip(local, anchor, strict=True):
            if own.grad is None:
                continue
            if own.grad.is_sparse:  # the term has all rows
                own.grad = torch.add((own - job).mul_(self.mu), own.grad)
            else:
                own.grad.add_(own - job, alpha=self.mu)
