"""Elastic averaging: workers keep their own values, which a force draws together."""

from typing import ClassVar, Final

import torch
from typing_extensions import override

from pswire.number_range import NumberRange
from psworker.errors import refuse_numbers
from psworker.strategies.local_steps import LocalSteps
from psworker.strategies.pace import Every, Pace
from psworker.strategies.rounds import Progress
from psworker.strategies.strategy import Tensors

_BETA: Final = NumberRange(
    0.0, 1.0, why="by more the anchor would pass the workers' mean", is_above=True
)


class EASGD(LocalSteps):
    """Elastic averaging SGD, in step.

    Of S. Zhang, A. Choromanska and Y. LeCun, "Deep learning with Elastic Averaging
    SGD", NeurIPS 2015, equations 3 and 4. A worker never takes the anchor's values.
    In each round a force draws it towards the anchor by `alpha` times their
    difference, and the anchor towards the mean of the workers by `beta`, which is
    `alpha` times the number of workers. The anchor is what snapshots and checkpoints
    have; the paper evaluates it too. With momentum in the inner optimizer it is the
    paper's EAMSGD.

    The paper takes the gradient of a step before the exchange, from values to which
    the force was not applied yet; here, as in the authors' own program, after it.
    """

    modes: ClassVar[tuple[str, ...]] = ("bsp",)

    def __init__(self, every: Every | Pace = 10, *, beta: float = 0.9) -> None:
        """Takes the numbers of the paper.

        Args:
            every: Local steps of a round (tau).
            beta: How far the anchor moves towards the mean of the workers in a round,
                in 0 to 1. `alpha` is `beta` over the number of workers that there are,
                so that the force is the same both ways whoever joins or leaves.

        Raises:
            ConfigurationError: A value is out of its range.
        """
        super().__init__(every)
        refuse_numbers(_BETA, beta=beta)
        self.beta = beta
        # Of a push that is not taken yet: the difference, alpha, and what tells whether
        # the worker's values are those that it is of.
        self._force: tuple[tuple[torch.Tensor, ...], float, list[int]] = ((), 0.0, [])

    def alpha(self, progress: Progress) -> float:
        """The moving rate: share of the difference by which this worker moves."""
        return self.beta / progress.worker_count

    @override
    def push(self, anchor: Tensors, local: Tensors, progress: Progress) -> Tensors:
        difference = torch._foreach_sub(list(anchor), list(local))
        self._force = difference, self.alpha(progress), _versions(local)
        return torch._foreach_mul(difference, self._share(progress))

    def _share(self, progress: Progress) -> float:
        """Of its difference to a worker, by how much the anchor moves."""
        return self.beta

    @override
    def weight(self, progress: Progress) -> float:
        return 1.0 if progress.step_count else 0.0

    @override
    def take(self, local: Tensors, anchor: Tensors) -> None:
        """A worker keeps its own values, moved by the force of what it has pushed.

        Once for each push: who has moved has other versions than when it pushed.
        """
        difference, alpha, versions = self._force
        if difference and versions == _versions(local):
            torch._foreach_add_(list(local), difference, alpha=alpha)
        self._force = (), 0.0, []


def _versions(tensors: Tensors) -> list[int]:
    return [each._version for each in tensors]


class AsynchronousEASGD(EASGD):
    """Elastic averaging SGD, each worker on a clock of its own.

    The paper's algorithm 1: a worker pulls the anchor, and both move by `alpha` times
    the difference between them.
    """

    pulls_first = True
    modes: ClassVar[tuple[str, ...]] = ("ssp", "asp")

    @override
    def _share(self, progress: Progress) -> float:
        return self.alpha(progress)
