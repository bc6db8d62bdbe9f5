"""A parameter server that collects everything, then computes: one line after another.

No shards, no chunks, no bytes. Means and sums are taken with Python's own floats,
element by element, and torch's own optimizer does the step on whole tensors.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Gradient = list[float] | None


@dataclass(frozen=True)
class WholePush:
    """One worker's part of a clock: a gradient for each tensor, or none."""

    worker_id: str
    weight: float
    gradients: tuple[Gradient, ...]


@dataclass(frozen=True, kw_only=True)
class DumbRules:
    """How pushes become one gradient; 0 for what does not matter.

    Attributes:
        rule: `mean`, `median`, `trimmed-mean`, `krum` or `multi-krum`.
        share: That is left out at either end.
        f: Workers that may send anything.
        norm_max: Largest norm of one worker's gradient.
        clips: Whether a larger one is clipped, and not left out.
        clip_grad_norm: Largest norm of what comes out.
    """

    rule: str = "mean"
    share: float = 0.0
    f: int = 0
    norm_max: float = 0.0
    clips: bool = False
    clip_grad_norm: float = 0.0


class DumbServer:
    """Parameters and an optimizer in one place."""

    def __init__(
        self,
        first_values: Sequence[torch.Tensor],
        make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        *,
        adds_up: bool = False,
        rules: DumbRules | None = None,
    ) -> None:
        self._adds_up = adds_up
        self._rules = rules or DumbRules()
        self.parameters = [torch.nn.Parameter(each.clone()) for each in first_values]
        self._optimizer = make_optimizer(self.parameters)

    def step(self, pushes: Sequence[WholePush]) -> None:
        """One clock of all these pushes."""
        counted = [push for push in pushes if push.weight > 0]
        vectors = [self._whole(push) for push in counted]
        limit = self._rules.norm_max
        if limit and not self._rules.clips:
            kept = [place for place, each in enumerate(vectors) if norm(each) <= limit]
            counted = [counted[place] for place in kept]
            vectors = [vectors[place] for place in kept]
        elif limit:
            vectors = [
                [x * min(1.0, limit / (norm(each) + 1e-6)) for x in each]
                for each in vectors
            ]
        if not counted:
            return
        if self._rules.rule in ("krum", "multi-krum"):
            chosen = sorted(self._closest(vectors))
            counted = [counted[place] for place in chosen]
            vectors = [vectors[place] for place in chosen]
        found = self._become_one(vectors, [push.weight for push in counted])
        if limit := self._rules.clip_grad_norm:
            scale = min(1.0, limit / (norm(found) + 1e-6))
            found = [x * scale for x in found]
        for position, parameter in enumerate(self.parameters):
            mine, found = found[: parameter.numel()], found[parameter.numel() :]
            is_present = any(p.gradients[position] is not None for p in counted)
            parameter.grad = (
                torch.tensor(mine, dtype=parameter.dtype) if is_present else None
            )
        self._optimizer.step()

    def _whole(self, push: WholePush) -> list[float]:
        """All of a gradient, with zeros for what is not there."""
        return [
            x
            for gradient, parameter in zip(push.gradients, self.parameters, strict=True)
            for x in (gradient or [0.0] * parameter.numel())
        ]

    def _become_one(
        self, vectors: list[list[float]], weights: list[float]
    ) -> list[float]:
        columns = list(zip(*vectors, strict=True))
        count, rule = len(vectors), self._rules.rule
        if rule == "median":
            return [statistics.median(column) for column in columns]
        if rule == "trimmed-mean":
            out = int(count * self._rules.share)
            return [
                statistics.fmean(sorted(column)[out : count - out])
                for column in columns
            ]
        if rule in ("krum", "multi-krum"):
            return [statistics.fmean(column) for column in columns]
        if self._adds_up:
            return [sum(column) for column in columns]
        total = sum(weights)
        return [
            sum(weight / total * x for weight, x in zip(weights, column, strict=True))
            for column in columns
        ]

    def _closest(self, vectors: list[list[float]]) -> list[int]:
        """The one whose nearest others are closest, or all but f of them."""
        count = len(vectors)
        if count < 3:
            return list(range(count))
        f = min(self._rules.f, (count - 3) // 2)
        scores = []
        for place, one in enumerate(vectors):
            distances = sorted(
                sum((x - y) ** 2 for x, y in zip(one, other, strict=True))
                for other_place, other in enumerate(vectors)
                if other_place != place
            )
            scores.append((sum(distances[: max(1, count - f - 2)]), place))
        taken = 1 if self._rules.rule == "krum" else count - f
        return [place for _, place in sorted(scores)][:taken]


def norm(vector: Sequence[float]) -> float:
    """The L2 norm."""
    return math.sqrt(sum(x * x for x in vector))
