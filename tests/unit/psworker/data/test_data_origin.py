"""Random states as bytes of others: whatever these are, nothing but a refusal comes."""

import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler

from pswire.limits import ORDER_ORIGIN_BYTES_MAX
from psworker.data.origin import (
    OriginInvalidError,
    drawing_from,
    generator_of,
    take_origin,
)


class Owner(Sampler[int]):
    """Draws from whatever there is."""

    def __init__(self, generator: torch.Generator | None, inner: object = None) -> None:
        self.generator = generator
        self.sampler = inner


def _all() -> bytes:
    own = torch.Generator().manual_seed(1)
    return take_origin(Owner(own, RandomSampler(range(4), generator=own)))


def test_what_a_sampler_may_draw_from_is_within_the_limit() -> None:
    torch.randn(1), random.gauss(0, 1), np.random.randn()
    assert 7_000 < len(_all()) <= ORDER_ORIGIN_BYTES_MAX
    assert len(take_origin(RandomSampler(range(4)))) == 9
    assert len(take_origin(WeightedRandomSampler([1.0], 1))) < 5_100


def test_all_that_a_sampler_may_draw_from_is_given_and_taken_back() -> None:
    def numbers(sampler: Any) -> list[float]:  # noqa: ANN401
        return [
            float(torch.rand(())),
            random.random(),
            random.gauss(0, 1),
            float(np.random.randn()),
            *(
                float(torch.rand((), generator=each.generator))
                for each in (sampler, sampler.sampler)
            ),
        ]

    random.gauss(0, 1), np.random.randn()  # each keeps another one for later
    first = Owner(torch.Generator().manual_seed(1), RandomSampler(range(4)))
    origin = take_origin(first)
    expected = numbers(first)
    other = Owner(None, RandomSampler(range(4), generator=torch.Generator()))
    kept = random.getstate(), torch.get_rng_state()
    with drawing_from(origin, other):
        assert numbers(other) == expected
    assert other.generator is None
    assert random.getstate() == kept[0]
    assert torch.equal(torch.get_rng_state(), kept[1])


def _inflated(origin: bytes) -> bytes:
    return zlib.decompress(origin[1:])


_GENERATOR = take_origin(WeightedRandomSampler([1.0], 1))


@pytest.mark.parametrize(
    "origin",
    [
        b"s",
        b"s1234567",
        b"s123456789",
        b"g",
        b"gnonsense",
        b"g" + zlib.compress(b"\0" * 5056),
        b"g" + zlib.compress(_inflated(_GENERATOR)[:-1]),
        b"g" + zlib.compress(_inflated(_GENERATOR) + b"\0"),
        b"g" + zlib.compress(b"\xff" * 5056),
        b"g" + zlib.compress(b"\0" * 10_000_000),
        _GENERATOR[:-9],
    ],
    # The generator's state is another one in each process.
    ids=[
        *("seed of nothing", "seed too short", "seed too long"),
        *("state of nothing", "not compressed", "zeros", "a byte less", "a byte more"),
        *("ones", "too many", "cut off"),
    ],
)
def test_bytes_that_are_no_generator_are_refused(origin: bytes) -> None:
    with pytest.raises(OriginInvalidError, match="Run the same one on all workers"):
        generator_of(origin)


def test_bytes_that_are_no_states_are_refused_wherever_they_are_wrong() -> None:
    data = _inflated(_all())
    kept = random.getstate(), torch.get_rng_state()
    generator_bytes, python_bytes = 5056, 4 * 625 + 9
    place = generator_bytes + 4 * 624  # where Python's stands
    numpy_place = generator_bytes + python_bytes + 4 * 624 + 1
    count = generator_bytes + python_bytes + 4 * 624 + 14
    wrong = [
        data[:cut] for cut in (0, 1, generator_bytes, place, count, len(data) - 1)
    ] + [
        data + b"\0",
        b"\xff" * generator_bytes + data[generator_bytes:],
        data[:place] + b"\xff\xff\xff\xff" + data[place + 4 :],
        data[:numpy_place] + b"\xff\xff\xff\x7f" + data[numpy_place + 4 :],
        data[:count] + b"\xff" + data[count + 1 :],
    ]
    own = torch.Generator().manual_seed(1)
    sampler = Owner(own, RandomSampler(range(4), generator=own))
    for each in wrong:
        with (
            pytest.raises(OriginInvalidError),
            drawing_from(b"a" + zlib.compress(each), sampler),
        ):
            raise AssertionError(f"{len(each)} bytes were taken")
    assert random.getstate() == kept[0]
    assert torch.equal(torch.get_rng_state(), kept[1])


@pytest.mark.parametrize("origin", [b"", b"x123", b"a123"])
def test_what_other_samplers_draw_from_is_no_generator(origin: bytes) -> None:
    assert generator_of(origin) is None


def test_what_other_samplers_draw_from_changes_nothing() -> None:
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    with drawing_from(b"s12345678", Owner(None)):
        assert torch.equal(torch.rand(()), expected)
