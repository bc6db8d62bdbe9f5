"""What a job promises about the samples that it trains on. Pure.

A sample takes part once in each push whose batch has it. What is counted is how often
any sample may have taken part; the accountant's figures for one, two and more times are
part of the job's terms, so that who counts needs no accountant. See docs/privacy.md.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Self

from pswire.clipping import is_clip_norm
from pswire.reasons import ErrorReason, Refusal

PARTICIPATION_COUNT_MAX: Final = 1_000
"""Most participations of a sample that a job may allow: a figure of each is sent."""


_FIGURE_DEVIATION_MAX: Final = 1e-6
"""By how much figures of two machines may differ, in their last bits."""


@dataclass(frozen=True, slots=True)
class Privacy:
    """Differential privacy of each sample of a job's data.

    Attributes:
        noise_multiplier: Standard deviation of the noise in each push, as a multiple of
            `max_grad_norm`.
        max_grad_norm: L2 norm that the gradient of each sample is clipped to.
        delta: Probability that is left out of the bound.
        epsilons: The bound after one participation of a sample, two, and so on. A job
            ends before a sample takes part more often than there are figures.
    """

    noise_multiplier: float
    max_grad_norm: float
    delta: float
    epsilons: tuple[float, ...]

    def check(self) -> None:
        """Checks what a worker sends.

        Raises:
            Refusal: `MALFORMED_MESSAGE`.
        """
        is_increasing = all(
            0 <= before < after
            for before, after in zip(self.epsilons, self.epsilons[1:], strict=False)
        )
        if not (
            is_clip_norm(self.noise_multiplier)
            and is_clip_norm(self.max_grad_norm)
            and 0 < self.delta < 1
            and 0 < len(self.epsilons) <= PARTICIPATION_COUNT_MAX
            and is_increasing
            and 0 <= self.epsilons[0] <= self.epsilons[-1] < math.inf
        ):
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"{str(self)[:128]} with {len(self.epsilons)} figures of epsilon is no "
                "differential privacy",
            )

    @property
    def participation_max(self) -> int:
        """How often a sample may take part."""
        return len(self.epsilons)

    def epsilon_after(self, participation_count: int) -> float:
        """The bound once some sample has taken part so often; 0 before the first."""
        if participation_count <= 0:
            return 0.0
        # A job that returns to a checkpoint may have spent more than it allows.
        if participation_count > len(self.epsilons):
            return math.inf
        return self.epsilons[participation_count - 1]

    def agrees_with(self, other: Self | None) -> bool:
        """Whether two workers promise the same, by accountants of their own."""
        return (
            other is not None
            and replace(self, epsilons=()) == replace(other, epsilons=())
            and len(self.epsilons) == len(other.epsilons)
            and all(
                math.isclose(mine, theirs, rel_tol=_FIGURE_DEVIATION_MAX)
                for mine, theirs in zip(self.epsilons, other.epsilons, strict=True)
            )
        )

    def __str__(self) -> str:
        """What workers must agree on, for people."""
        return (
            f"noise_multiplier={self.noise_multiplier:g}, "
            f"max_grad_norm={self.max_grad_norm:g}, delta={self.delta:g}, at most "
            f"{self.participation_max} participations of a sample, epsilon at most "
            f"{self.epsilons[-1] if self.epsilons else math.nan:.4g}"
        )
