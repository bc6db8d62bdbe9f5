"""What is done about the delay of a push in SSP and ASP.

The values have gone on between the moment a worker was sent them and the moment its
gradient is applied. Two remedies, each opt-in:

- The learning rate of the push is divided by its staleness. Source: Zhang, Gupta,
  Lian and Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016.
- The gradient `g`, computed at `w_pulled`, is replaced by
  `g + strength * g * g * (w_now - w_pulled)`, the first-order guess of the gradient at
  `w_now` with the square of `g` for the diagonal of the Hessian. Source: Zheng et al.,
  "Asynchronous Stochastic Gradient Descent with Delay Compensation" (DC-ASGD), ICML
  2017.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from pswire.schema import OptimizerSpec

LEARNING_RATE: Final = "lr"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayRules:
    """Fixed for the life of a job.

    Attributes:
        is_rate_scaled: Whether the learning rate is divided by the staleness.
        compensation: Strength of the compensation, 0 for none.
    """

    is_rate_scaled: bool = False
    compensation: float = 0.0


def scaled_rates(
    spec: OptimizerSpec, hyperparameters: Sequence[Sequence[float]], staleness: int
) -> tuple[tuple[float, ...], ...]:
    """Hyperparameters of each group with the learning rate of a stale push.

    Args:
        spec: The optimizer.
        hyperparameters: Values of each group.
        staleness: Of the push, in updates. Up to 1 it changes nothing.
    """
    divisor = max(1, staleness)
    return tuple(
        tuple(
            value / divisor if name == LEARNING_RATE else value
            for name, value in zip(spec.hyperparameter_names, values, strict=True)
        )
        for values in hyperparameters
    )


def compensated(
    gradient: torch.Tensor, now: torch.Tensor, pulled: torch.Tensor, strength: float
) -> torch.Tensor:
    """The gradient as it would about be at the values of now.

    Args:
        gradient: Computed at `pulled`, 1-D; only read.
        now: Values that it will be applied to, of the gradient's type.
        pulled: Values that the worker was sent; of 16 bits where `now` are masters.
        strength: Of the compensation.
    """
    drift = now - pulled.to(now.dtype)
    return gradient.addcmul(gradient.square(), drift, value=strength)
