"""How the gradients of a clock become one: rules that tolerate members nobody trusts.

A rule is an entry of `_RULES`. Those that look at whole gradients, and a largest norm
for each of them, need what no shard has alone: each shard measures the products of the
parts that it holds, and what follows from the sums is decided here. Whoever adds them
up, a worker or the coordinator, comes to the same decision, bit by bit.

Sources: coordinate-wise median and trimmed mean, Yin et al., "Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates", ICML 2018. Krum and
Multi-Krum, Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent", NIPS 2017. Radial-directional averaging, Douillard et al., "Decoupled
DiLoCo for Resilient Distributed Pre-training", arXiv 2604.21428, 2026.
"""

import hashlib
import hmac
import math
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, NamedTuple, Self

from pswire.clipping import gradient_scale, norm_of, sum_of_parts
from pswire.limits import GRADIENT_NORM_MAX, WORKER_COUNT_MAX
from pswire.membership import ClockChoice, LabelledEnum

_NUMBER: Final = r"\d+(?:\.\d+)?"


class BadGradientPolicy(LabelledEnum):
    """What becomes of a gradient that is not finite or too large.

    Mirrors `pswire.v1.BadGradientPolicy`.
    """

    SKIP = 1
    REJECT = 2
    CLIP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationRule:
    """What a rule is.

    Attributes:
        summary: What the update is made of, for help.
        takes: Parameters that it takes, without any others.
        needs: Those of them that it can't do without.
        is_weighted: Whether a worker counts by the samples behind its gradient. If
            not, each that has any counts alike: the number is its own word.
        is_coordinatewise: Whether each element is computed by itself, from all workers.
        selects: Whether it takes some gradients whole and leaves out the others, by the
            distances between them.
        is_radial: Whether length and direction are averaged apart.
    """

    summary: str
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    is_weighted: bool = False
    is_coordinatewise: bool = False
    selects: bool = False
    is_radial: bool = False


_RULES: Final = {
    "mean": AggregationRule(summary="the weighted mean", is_weighted=True),
    "radial": AggregationRule(
        summary="the weighted mean of directions, as long as that of the norms",
        is_weighted=True,
        is_radial=True,
    ),
    "median": AggregationRule(
        summary="the median of each element", is_coordinatewise=True
    ),
    "trimmed-mean": AggregationRule(
        summary="the mean of each element without the share at either end",
        takes=("share",),
        needs=("share",),
        is_coordinatewise=True,
    ),
    "krum": AggregationRule(
        summary="the gradient that is closest to the others",
        takes=("f",),
        needs=("f",),
        selects=True,
    ),
    "multi-krum": AggregationRule(
        summary="the mean of the m gradients that are closest to the others",
        takes=("f", "m"),
        needs=("f",),
        selects=True,
    ),
}

