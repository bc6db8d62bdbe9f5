"""Rules of aggregation: how they are written, and what follows from measures."""

import math
import struct
from collections.abc import Sequence

import pytest
import torch

from pswire.aggregation import (
    Aggregation,
    BadGradientPolicy,
    Products,
    UpdateRules,
    proof_of,
    sum_or_nan,
    with_nonfinite,
)
from pswire.membership import ClockChoice, WorkerKey

Vector = Sequence[float]


def part(vectors: Sequence[Vector], weights: Sequence[float] = ()) -> ClockChoice:
    """What a shard measures of the parts that it holds of some gradients."""
    count = len(vectors)
    return ClockChoice(
        1,
        tuple(WorkerKey(f"w{index}", 1) for index in range(count)),
        weights=tuple(weights or [1.0] * count),
        products=tuple(
            math.fsum(x * y for x, y in zip(vectors[one], vectors[other], strict=True))
            for one in range(count)
            for other in range(one, count)
        ),
    )


def taken(rules: UpdateRules, *parts: ClockChoice) -> list[int]:
    found = rules.decided(parts)
    bad = {place for place, factor in enumerate(found.factors) if not factor}
    return [i for i in range(len(found.workers)) if i not in {*bad, *found.left_out}]


def rules_of(text: str, **others: float) -> UpdateRules:
    policy = BadGradientPolicy.REJECT
    return UpdateRules(
        aggregation=Aggregation.parse(text), bad_gradients=policy, **others
    )


KRUM = rules_of("krum:f=1")
MULTI_KRUM = rules_of("multi-krum:f=1")


# Written


@pytest.mark.parametrize(
    "text",
    ["mean", "radial", "median", "trimmed-mean:0.25", "krum:f=2", "multi-krum:f=2,m=4"],
)
def test_a_rule_is_read_as_it_is_written(text: str) -> None:
    assert str(Aggregation.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is no rule"),
        ("average", "is no rule"),
        ("mean:2", "says nothing"),
        ("trimmed-mean", "lacks share"),
        ("trimmed-mean:0.5", "below 0.5"),
        ("trimmed-mean:0", "leaves out nothing"),
        ("trimmed-mean:nan", "says nothing"),
        ("trimmed-mean:-0.1", "says nothing"),
        ("krum", "lacks f"),
        ("krum:f=0", "f is at least 1"),
        ("krum:f=2,m=3", "says nothing"),
        ("krum:f=1,f=2", "says nothing"),
        ("krum:f=999999999", "more than the 1000000 workers"),
        ("multi-krum:m=2", "lacks f"),
    ],
)
def test_another_text_is_refused_with_what_is_allowed(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Aggregation.parse(text)


# Radial

VECTORS = [[3.0, 0.0, 4.0], [0.0, 0.5, 0.0], [-1.0, 2.0, 2.0]]
WEIGHTS = [2.0, 1.0, 5.0]


def radial_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> torch.Tensor:
    """As the paper has it: norms and unit vectors are averaged apart."""
    pushed, shares = torch.tensor(vectors).double(), torch.tensor(weights).double()
    shares = (shares / shares.sum()).unsqueeze(1)
    norms = pushed.norm(dim=1, keepdim=True)
    units = torch.where(norms > 0, pushed / norms, pushed)
    direction = (shares * units).sum(0)
    length = float((shares * norms).sum())
    return direction * (length / float(direction.norm()))


@pytest.mark.parametrize("clip", [0.0, 1.5])
@pytest.mark.parametrize("extra", [[], [[0.0, 0.0, 0.0]]])
def test_radial_averages_length_and_direction_apart(
    clip: float, extra: list[Vector]
) -> None:
    vectors, weights = [*VECTORS, *extra], [*WEIGHTS, 3.0][: 3 + len(extra)]
    rules = rules_of("radial", clip_grad_norm=clip)
    halves = [[v[:1] for v in vectors], [v[1:] for v in vectors]]
    found = rules.decided([part(half, weights) for half in halves])
    shares = torch.tensor(weights).double() / sum(weights) * torch.tensor(found.factors)
    mean = (shares.unsqueeze(1) * torch.tensor(vectors)).sum(0)
    wanted = radial_mean(vectors, weights)
    torch.testing.assert_close(mean, wanted)
    if clip:
        assert found.sum_of_squares == pytest.approx(float(wanted.norm() ** 2))
        assert found.gradient_scale == pytest.approx(1.5 / float(wanted.norm()), 1e-3)


def test_radial_is_the_mean_of_one_and_where_directions_cancel_out() -> None:
    rules = rules_of("radial")
    assert rules.decided([part([[3.0, 4.0]], [7.0])]).factors == pytest.approx((1.0,))
    opposite = part([[1.0, 0.0], [-2.0, 0.0]])
    assert rules.decided([opposite]).factors == (1.0, 1.0)


# Chosen


def test_distances_are_summed_over_all_shards() -> None:
    # On the first shard alone the last one would be the closest.
    first = part([[0.0], [1.0], [2.0], [1.0], [1.0]])
    other = part([[1.0], [1.0], [1.0], [1.0], [-90.0]])

    assert taken(KRUM, first, other) == [1]
    assert taken(MULTI_KRUM, first, other) == [0, 1, 2, 3]


def test_multi_krum_leaves_out_f() -> None:
    vectors = [[0.0], [0.1], [0.2], [0.3], [0.4], [9.0], [-9.0]]

    assert taken(rules_of("multi-krum:f=2"), part(vectors)) == [0, 1, 2, 3, 4]
    assert taken(rules_of("multi-krum:f=2,m=2"), part(vectors)) == [1, 2]


def test_of_equals_the_first_is_taken() -> None:
    vectors = [[1.0], [1.0], [1.0], [1.0], [1.0]]

    assert taken(KRUM, part(vectors)) == [0]
    assert taken(MULTI_KRUM, part(vectors)) == [0, 1, 2, 3]


def test_with_fewer_than_2f_and_3_it_bears_fewer_bad_ones() -> None:
    six = [[0.0], [0.1], [0.2], [0.3], [9.0], [-9.0]]

    assert len(taken(rules_of("multi-krum:f=2"), part(six))) == 5
    assert taken(rules_of("krum:f=2"), part([[0.0], [1.0], [1.0]])) == [1]
    assert taken(rules_of("krum:f=2"), part([[0.0], [9.0]])) == [0, 1]


def test_who_has_no_weight_is_no_neighbour() -> None:
    vectors = [[0.0], [5.0], [5.0], [0.5], [0.6], [0.4], [0.5]]

    assert taken(KRUM, part(vectors, [1, 0, 0, 1, 1, 1, 1])) == [1, 2, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e37])
