"""Encodings of fewer bytes: how far off, how many bytes, and hostile bytes."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pswire.compression import Compression
from pswire.encodings import int8, onebit
from pswire.encodings.codec import Codec
from pswire.encodings.known import BY_NUMBER, ENCODINGS, Encoding
from pswire.encodings.topk import TopK
from pswire.reasons import ErrorReason, Refusal
from tests.refusals import refused

checked = settings(derandomize=True, deadline=None, max_examples=25)

all_encodings = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)

seeds = st.one_of(st.none(), st.integers(0, 2**64 - 1))


@st.composite
def elements(draw: st.DrawFn) -> torch.Tensor:
    """Of all sizes from 2^-140 to 2^100, with zeros and runs of unlike sizes."""
    count = draw(st.integers(0, 2500))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(count, generator=generator)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, count))
        values[start:] *= 2.0 ** draw(st.integers(-120, 100))
        if draw(st.booleans()):
            values[start : start + draw(st.integers(0, 300))] = 0.0
    return values.clamp(-(2.0**100), 2.0**100)


def round_trip(
    codec: Codec, values: torch.Tensor, seed: int | None = None
) -> torch.Tensor:
    return codec.decode(memoryview(codec.encode(values, seed=seed)), values.numel())


def blockwise(values: torch.Tensor, block: int) -> list[torch.Tensor]:
    return list(values.split(block)) if values.numel() else []


@all_encodings
@checked
@given(values=elements(), seed=seeds, ratio=st.floats(0.001, 0.5))
def test_sizes_are_as_the_formula_says_and_a_repeat_makes_the_same_bytes(
    encoding: Encoding, values: torch.Tensor, seed: int | None, ratio: float
) -> None:
    codec = encoding.codec(ratio)
    before = values.clone()

    data = codec.encode(values, seed=seed)

    byte_count = codec.byte_count(values.numel())
    assert len(data) == byte_count or (
        encoding is ENCODINGS["topk"] and (values == 0).any()
    )
    assert len(data) <= byte_count
    assert codec.encode(values, seed=seed) == data
    assert torch.equal(values, before)
    decoded = codec.decode(memoryview(data), values.numel())
    assert decoded.dtype is torch.float32
    assert decoded.shape == values.shape


@pytest.mark.parametrize(
    ("encoding", "byte_count"),
    [
        (ENCODINGS["bf16"], 2_000_000),
        (ENCODINGS["fp16"], 2_000_004),
        (ENCODINGS["int8"], 1_000_000 + 4 * 3907),
        (ENCODINGS["topk"], 4 * 16 + 6 * 10_000),
        (ENCODINGS["onebit"], 125_000 + 4 * 977),
    ],
)
def test_a_million_elements_take(encoding: Encoding, byte_count: int) -> None:
    assert encoding.codec().byte_count(1_000_000) == byte_count


@checked
@given(values=elements())
def test_bf16_is_off_by_half_a_unit_in_the_last_place(values: torch.Tensor) -> None:
    error = (round_trip(ENCODINGS["bf16"].codec(), values) - values).abs()

    # Smaller than 2^-126 numbers have fewer digits.
    assert (error <= values.abs() * 2.0**-8 + 2.0**-133).all()


@checked
@given(values=elements())
def test_fp16_keeps_eleven_bits_of_all_that_is_not_tiny_beside_the_largest(
    values: torch.Tensor,
) -> None:
    error = (round_trip(ENCODINGS["fp16"].codec(), values) - values).abs()

    largest = values.abs().max().item() if values.numel() else 0.0
    assert (error <= values.abs() * 2.0**-11 + largest * 2.0**-39 + 2.0**-148).all()


@checked
@given(values=elements(), seed=seeds)
def test_int8_is_off_by_less_than_a_level_of_its_block(
    values: torch.Tensor, seed: int | None
) -> None:
    decoded = round_trip(ENCODINGS["int8"].codec(), values, seed)

    levels = 1.0 if seed is not None else 0.5
    pairs = zip(
        blockwise(values, int8.BLOCK), blockwise(decoded, int8.BLOCK), strict=True
    )
    for block, got in pairs:
        level = block.abs().max().item() / 127
        bound = level * levels * (1 + 2.0**-16) if level >= 2.0**-120 else 127 * level
        assert ((got - block).abs() <= bound + 2.0**-149).all()


@checked
@given(values=elements(), ratio=st.floats(0.001, 0.5))
def test_topk_sends_the_largest_elements_as_they_are(
    values: torch.Tensor, ratio: float
) -> None:
    decoded = round_trip(TopK(ratio), values)

    sent = decoded != 0
    count = math.ceil(values.numel() * ratio)
    assert torch.equal(decoded[sent], values[sent])
    # Zeros are not sent, even where there is little else.
    assert sent.sum() == min(count, int((values != 0).sum()))
    if 0 < sent.sum() < values.numel():
        assert values[~sent].abs().max() <= values[sent].abs().min()


@pytest.mark.parametrize("count", [65_535, 65_536, 65_537, 200_000])
def test_places_of_topk_are_counted_in_blocks(count: int) -> None:
    values = torch.zeros(count)
    places = [0, 65_534, count - 1, 65_535 % count, 131_071 % count]
    values[places] = torch.arange(1.0, 6.0)

    assert torch.equal(round_trip(TopK(0.001), values), values)


@all_encodings
@checked
@given(values=elements(), seed=seeds, ratio=st.floats(0.001, 0.5))
def test_what_is_taken_and_what_is_left_are_all(
    encoding: Encoding, values: torch.Tensor, seed: int | None, ratio: float
) -> None:
    codec = encoding.codec(ratio)
    left = values.clone()

    data = codec.take(left, seed=seed)

    assert data == codec.encode(values, seed=seed)
    decoded = codec.decode(memoryview(data), values.numel())
    assert torch.equal(left, values - decoded)


@all_encodings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@checked
@given(values=elements(), ratio=st.floats(0.001, 0.5))
def test_what_is_added_in_place_is_the_sum_in_float32(
    encoding: Encoding, dtype: torch.dtype, values: torch.Tensor, ratio: float
) -> None:
    codec = encoding.codec(ratio)
    data = memoryview(codec.encode(values))
    to = values.flip(0).clamp(-(2.0**10), 2.0**10).to(dtype)
    expected = (to.float() + codec.decode(data, len(to))).to(dtype)

    codec.add_to(to, data)

    assert torch.equal(to, expected)


@all_encodings
def test_nothing_is_added_of_what_is_refused(encoding: Encoding) -> None:
    values = torch.ones(10)

    with pytest.raises(Refusal, match=f"elements encoded as {encoding.name}"):
        encoding.codec(0.1).add_to(values, memoryview(b"12345"))

    assert torch.equal(values, torch.ones(10))


@checked
@given(values=elements())
def test_onebit_keeps_signs_and_the_mean_size_of_a_block(values: torch.Tensor) -> None:
    decoded = round_trip(ENCODINGS["onebit"].codec(), values)

    pairs = zip(
        blockwise(values, onebit.BLOCK), blockwise(decoded, onebit.BLOCK), strict=True
    )
    for block, got in pairs:
        mean = block.double().abs().mean().item()
        assert got.abs().double() == pytest.approx(mean, rel=1e-5, abs=2.0**-140)
        assert torch.equal(got >= 0, block >= 0) or mean < 2.0**-130
        # What remains is less than what there was: the residual can't grow for ever.
        assert (block - got).double().norm() <= block.double().norm() * (1 + 1e-6)


def test_the_mean_of_many_stochastic_roundings_is_the_element() -> None:
    """Bound: 5 standard deviations of the mean, and 2^-17 of a level for float32.

    A rounding is off by at most a level, with a standard deviation of at most half of
    one. With 4,096 elements a bound of 5 fails by chance once in 400 seeds; this one
    is fixed.
    """
    values = torch.randn(4096, generator=torch.Generator().manual_seed(5))
    codec = ENCODINGS["int8"].codec()
    repeats = 500

    total = torch.zeros(4096, dtype=torch.float64)
    for seed in range(repeats):
        total += round_trip(codec, values, seed)

    levels = values.view(-1, int8.BLOCK).abs().amax(1).repeat_interleave(int8.BLOCK)
    levels = levels.double() / 127
    error = (total / repeats - values.double()).abs()
    assert (error <= levels * (5 * 0.5 / math.sqrt(repeats) + 2.0**-17)).all()
    # And it is random: to the nearest is off by as much each time.
    nearest = (round_trip(codec, values) - values).abs()
    assert error.mean() < 0.1 * nearest.mean()


@all_encodings
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("seed", [None, 3])
def test_what_is_not_finite_comes_back_as_not_finite(
    encoding: Encoding, bad: float, seed: int | None
) -> None:
    values = torch.ones(3000)
    values[1500] = bad

    decoded = round_trip(encoding.codec(), values, seed)

    assert not decoded.isfinite().all()


@all_encodings
@checked
@given(data=st.binary(max_size=64), count=st.integers(0, 40))
def test_hostile_bytes_are_refused_or_decoded_and_nothing_else(
    encoding: Encoding, data: bytes, count: int
) -> None:
    codec = encoding.codec(0.1)

    checked = _refusal_of(lambda: codec.check(memoryview(data), count))
    decoded = _refusal_of(lambda: codec.decode(memoryview(data), count))

    assert str(checked) == str(decoded)
    if checked is None:
        assert codec.decode(memoryview(data), count).numel() == count
    else:
        assert checked.reason is ErrorReason.CHUNK_INVALID


def _sent(*places: int, count: int | None = None) -> bytes:
    """As `topk` sends zeros at these places."""
    number = len(places) if count is None else count
    return b"".join(
        (
            number.to_bytes(4, "little"),
            bytes(4 * len(places)),
            *(each.to_bytes(2, "little") for each in places),
        )
    )


@pytest.mark.parametrize(
    ("encoding", "data", "text"),
    [
        (ENCODINGS["bf16"], b"123", "as bf16: 10 of them take 20 bytes, 3 came"),
        (ENCODINGS["fp16"], bytes(20), "as fp16: 10 of them take 24 bytes, 20 came"),
        (ENCODINGS["int8"], bytes(10), "as int8: 10 of them take 14 bytes, 10 came"),
        (ENCODINGS["onebit"], bytes(7), "as onebit: 10 of them take 6 bytes, 7 came"),
        (
            ENCODINGS["onebit"],
            b"\0\0\0\0\xff\x04",
            "as onebit: bits are set beyond the 10 that there are",
        ),
        (
            ENCODINGS["topk"],
            b"\1",
            "as topk: 1 bytes came, and the numbers of 10 take 4",
        ),
        (ENCODINGS["topk"], _sent(count=11), "as topk: 11 of 10 elements came"),
        (
            ENCODINGS["topk"],
            _sent(1, 2) + b"\0",
            "as topk: 2 of them take 16 bytes, 17 came",
        ),
        (
            ENCODINGS["topk"],
            _sent(2, 2),
            "as topk: their places are not ascending and below 10",
        ),
        (
            ENCODINGS["topk"],
            _sent(2, 10),
            "as topk: their places are not ascending and below 10",
        ),
    ],
)
def test_refusals_say_what_was_expected(
    encoding: Encoding, data: bytes, text: str
) -> None:
    with pytest.raises(Refusal, match=f"elements encoded {text}"):
        encoding.codec(0.1).check(memoryview(data), 10)


def test_entries_of_the_table_differ_and_name_codecs_that_there_are() -> None:
    assert len(BY_NUMBER) == len(ENCODINGS)
    for name, encoding in ENCODINGS.items():
        assert encoding.name == name
        assert isinstance(encoding.codec(), Codec)


def _refusal_of(call: Callable[[], object]) -> Refusal | None:
    try:
        call()
    except Refusal as refusal:
        return refusal
    return None


@checked
@given(
    push=st.sampled_from([None, *ENCODINGS]),
    pull=st.sampled_from([None, *ENCODINGS]),
    ratio=st.floats(1e-6, 0.5),
)
def test_a_choice_comes_back_from_its_text(
    push: str | None, pull: str | None, ratio: float
) -> None:
    chosen = Compression(push, pull, ratio)

    read = Compression.parse(str(chosen))

    assert (read.push, read.pull) == (push, pull)
    if "topk" in (push, pull):
        assert read == chosen
    assert str(read) == str(chosen)


def test_a_choice_that_makes_no_sense_is_refused_by_name() -> None:
    unknown = (
        "push='zip' is no way to send fewer bytes: there are "
        f"{', '.join(map(repr, ENCODINGS))}, and None to send everything as it is"
    )
    with pytest.raises(ValueError, match=re.escape(unknown)):
        Compression("zip")

    too_many = (
        "ratio=0.7 is no share of elements to send: it must be more than 0 and at most "
        "0.5"
    )
    with pytest.raises(ValueError, match=re.escape(too_many)):
        Compression("topk", ratio=0.7)


@pytest.mark.parametrize(
    "text", ["push=zip pull=raw ratio=0.1", "int8", "push=int8 pull=raw ratio=x"]
)
def test_a_text_of_a_stranger_is_refused(text: str) -> None:
    with refused(ErrorReason.MALFORMED_MESSAGE, "can't be read"):
        Compression.parse(text)
