"""The order of an epoch: every worker draws the same one from the epoch's seed.

The coordinator leases runs of positions in this order, so all workers must agree on
it; they compare its digest.
"""

import contextlib
import random
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
)

from psworker.errors import UnsupportedError

Positions = npt.NDArray[np.int64]

_DRY_RUN_SEED: Final = 0


class LoaderRefused(UnsupportedError, TypeError):
    """A loader that can't be leased; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class EpochShape:
    """What the coordinator must know of an epoch before its seed is drawn.

    Attributes:
        position_count: Positions of the epoch: samples, or batches where these
            differ in size.
        batch_size: Positions of a batch.
        drop_last: Whether a last, smaller batch is left out.
    """

    position_count: int
    batch_size: int
    drop_last: bool

    @property
    def batch_count(self) -> int:
        """Batches of the whole epoch, over all workers."""
        full, rest = divmod(self.position_count, self.batch_size)
        return full if self.drop_last or not rest else full + 1


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order of one epoch.

    Attributes:
        indices: What the sampler drew, one after the other.
        bounds: Where batches begin and end in it, when they differ in size: positions
            are then batches, not samples.
        is_batched: Whether the dataset is asked for lists of indices. It is not with
            `batch_size=None` and a sampler of indices.
    """

    indices: Positions
    bounds: Positions | None = None
    is_batched: bool = True

    @property
    def unit(self) -> str:
        """What a position is, for people."""
        return "samples" if self.bounds is None else "batches"

    @property
    def digest(self) -> int:
        """XXH3-64 of the order, and of the bounds if there are any."""
        if self.bounds is None:
            return order_digest(self.indices)
        return order_digest(np.concatenate([self.bounds, self.indices]))

    def at(self, start: int, stop: int) -> list[int]:
        """Indices of positions `[start, stop)`, which are one batch."""
        if self.bounds is not None:
            start, stop = int(self.bounds[start]), int(self.bounds[stop])
        indices: list[int] = self.indices[start:stop].tolist()
        return indices


class OrderSource:
    """Draws the order of an epoch from the sampler of the user's loader.

    Attributes:
        shape: How epochs are cut.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Checks that the loader can be leased.

        Raises:
            LoaderRefused: It can't; the text says why.
        """
        self._is_batched = True
        self._is_ragged = False
        self._draws_batches = False
        if loader.batch_sampler is None:
            self._sampler: Any = loader.sampler
            _check_length(self._sampler)
            self._draws_batches = _draws_lists(self._sampler)
            self._is_batched = self._draws_batches
            batch_size, drop_last = 1, False
        elif type(loader.batch_sampler) is BatchSampler:
            self._sampler = loader.batch_sampler.sampler
            _check_length(self._sampler)
            batch_size = loader.batch_sampler.batch_size
            drop_last = loader.batch_sampler.drop_last
        else:
            self._sampler = loader.batch_sampler
            self._draws_batches = True
        self._count_max = _count_max(self._sampler, loader)
        if self._draws_batches:
            self.shape = self._shape_of(self._draw(_DRY_RUN_SEED))
        else:
            self.shape = EpochShape(len(self._sampler), batch_size, drop_last)

    def draw(self, seed: int, epoch: int) -> EpochOrder:
        """The epoch's order, as indices into the dataset.

        Raises:
            LoaderRefused: The sampler drew another number of samples than it has
                said, or something that is no index.
        """
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        drawn = self._draw(seed)
        if self._draws_batches:
            return self._order_of_batches(drawn)
        order = _positions(drawn)
        if len(order) != self.shape.position_count:
            raise LoaderRefused(
                f"the sampler drew {_count_text(len(order), self._count_max)} samples, "
                f"but its length is {self.shape.position_count}"
            )
        return EpochOrder(order, is_batched=self._is_batched)

    def _order_of_batches(self, batches: list[Any]) -> EpochOrder:
        indices = _positions([index for batch in batches for index in batch])
        if self._is_ragged:
            bounds = np.cumsum([0, *map(len, batches)], dtype=np.int64)
            if len(batches) != self.shape.position_count:
                raise LoaderRefused(
                    f"the batch sampler drew {len(batches)} batches, but "
                    f"{self.shape.position_count} when it was prepared; let it draw "
                    "the same number in every epoch"
                )
            return EpochOrder(indices, bounds)
        if self._shape_of(batches) != self.shape:
            raise LoaderRefused(
                "the batch sampler drew batches of another number or size than when "
                "it was prepared, where all had one size; let them keep their number "
                "and size in every epoch, or differ in size from the first one on"
            )
        return EpochOrder(indices)

    def _shape_of(self, batches: list[Any]) -> EpochShape:
        sizes = [len(batch) for batch in batches]
        size = sizes[0] if sizes else 1
        if any(other != size for other in sizes[:-1]) or (sizes and sizes[-1] > size):
            self._is_ragged = True
            return EpochShape(len(sizes), 1, drop_last=False)
        return EpochShape(sum(sizes), max(1, size), drop_last=False)

    def _draw(self, seed: int) -> list[Any]:
        sampler: Any = self._sampler
        if type(sampler) is RandomSampler:
            # Not set on the user's own: its generator may be shared with other code.
            return list(
                RandomSampler(
                    sampler.data_source,
                    replacement=sampler.replacement,
                    num_samples=sampler._num_samples,
                    generator=_generator(seed),
                )
            )
        with seeded(seed), _given_generator(sampler, seed):
            drawn = list(islice(sampler, self._count_max + 1))
        if self._draws_batches and len(drawn) > self._count_max:
            raise LoaderRefused(
                f"the batch sampler {type(sampler).__name__} draws more than "
                f"{self._count_max} batches, so nobody knows when its epoch ends; "
                "define its __len__"
            )
        return drawn