def test_what_is_not_finite_counts_for_nothing(bad: float) -> None:
    vectors = [[0.0], [0.1], [0.2], [0.3], [0.4], [0.5]]
    measured = part(vectors)
    values = list(with_nonfinite(measured.products, 6, {2}))
    values[11] = bad  # of the third with itself

    assert 2 not in taken(MULTI_KRUM, measured._replace(products=tuple(values)))


def test_who_names_shards_different_weights_counts_for_nothing() -> None:
    vectors = [[0.0], [0.1], [0.2], [0.3], [0.4], [0.5]]
    parts = part(vectors, [1, 1, 1, 0, 1, 1]), part(vectors)

    found = MULTI_KRUM.decided(parts)

    assert [place for place, factor in enumerate(found.factors) if not factor] == [3]


# Limited


def test_a_norm_over_the_limit_is_rejected_or_clipped() -> None:
    parts = part([[3.0], [0.5], [0.0]]), part([[4.0], [0.0], [0.0]])
    limited = UpdateRules(gradient_norm_max=1.0, bad_gradients=BadGradientPolicy.REJECT)
    clipped = UpdateRules(gradient_norm_max=1.0, bad_gradients=BadGradientPolicy.CLIP)

    assert limited.decided(parts).factors == (0.0, 1.0, 1.0)
    assert limited.decided(parts).bad_workers() == {WorkerKey("w0", 1)}
    factor, *others = clipped.decided(parts).factors
    assert factor == pytest.approx(0.2)
    assert others == [1.0, 1.0]


def test_the_norm_that_is_clipped_is_that_of_what_is_applied() -> None:
    rules = rules_of("mean", clip_grad_norm=1.0, gradient_norm_max=6.0)
    found = rules.decided([part([[3.0], [1.0], [99.0]], [3.0, 1.0, 1.0])])

    assert math.sqrt(found.sum_of_squares) == pytest.approx(2.5)
    assert found.gradient_scale == pytest.approx(0.4)


def test_products_are_found_from_either_side() -> None:
    products = Products(3, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))

    assert [[products.of(a, b) for a in range(3)] for b in range(3)] == [
        [1.0, 2.0, 3.0],
        [2.0, 4.0, 5.0],
        [3.0, 5.0, 6.0],
    ]
    assert products.distance(0, 2) == 1.0


def test_a_proof_is_of_one_shard_one_clock_and_one_key() -> None:
    measured = part([[1.0], [2.0]])
    proofs = {
        proof_of(b"key", 0, measured),
        proof_of(b"other", 0, measured),
        proof_of(b"key", 1, measured),
        proof_of(b"key", 0, measured._replace(clock=2)),
        proof_of(b"key", 0, measured._replace(workers=measured.workers[::-1])),
        proof_of(b"key", 0, measured._replace(sum_of_squares=1.0)),
        proof_of(
            b"key",
            0,
            measured._replace(
                weights=measured.weights + measured.products[:1],
                products=measured.products[1:],
            ),
        ),
    }
    assert len(proofs) == 7


def test_no_worker_can_pass_for_a_number_in_a_proof() -> None:
    """Whatever id it has chosen: its bytes are those of a sum of squares here."""
    both = WorkerKey("aaaa", 1), WorkerKey("bbbb", 1)
    measured = ClockChoice(1, both, sum_of_squares=9.0)
    (passed,) = struct.unpack("<d", b"4:bbbb1,")
    forged = ClockChoice(1, both[:1], sum_of_squares=passed, products=(9.0,))
    assert proof_of(b"key", 0, forged) != proof_of(b"key", 0, measured)


def test_a_sum_beyond_all_numbers_excludes_its_worker_and_ends_nothing() -> None:
    """As of gradients in float64, on two shards or in two chunks of one."""
    huge = [[1e154], [1.0], [1.0], [1.0], [1.0]]
    parts = [part(huge)] * 2
    largest = [each.products[0] for each in parts]
    assert all(map(math.isfinite, largest))
    assert math.isnan(sum_or_nan([each * 1.7 for each in largest]))
    parts = [each._replace(products=(1.7e308, *each.products[1:])) for each in parts]
    assert taken(rules_of("multi-krum:f=1"), *parts) == [1, 2, 3, 4]


def test_weights_beyond_all_numbers_end_nothing() -> None:
    measured = part([[1.0], [1.0], [1.0]], weights=[1.7e308, 1.7e308, 1.0])
    rules = UpdateRules(
        gradient_norm_max=2.0,
        clip_grad_norm=1.0,
        bad_gradients=BadGradientPolicy.REJECT,
    )
    assert rules.decided([measured]).gradient_scale == 1.0
