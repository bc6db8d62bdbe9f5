"""What the order of an epoch is drawn from: a random state, for the other workers.

A job with a seed of its own has that instead. The bytes are of other workers, and the
coordinator does not read them: whatever they hold, reading them ends with an
`OriginInvalidError` or with states that draw.
"""

import contextlib
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pswire.leased_data import Origin
from psworker.errors import DataOrderError

NO_ORIGIN: Final = b""
"""Of an order in which nothing is random."""

_SEED: Final = b"s"  # which the sampler has drawn for a generator of its own
_GENERATOR: Final = b"g"  # the state of the one generator that it draws from
_ALL: Final = b"a"  # of all that it may draw from

_GENERATOR_BYTES: Final = torch.Generator().get_state().numel()
_WORD_COUNT: Final = 624  # of the Mersenne twister, which all of them are
_PYTHON: Final = struct.Struct(f"<{_WORD_COUNT + 1}I?d")
_NUMPY: Final = struct.Struct(f"<{_WORD_COUNT}I?I?d")
_OWNER_COUNT_MAX: Final = 2
_ALL_BYTES_MAX: Final = (
    _GENERATOR_BYTES + _PYTHON.size + _NUMPY.size + 1
) + _OWNER_COUNT_MAX * (1 + _GENERATOR_BYTES)

_BY_GENERATOR: Final = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_FIXED: Final = (SequentialSampler, list, tuple, range)


class OriginInvalidError(DataOrderError):
    """No random state is in the bytes."""


@dataclass(frozen=True, slots=True)
class _States:
    """All that a sampler may draw from.

    Attributes:
        default: Of torch's default generator.
        python: As `random.getstate` has it.
        numpy: As `numpy.random.get_state` has it; `None` for another kind.
        owned: Of the generator of each sampler that has one; `None` for no generator.
    """

    default: torch.Tensor
    python: Any
    numpy: Any
    owned: tuple[torch.Tensor | None, ...]


def draws_by_generator(sampler: object) -> bool:
    """Whether a sampler keeps nothing and draws from one generator alone."""
    return type(sampler) in _BY_GENERATOR


def is_fixed(sampler: object) -> bool:
    """Whether nothing is random in what a sampler draws, nor changes by it."""
    return type(sampler) in _FIXED


def take_origin(sampler: Any) -> bytes:  # noqa: ANN401, whatever draws
    """What a sampler would draw from now.

    A `RandomSampler` without a generator begins by drawing a seed for one. It is drawn
    here, once for each epoch, as the sampler itself would.
    """
    if is_fixed(sampler):
        return NO_ORIGIN
    if not draws_by_generator(sampler):
        return _ALL + zlib.compress(_packed(_states(sampler)), 1)
    if type(sampler) is RandomSampler and sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        return _SEED + struct.pack("<q", seed)
    generator = sampler.generator or torch.default_generator
    return _GENERATOR + zlib.compress(_bytes_of(generator.get_state()), 1)


def is_spent(origin: bytes) -> bool:
    """Whether a sampler that begins there takes no more random numbers of others."""
    return origin[:1] == _SEED


def generator_of(origin: Origin) -> torch.Generator | None:
    """A generator that draws from there; `None` where other samplers drew from it.

    Raises:
        OriginInvalidError: The bytes are none.
    """
    generator = torch.Generator()
    if isinstance(origin, int):
        return generator.manual_seed(origin)
    kind, rest = origin[:1], origin[1:]
    if kind == _SEED:
        if len(rest) != struct.calcsize("<q"):
            raise _invalid()
        return generator.manual_seed(*struct.unpack("<q", rest))
    if kind == _GENERATOR:
        return _of_state(_checked_state(_inflated(rest, _GENERATOR_BYTES)))
    return None


@contextlib.contextmanager
def drawing_from(origin: Origin, sampler: object) -> Iterator[None]:
    """All that a sampler may draw from is as the origin has it; then as it was.

    If other samplers drew from that origin, nothing is changed: the order that is drawn
    differs from theirs, and is refused when it is compared.

    Raises:
        OriginInvalidError: The bytes are none.
    """
    owners = _owners(sampler)
    if isinstance(origin, int):
        given: list[torch.Generator | None] = [
            torch.Generator().manual_seed(origin) for _ in owners
        ]
    else:
        states = _unpacked(origin)
        if states is None or len(states.owned) != len(owners):
            yield
            return
        given = [None if each is None else _of_state(each) for each in states.owned]
    with _global_states_kept(), _given_generators(owners, given):
        if isinstance(origin, int):
            _seed_globals(origin)
        else:
            assert states is not None
            _set_globals(states)
        yield