def _check_length(sampler: object) -> None:
    if isinstance(sampler, Sized):
        try:
            len(sampler)
        except (TypeError, NotImplementedError):
            pass
        else:
            return
    raise LoaderRefused(
        f"the sampler {type(sampler).__name__} has no __len__, so nobody knows when "
        "its epoch ends; define it"
    )


def _count_max(sampler: Any, loader: DataLoader[Any]) -> int:  # noqa: ANN401
    """Most that a sampler may draw: its length, else one for each sample."""
    try:
        return len(sampler)
    except (AttributeError, TypeError, NotImplementedError):
        dataset: Any = loader.dataset
        return len(dataset)


def _count_text(count: int, count_max: int) -> str:
    return str(count) if count <= count_max else f"more than {count_max}"


def _draws_lists(sampler: Any) -> bool:  # noqa: ANN401, whatever has a length
    """Whether a sampler draws lists of indices, for a dataset that takes them."""
    if isinstance(sampler, BatchSampler):
        return True
    with seeded(_DRY_RUN_SEED), _given_generator(sampler, _DRY_RUN_SEED):
        first = next(iter(sampler), None)
    return isinstance(first, list | tuple)


def _positions(drawn: list[Any]) -> Positions:
    try:
        return np.fromiter(drawn, dtype=np.int64, count=len(drawn))
    except (TypeError, ValueError):
        raise LoaderRefused(
            "only samplers that draw whole numbers can be leased; let the sampler draw "
            "positions, and the dataset look up what is there"
        ) from None


def order_digest(order: Positions) -> int:
    """XXH3-64 of the order as little-endian int64."""
    return xxhash.xxh3_64_intdigest(order.astype("<i8", copy=False).tobytes())


def _generator(seed: int) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


@contextlib.contextmanager
def _given_generator(sampler: Sampler[Any], seed: int) -> Iterator[None]:
    """Gives the seed to every sampler that keeps a generator, also a wrapped one."""
    inner: Any = getattr(sampler, "sampler", None)
    owners = [owner for owner in (sampler, inner) if hasattr(owner, "generator")]
    saved = [owner.generator for owner in owners]
    try:
        for owner in owners:
            owner.generator = _generator(seed)
        yield
    finally:
        for owner, generator in zip(owners, saved, strict=True):
            owner.generator = generator


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global random states of torch, numpy and Python, and restores them.

    A sampler that draws from any of them then draws the same on every worker, and
    the user's own random numbers go on as if nothing had been drawn.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # Not torch.manual_seed, which would also seed every GPU.
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
