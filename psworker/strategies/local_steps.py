"""Local steps and a mean: in general, as model averaging, and after a start in step."""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from typing_extensions import override

from pswire.limits import NUMBER_MAX
from pswire.number_range import NumberRange
from psworker.errors import ConfigurationError, refuse_numbers
from psworker.strategies.pace import Every, Pace, pace_of
from psworker.strategies.rounds import Progress
from psworker.strategies.strategy import InnerState, Strategy, Tensors

Outer = Callable[[Tensors], torch.optim.Optimizer]


class LocalSteps(Strategy):
    """Pushes the difference from the anchor after every so many local steps."""

    modes: ClassVar[tuple[str, ...]] = ("bsp", "ssp", "asp", "quorum")

    def __init__(
        self,
        every: Every | Pace,
        outer: Outer | None = None,
        *,
        inner_state: InnerState = "keep",
    ) -> None:
        """Takes the length of a round.

        Args:
            every: Local steps of a round: a number, `Growing(...)` for more and more,
                or `ShareOfTime(0.1)` for so many that traffic takes at most that share
                of the time.
            outer: Makes the outer optimizer of the parameters of a fragment, as in
                `lambda parameters: torch.optim.SGD(parameters, lr=0.7)`; by default
                SGD of rate 1, so that the workers' values are averaged.
            inner_state: What becomes of the inner optimizer's state at each round:
                `"keep"`, `"reset"` or `"average"`.

        Raises:
            ConfigurationError: `every` is no number of local steps, or `outer` makes
                no optimizer.
        """
        given: object = outer
        if given is not None and not callable(given):
            is_made = isinstance(given, torch.optim.Optimizer)
            shown = f"{type(given).__name__}(...)" if is_made else repr(given)
            raise ConfigurationError(
                f"outer={shown} makes no optimizer: give what does, such as "
                "lambda parameters: torch.optim.SGD(parameters, lr=0.7)"
            )
        self.pace = pace_of(every)
        self.inner_state = inner_state
        self._outer = outer
        self._chosen_after = 0  # so many pushes

    @override
    def outer(self, parameters: Tensors) -> torch.optim.Optimizer:
        if self._outer is None:
            return super().outer(parameters)
        return self._outer(parameters)

    @override
    def is_due(self, progress: Progress) -> bool:
        count, steps = self.fragment_count, self.round_step_count
        if steps is None or progress.push_count != self._chosen_after:
            self._chosen_after = progress.push_count
            steps = self.pace.step_count(steps, progress, count)
            self.round_step_count = steps
        # Each fragment is pushed once in a round, the same number of steps apart.
        place = (progress.clock - 1) % count
        last, due = (math.ceil(each * steps / count) for each in (place, place + 1))
        return progress.steps_since_push >= due - last


class ModelAveraging(LocalSteps):
    """The mean of the workers' models after every so many local steps: local SGD.

    Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767. Rounds
    of 8 steps are in the middle of what Lin et al., arXiv 1808.07217, have tried.
    """

    def __init__(
        self, every: Every | Pace = 8, *, inner_state: InnerState = "keep"
    ) -> None:
        """Takes the length of a round and what becomes of inner state.

        Both are as of `LocalSteps`.
        """
        super().__init__(every, inner_state=inner_state)


class PostLocalSGD(ModelAveraging):
    """In step at first, and local steps from then on.

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217: steps
    are synchronous until the learning rate decays for the first time, and rounds have
    16 steps after it. With SGD, with momentum or not, a mean of models after each step
    is a step with the mean of the gradients.
    """

    def __init__(
        self,
        first_steps: int,
        every: Every | Pace = 16,
        *,
        inner_state: InnerState = "keep",
    ) -> None:
        """Takes when rounds begin.

        Args:
            first_steps: Steps of the job, its clocks, that are made in step.
            every: Local steps of a round after these.
            inner_state: As of `LocalSteps`.

        Raises:
            ConfigurationError: One of the two is no number of steps.
        """
        super().__init__(every, inner_state=inner_state)
        refuse_numbers(NumberRange(0, NUMBER_MAX), first_steps=first_steps)
        self.first_steps = first_steps

    @override
    def is_due(self, progress: Progress) -> bool:
        return progress.clock <= self.first_steps or super().is_due(progress)
