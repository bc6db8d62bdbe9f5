"""Downpour SGD: accumulated gradients, and values fetched now and then."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from typing_extensions import override

from psworker.errors import ConfigurationError, refuse_numbers
from psworker.strategies.local_steps import LocalSteps, Outer
from psworker.strategies.pace import STEPS
from psworker.strategies.rounds import Progress
from psworker.strategies.strategy import Tensors


class Downpour(LocalSteps):
    """Downpour SGD, with Adagrad on the shards.

    Of J. Dean and others, "Large scale distributed deep networks", NeurIPS 2012,
    algorithm 7.1. A worker steps by itself with its own gradients, adds them up, and
    pushes the sum after `n_push` steps, for the shards to apply; after `n_fetch` steps
    it takes the shards' values in the place of its own. The paper's worker sends and
    fetches in its first step, too; here both follow the steps that they are of.
    """

    modes: ClassVar[tuple[str, ...]] = ("ssp", "asp")

    def __init__(
        self, n_push: int = 1, n_fetch: int | None = None, outer: Outer | None = None
    ) -> None:
        """Takes the numbers of the paper.

        Args:
            n_push: Steps from a push to the next; the paper's runs have 1.
            n_fetch: Steps from fetching values to the next time, a multiple of
                `n_push`, since values come back with a push; `n_push` by default.
            outer: Makes the shards' optimizer; by default Adagrad of rate 0.01.

        Raises:
            ConfigurationError: A value is out of its range.
        """
        refuse_numbers(STEPS, n_push=n_push)
        super().__init__(n_push, outer)
        fetched_after = n_push if n_fetch is None else n_fetch
        refuse_numbers(STEPS, n_fetch=fetched_after)
        if fetched_after % n_push:
            raise ConfigurationError(
                f"n_fetch={n_fetch!r} is no multiple of n_push={n_push}: values come "
                "back with a push, so give one that is"
            )
        self._pushes_between_fetches = fetched_after // n_push
        self._fetches = True

    @override
    def outer(self, parameters: Tensors) -> torch.optim.Optimizer:
        if self._outer is None:
            return torch.optim.Adagrad(parameters, lr=0.01)
        return self._outer(parameters)

    @override
    def before_step(self, local: Tensors, anchor: Tensors) -> None:
        """Adds up the gradients, in those of the anchor."""
        for own, job in zip(local, anchor, strict=True):
            if own.grad is None:
                continue
            if job.grad is None:
                job.grad = own.grad.detach().clone()
            else:
                job.grad += own.grad

    @override
    def push(
        self, anchor: Tensors, local: Tensors, progress: Progress
    ) -> Sequence[torch.Tensor | None]:
        between = self._pushes_between_fetches
        self._fetches = progress.push_count % between == between - 1
        return [each.grad for each in anchor]

    @override
    def take(self, local: Tensors, anchor: Tensors) -> None:
        if self._fetches:
            super().take(local, anchor)