EXAMPLES: Final = (
    "mean, radial, median, krum:f=2, multi-krum:f=2 (with m=4 the mean of 4, not of "
    "all but f) or trimmed-mean:0.25"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """A rule with its parameters.

    Attributes:
        name: Name of the rule.
        share: Share of the workers that is left out at either end, for each element.
        f: Workers that may send anything.
        m: Gradients that are taken; 0 for all but f.
    """

    name: str = "mean"
    share: float = 0.0
    f: int = 0
    m: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a rule, such as `trimmed-mean:0.25`.

        Raises:
            ValueError: It is none; the text says what is.
        """
        shown = text[:64]
        name, _, rest = text.partition(":")
        rule = _RULES.get(name)
        if rule is None:
            raise ValueError(f"{shown!r} is no rule of aggregation; say {EXAMPLES}")
        found: dict[str, str] = {}
        for part in rest.split(",") if rest else ():
            key, mark, value = part.partition("=")
            if not mark:
                key, value = "share" if "share" in rule.takes else "f", part
            is_number = re.fullmatch(_NUMBER if key == "share" else r"\d{1,9}", value)
            if key not in rule.takes or key in found or not is_number:
                raise ValueError(
                    f"{shown!r}: {part[:64]!r} says nothing; say {EXAMPLES}"
                )
            found[key] = value
        if missing := [key for key in rule.needs if key not in found]:
            raise ValueError(f"{shown!r} lacks {' and '.join(missing)}; say {EXAMPLES}")
        parsed = cls(
            name=name,
            share=float(found.get("share", 0)),
            f=int(found.get("f", 0)),
            m=int(found.get("m", 0)),
        )
        if problem := parsed._problem:
            raise ValueError(f"{shown!r}: {problem}")
        return parsed

    def __str__(self) -> str:
        """As `parse` reads it."""
        share = f"{Decimal(repr(self.share)):f}"  # all digits, and no exponent
        values = {"share": share, "f": f"f={self.f}", "m": f"m={self.m}"}
        shown = [values[key] for key in self.rule.takes if key != "m" or self.m]
        return ":".join((self.name, ",".join(shown))) if shown else self.name

    @property
    def rule(self) -> AggregationRule:
        """What the rule is."""
        return _RULES[self.name]

    @property
    def is_robust(self) -> bool:
        """Whether it tolerates members that nobody trusts: any but the mean."""
        return not self.rule.is_weighted

    @property
    def members_min(self) -> int:
        """Workers without which it does not tolerate as many as it says."""
        return 2 * self.f + 3 if self.rule.selects else 1

    def trim_count(self, count: int) -> int:
        """Values left out at either end, of so many."""
        # 0.3 of 10 are 3, whatever binary numbers make of it.
        return min(int(self.share * count + 1e-9), (count - 1) // 2)

    def bad_count(self, count: int) -> int:
        """Workers that may send anything, of so many: fewer where there are too few."""
        return max(0, min(self.f, (count - 3) // 2))

    def chosen(self, products: "Products", candidates: Sequence[int]) -> list[int]:
        """Which gradients are taken, in ascending order.

        Args:
            products: Of all gradients.
            candidates: Those that may be taken, in ascending order.
        """
        count = len(candidates)
        if not self.rule.selects or count < 3:
            return list(candidates)
        bad_count = self.bad_count(count)
        near_count = max(1, count - bad_count - 2)
        scores = {
            one: math.fsum(
                sorted(products.distance(one, o) for o in candidates if o != one)[
                    :near_count
                ]
            )
            for one in candidates
        }
        taken = 1 if self.name == "krum" else self.m or count - bad_count
        # Of equals the first by worker id, whichever came first.
        return sorted(sorted(candidates, key=lambda i: (scores[i], i))[:taken])

    def radial_factors(
        self, products: "Products", weights: Mapping[int, float]
    ) -> dict[int, float]:
        """What each gradient is multiplied by before the weighted mean; all 1 for most.

        So that the mean points where the weighted mean of unit vectors does, and its
        norm is the weighted mean of the norms. Where unit vectors cancel out there is
        no direction, and the weighted mean stays what it is.

        Args:
            products: Of all gradients.
            weights: Of those that count.
        """
        norms = {i: math.sqrt(max(0.0, products.of(i, i))) for i in weights}
        total = sum_or_nan([*weights.values()])
        length = sum_or_nan([weights[i] * norms[i] for i in weights])
        units = {i: weights[i] / norms[i] for i in weights if norms[i] > 0}
        spread = math.sqrt(products.square_of_sum(units))
        if not (self.rule.is_radial and spread > UNIT_SUM_MIN * total > 0):
            return dict.fromkeys(weights, 1.0)
        return {i: length / spread / norms[i] if norms[i] else 1.0 for i in weights}

    @property
    def _problem(self) -> str:
        if not self.share < 0.5:
            return "the share left out at either end is below 0.5"
        if "share" in self.rule.takes and not self.share:
            return "a share of 0 leaves out nothing: that is the mean"
        if "f" in self.rule.takes and not 1 <= self.members_min <= WORKER_COUNT_MAX:
            return f"2f + 3 is more than the {WORKER_COUNT_MAX} workers of a job"
        if "f" in self.rule.takes and self.f == 0:
            return "f is at least 1: the workers that may send anything"
        return ""


MEAN: Final = Aggregation()

UNIT_SUM_MIN: Final = 1e-6
"""Share of their number below which the sum of unit vectors is rounding alone."""


class GradientCounts(NamedTuple):
    """Gradients of a worker that did not count as it has sent them.

    Attributes:
        bad: Not finite or too large, and rejected; or their clock was skipped.
        clipped: Scaled to the largest norm.
        left_out: By the rule of aggregation.
    """

    bad: int = 0
    clipped: int = 0
    left_out: int = 0

    def plus(self, factor: float, *, is_left_out: bool = False) -> "GradientCounts":
        """With one more, that was multiplied by this."""
        return GradientCounts(
            self.bad + (factor == 0),
            self.clipped + (0 < factor < 1),
            self.left_out + is_left_out,
        )


NO_COUNTS: Final = GradientCounts()


def rules_that(holds: Callable[[AggregationRule], bool]) -> tuple[str, ...]:
    """Names of the rules that are so, for help and errors."""
    return tuple(name for name, rule in _RULES.items() if holds(rule))


def with_nonfinite(
    values: Sequence[float], count: int, places: Collection[int]
) -> tuple[float, ...]:
    """Products of so many gradients, of which those at some places are not finite."""
    pairs = _pairs(count, has_pairs=len(values) > count)
    return tuple(
        math.nan if one in places or other in places else value
        for value, (one, other) in zip(values, pairs, strict=True)
    )


def _pairs(count: int, *, has_pairs: bool) -> Iterator[tuple[int, int]]:
    """Of which two gradients each product is, in the order of products."""
    for one in range(count):
        for other in range(one, count) if has_pairs else (one,):
            yield one, other


class Products:
    """Inner products of gradients: of each with itself, and maybe with each other.

    Attributes:
        count: Gradients.
    """

    def __init__(self, count: int, values: Sequence[float]) -> None:
        self.count = count
        self._values = values
        self._has_pairs = len(values) > count

    def of(self, one: int, other: int) -> float:
        """The product of two; of two different ones only where pairs were measured."""
        if not self._has_pairs:
            assert one == other
            return self._values[one]
        low, high = sorted((one, other))
        return self._values[low * self.count - low * (low - 1) // 2 + high - low]

    def distance(self, one: int, other: int) -> float:
        """The square of the distance."""
        squares = self.of(one, one) + self.of(other, other)
        return max(0.0, squares - 2 * self.of(one, other))

    def scaled(self, factors: Sequence[float]) -> "Products":
        """Those of the gradients times a factor each."""
        pairs = _pairs(self.count, has_pairs=self._has_pairs)
        values = [self.of(a, b) * factors[a] * factors[b] for a, b in pairs]
        return Products(self.count, values)

    def square_of_sum(self, shares: dict[int, float]) -> float:
        """The square of the norm of a sum, by what each one's share of it is."""
        terms = (
            a * b * self.of(one, other)
            for one, a in shares.items()
            for other, b in shares.items()
        )
        return max(0.0, math.fsum(terms))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRules:
    """How the pushes of a clock become an update.

    Attributes:
        clip_grad_norm: Norm that the aggregate is clipped to, 0 for no clipping.
        gradient_norm_max: Largest norm of the gradient of one worker, 0 for any.
        bad_gradients: What becomes of a gradient that is larger, or not finite.
        aggregation: What is made of the others.
    """

    clip_grad_norm: float = 0.0
    gradient_norm_max: float = 0.0
    bad_gradients: BadGradientPolicy = BadGradientPolicy.SKIP
    aggregation: Aggregation = MEAN

    @property
    def measures_each(self) -> bool:
        """Whether the gradient of each worker is measured, and not their aggregate."""
        rule = self.aggregation.rule
        return self.gradient_norm_max > 0 or rule.selects or rule.is_radial

    @property
    def measures_pairs(self) -> bool:
        """Whether that includes how the gradients lie to each other."""
        rule = self.aggregation.rule
        return (rule.selects or rule.is_radial) or (
            self.measures_each and self.clip_grad_norm > 0
        )

    @property
    def is_measured(self) -> bool:
        """Whether a clock can't be applied before every shard has measured its part."""
        return self.measures_each or self.clip_grad_norm > 0

    @property
    def skips_bad(self) -> bool:
        """Whether a bad gradient skips its clock; else the others go on without it."""
        return self.bad_gradients is BadGradientPolicy.SKIP

    def product_count(self, worker_count: int) -> int:
        """Products that a shard measures of so many workers' gradients."""
        if self.measures_pairs:
            return worker_count * (worker_count + 1) // 2
        return worker_count * self.measures_each

    def decided(self, parts: Sequence[ClockChoice]) -> ClockChoice:
        """What a clock consists of, from what all shards have measured of it.

        Args:
            parts: What each shard says of the same clock with the same workers, in the
                order of shards.
        """
        first = parts[0]
        clock = ClockChoice(first.clock, first.workers)
        if not first.weights:
            return self._clipped(clock, sum_of_parts(p.sum_of_squares for p in parts))
        products = Products(
            len(first.workers),
            [
                sum_or_nan(each)
                for each in zip(*(p.products for p in parts), strict=True)
            ],
        )
        # Who has told shards different weights counts for nothing.
        weights = [
            each[0] if len(set(each)) == 1 else math.nan
            for each in zip(*(part.weights for part in parts), strict=True)
        ]
        factors = [
            self._factor(weight, products.of(place, place))
            for place, weight in enumerate(weights)
        ]
        clock = clock._replace(factors=tuple(factors))
        candidates = [
            i for i, weight in enumerate(weights) if weight > 0 and factors[i]
        ]
        products = products.scaled(factors)
        chosen = self.aggregation.chosen(products, candidates)
        clock = clock._replace(left_out=tuple(sorted({*candidates} - {*chosen})))
        if self.aggregation.rule.is_radial:
            radial = self.aggregation.radial_factors(
                products, {place: weights[place] for place in chosen}
            )
            own = [radial.get(place, 1.0) for place in range(len(weights))]
            products = products.scaled(own)
            made = (a * b for a, b in zip(factors, own, strict=True))
            clock = clock._replace(factors=tuple(made))
        if not self.clip_grad_norm:
            return clock
        shares = {
            i: weights[i] if self.aggregation.rule.is_weighted else 1.0 for i in chosen
        }
        total = sum_or_nan([*shares.values()])
        shares = {place: share / total for place, share in shares.items()}
        return self._clipped(clock, products.square_of_sum(shares))

    def is_bad_alone(self, norm: float) -> bool:
        """Whether a push of SSP and ASP with a gradient of this norm is skipped."""
        is_clipped = self.bad_gradients is BadGradientPolicy.CLIP
        return not is_clipped and 0 < self.gradient_norm_max < norm

    def limit_alone(self, norm: float) -> float:
        """By what a push of SSP and ASP is scaled to the largest norm."""
        return gradient_scale(norm, self.gradient_norm_max)

    def scale_alone(self, norm: float) -> float:
        """What the gradient of a push of SSP and ASP is multiplied by."""
        return min(gradient_scale(norm, self.clip_grad_norm), self.limit_alone(norm))

    def _factor(self, weight: float, square: float) -> float:
        """What a worker's gradient is multiplied by; 0 if it does not count."""
        if weight == 0:
            return 1.0
        is_number = weight > 0 and 0 <= square < math.inf
        norm = norm_of(square) if is_number else math.inf
        if norm > GRADIENT_NORM_MAX:
            return 0.0
        limit = self.gradient_norm_max
        if not limit or norm <= limit:
            return 1.0
        is_clipped = self.bad_gradients is BadGradientPolicy.CLIP
        return gradient_scale(norm, limit) if is_clipped else 0.0

    def _clipped(self, clock: ClockChoice, sum_of_squares: float) -> ClockChoice:
        return clock._replace(
            sum_of_squares=sum_of_squares,
            gradient_scale=gradient_scale(norm_of(sum_of_squares), self.clip_grad_norm),
        )


def sum_or_nan(values: Sequence[float]) -> float:
    """The sum, not a number where one of them is infinite or none, or the sum is."""
    if not all(map(math.isfinite, values)):
        return math.nan
    try:
        return math.fsum(values)
    except OverflowError:  # each is a float64, as a bad worker may choose it
        return math.nan


def proof_of(key: bytes, shard_index: int, part: ClockChoice) -> bytes:
    """Shows that a shard has said this: workers carry it, and know no key.

    Args:
        key: Known to the job's shards and its coordinator.
        shard_index: The shard.
        part: What it has measured of a clock.
    """
    workers = "".join(
        f"{len(w.worker_id)}:{w.worker_id}{w.incarnation}," for w in part.workers
    )
    numbers = (part.sum_of_squares, *part.weights, *part.products)
    # With both counts nothing can be read in two ways: whoever chooses a worker's id
    # could else have its bytes taken for a number, and be left out.
    counts = f"{len(part.workers)} {len(part.weights)}"
    head = f"{shard_index} {part.clock} {counts} {workers}"
    data = head.encode() + struct.pack(f"<{len(numbers)}d", *numbers)
    return hmac.digest(key, data, hashlib.sha256)
