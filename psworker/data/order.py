"""The order of an epoch: every worker draws the same one from the epoch's seed.

The coordinator leases runs of positions in this order, so all workers must agree on
it; they compare its digest.
"""

import contextlib
import random
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
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
        position_count: Samples of the epoch.
        batch_size: Samples of a batch.
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


class OrderSource:
    """Draws the order of an epoch from the sampler of the user's loader."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Checks that the loader can be leased.

        Raises:
            LoaderRefused: It can't; the text says why.
        """
        if isinstance(loader.dataset, IterableDataset):
            raise LoaderRefused(
                "a DataLoader over an IterableDataset has no positions to lease; use "
                "a map-style dataset, or leave the loader out of prepare() and split "
                "the stream by ps.rank yourself"
            )
        if loader.batch_sampler is None:
            raise LoaderRefused(
                "a DataLoader with batch_size=None has no batches to lease; give it a "
                "batch_size, or leave it out of prepare() and name the weight in "
                "optimizer.step(weight=n)"
            )
        self._batches: Any = None
        batch_sampler: Any = loader.batch_sampler
        if type(batch_sampler) is BatchSampler:
            sampler = cast("Any", batch_sampler.sampler)
            _refuse_splitting(sampler)
            if not isinstance(sampler, Sized):
                raise LoaderRefused(
                    f"the sampler {type(sampler).__name__} has no __len__, so "
                    "nobody knows when its epoch ends; define it"
                )
            self._sampler: Any = sampler
            self.shape = EpochShape(
                len(sampler), batch_sampler.batch_size, batch_sampler.drop_last
            )
        else:
            self._sampler = self._batches = batch_sampler
            self.shape = _shape_of_batches(self._draw(_DRY_RUN_SEED))

    def draw(self, seed: int, epoch: int) -> Positions:
        """The epoch's order, as indices into the dataset, int64.

        Raises:
            LoaderRefused: The sampler drew another number of samples than it has
                said, or something that is no index.
        """
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        drawn = self._draw(seed)
        if self._batches is not None:
            if _shape_of_batches(drawn) != self.shape:
                raise LoaderRefused(
                    f"the batch sampler drew batches of another number or size than "
                    f"before; {_FIXED_SIZE}"
                )
            drawn = [index for batch in drawn for index in batch]
        try:
            order = np.fromiter(drawn, dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise LoaderRefused(
                "only samplers that draw whole numbers can be leased"
            ) from error
        if len(order) != self.shape.position_count:
            raise LoaderRefused(
                f"the sampler drew {len(order)} samples, but its length is "
                f"{self.shape.position_count}"
            )
        return order

    def _draw(self, seed: int) -> list[Any]:
        sampler: Any = self._sampler
        if isinstance(sampler, SequentialSampler):
            return list(sampler)
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
            return list(sampler)


_FIXED_SIZE: Final = (
    "only a batch sampler whose batches all have one size, but for a smaller last "
    "one, can be leased; use batch_size and a sampler, or leave the loader out of "
    "prepare() and name the weight in optimizer.step(weight=n)"
)


def _shape_of_batches(batches: list[Any]) -> EpochShape:
    sizes = [len(batch) for batch in batches]
    size = sizes[0] if sizes else 1
    if any(other != size for other in sizes[:-1]) or (sizes and sizes[-1] > size):
        raise LoaderRefused(
            f"the batch sampler's batches differ in size; {_FIXED_SIZE}"
        )
    return EpochShape(sum(sizes), size, drop_last=False)


def is_split_by_user(loader: DataLoader[Any]) -> bool:
    """Whether the loader's sampler gives each process its own part already."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return isinstance(sampler, DistributedSampler)


def _refuse_splitting(sampler: object) -> None:
    if isinstance(sampler, DistributedSampler):
        raise LoaderRefused(
            "a DistributedSampler splits the data by itself, so there is no common "
            "order to lease from; use shuffle=True instead"
        )


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