def copy_generators(drawn: object, sampler: object) -> None:
    """Gives the sampler's generators the states of those of its copy."""
    for from_owner, to_owner in zip(_owners(drawn), _owners(sampler), strict=True):
        if from_owner.generator is not None and to_owner.generator is not None:
            to_owner.generator.set_state(from_owner.generator.get_state())


def _owners(sampler: object) -> list[Any]:
    """Samplers that keep a generator: this one, and the one that it wraps."""
    inner = getattr(sampler, "sampler", None)
    return [each for each in (sampler, inner) if hasattr(each, "generator")]


def _states(sampler: object) -> _States:
    numpy_state: Any = np.random.get_state()
    return _States(
        torch.default_generator.get_state(),
        random.getstate(),
        numpy_state if numpy_state[0] == "MT19937" else None,
        tuple(
            None if each.generator is None else each.generator.get_state()
            for each in _owners(sampler)
        ),
    )


def _packed(states: _States) -> bytes:
    _, words, gauss = states.python
    parts = [
        _bytes_of(states.default),
        _PYTHON.pack(*words, gauss is not None, gauss or 0.0),
        _NUMPY.pack(*[0] * _WORD_COUNT, False, 0, False, 0.0)
        if states.numpy is None
        else _NUMPY.pack(
            *states.numpy[1].tolist(),
            True,
            int(states.numpy[2]),
            bool(states.numpy[3]),
            float(states.numpy[4]),
        ),
        bytes([len(states.owned)]),
    ]
    for each in states.owned:
        parts += [b"\0"] if each is None else [b"\1", _bytes_of(each)]
    return b"".join(parts)


def _unpacked(origin: bytes) -> _States | None:
    if origin[:1] != _ALL:
        return None
    data = _inflated(origin[1:])

    def taken(count: int) -> bytes:
        nonlocal data
        if len(data) < count:
            raise _invalid()
        piece, data = data[:count], data[count:]
        return piece

    torch_state = _checked_state(taken(_GENERATOR_BYTES))
    *words, has_gauss, gauss = _PYTHON.unpack(taken(_PYTHON.size))
    *keys, is_there, place, has_gaussian, gaussian = _NUMPY.unpack(taken(_NUMPY.size))
    if words[-1] > _WORD_COUNT or place > _WORD_COUNT:
        raise _invalid()
    owned = tuple(
        _checked_state(taken(_GENERATOR_BYTES)) if taken(1) == b"\1" else None
        for _ in range(taken(1)[0])
    )
    if data:
        raise _invalid()
    return _States(
        torch_state,
        (3, tuple(words), gauss if has_gauss else None),
        ("MT19937", np.array(keys, np.uint32), place, int(has_gaussian), gaussian)
        if is_there
        else None,
        owned,
    )


def _inflated(data: bytes, byte_count: int | None = None) -> bytes:
    """The bytes without compression, never more than there may be."""
    bytes_max = byte_count or _ALL_BYTES_MAX
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, bytes_max)
    except zlib.error:
        raise _invalid() from None
    if not inflater.eof or (byte_count is not None and len(found) != byte_count):
        raise _invalid()
    return found


def _bytes_of(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _checked_state(data: bytes) -> torch.Tensor:
    state = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    _of_state(state)
    return state


def _of_state(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    try:
        generator.set_state(state)
    except RuntimeError:
        raise _invalid() from None
    return generator


def _invalid() -> OriginInvalidError:
    return OriginInvalidError(
        "what the worker that opened this epoch has sent to draw its order from is no "
        "random state: was it sent by another release of psworker? Run the same one "
        "on all workers"
    )


def _set_globals(states: _States) -> None:
    random.setstate(states.python)
    if states.numpy is not None:
        np.random.set_state(states.numpy)
    torch.default_generator.set_state(states.default)


def _seed_globals(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which would also seed every GPU.
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def _global_states_kept() -> Iterator[None]:
    """The user's own random numbers go on as if nothing had been drawn."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


@contextlib.contextmanager
def _given_generators(
    owners: list[Any], given: list[torch.Generator | None]
) -> Iterator[None]:
    saved = [owner.generator for owner in owners]
    try:
        for owner, generator in zip(owners, given, strict=True):
            owner.generator = generator
        yield
    finally:
        for owner, generator in zip(owners, saved, strict=True):
            owner.generator = generator
