"""The order of an epoch, which the worker draws that opens it.

The others draw it from the same random state, or all from the job's seed. The
coordinator leases runs of positions in this order, so that all workers must have the
same; they compare its digest.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator
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
    SequentialSampler,
)

from pswire.leased_data import EpochShape, Origin
from psworker.data.origin import (
    copy_generators,
    drawing_from,
    draws_by_generator,
    generator_of,
    is_fixed,
    is_spent,
    take_origin,
)
from psworker.errors import UnsupportedError

logger: Final = logging.getLogger("psworker")

Positions = npt.NDArray[np.int64]

_DRY_RUN_SEED: Final = 0


class LoaderRefused(UnsupportedError, TypeError):
    """A loader that can't be leased; the text says why and what to do."""


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

    def refuse_repeated(self, length: int) -> None:
        """Checks that it has no sample twice.

        Args:
            length: Samples of the data set.

        Raises:
            LoaderRefused: It has.
        """
        # An index from the end is that of a sample too.
        distinct_count = len(np.unique(self.indices % max(length, 1)))
        if distinct_count != len(self.indices):
            raise LoaderRefused(
                f"the sampler draws {len(self.indices)} samples and only "
                f"{distinct_count} different ones, and with differential_privacy each "
                "may take part once in an epoch: draw without replacement"
            )

    def at(self, start: int, stop: int) -> list[int]:
        """Indices of positions `[start, stop)`, which are one batch."""
        if self.bounds is not None:
            start, stop = int(self.bounds[start]), int(self.bounds[stop])
        indices: list[int] = self.indices[start:stop].tolist()
        return indices


class OrderSource:
    """Draws the order of an epoch from the sampler of the user's loader.

    It looks at the loader each time: what a script changes there, or in the data set,
    counts from the next epoch on, as without a job.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Checks that the loader can be leased.

        Raises:
            LoaderRefused: It can't; the text says why.
        """
        self._loader = loader
        self._look: _Look | None = None
        if type(loader.batch_sampler) is BatchSampler or loader.batch_sampler is None:
            _check_length(self._sampler)
        self.shape()

    def shape(self) -> EpochShape:
        """How an epoch is cut that is opened now.

        Raises:
            LoaderRefused: The batch sampler draws without an end.
        """
        batch_sampler: Any = self._loader.batch_sampler
        if self._draws_batches:
            shape = self._looked_at().shape
            assert shape is not None, "it draws batches"
            return shape
        sampler: Any = self._sampler
        if batch_sampler is None:
            return EpochShape(
                position_count=len(sampler), batch_size=1, drop_last=False
            )
        return EpochShape(
            position_count=len(sampler),
            batch_size=batch_sampler.batch_size,
            drop_last=batch_sampler.drop_last,
        )

    def begin(self, epoch: int) -> "EpochDraw":
        """This worker's part in an epoch, before that is opened.

        Like the epoch of a plain loader it takes random numbers once, however often the
        worker has to open it.
        """
        way = _Way(
            sampler=self._sampler,
            dataset=self._loader.dataset,
            count_max=_count_max(self._sampler, self._loader),
            is_batched=self._loader.batch_sampler is not None or self._draws_batches,
            draws_batches=self._draws_batches,
            is_ragged=self._draws_batches and self._looked_at().is_ragged,
        )
        return EpochDraw(way, epoch, self.shape())

    @property
    def _sampler(self) -> Any:  # noqa: ANN401, whatever the user has given
        batch_sampler: Any = self._loader.batch_sampler
        if batch_sampler is None:
            return self._loader.sampler
        if type(batch_sampler) is BatchSampler:
            return batch_sampler.sampler
        return batch_sampler

    @property
    def _draws_batches(self) -> bool:
        batch_sampler = self._loader.batch_sampler
        if batch_sampler is None:
            return self._looked_at().draws_batches
        return type(batch_sampler) is not BatchSampler

    def _looked_at(self) -> "_Look":
        """What only drawing shows of a sampler: drawn anew when its length changes."""
        sampler, loader = self._sampler, self._loader
        lengths = _length(sampler), _length(loader.dataset)
        look = self._look
        if look is None or look.sampler is not sampler or look.lengths != lengths:
            is_batch_sampler = loader.batch_sampler is not None
            shape, is_ragged = None, False
            draws_batches = is_batch_sampler or _draws_lists(sampler, loader.dataset)
            if draws_batches:
                count_max = _count_max(sampler, loader)
                with _looking(sampler, loader.dataset) as looked:
                    batches = _drawn_batches(looked, count_max)
                shape, is_ragged = _shape_of(batches)
            look = _Look(sampler, lengths, draws_batches, shape, is_ragged)
            self._look = look
        return look


@dataclass(frozen=True, slots=True)
class _Look:
    """What is known of a sampler only by drawing from it, or a copy.

    Attributes:
        sampler: Which one.
        lengths: Of it and of the data set when it was looked at.
        draws_batches: Whether it draws lists of indices.
        shape: If so, how it cuts an epoch.
        is_ragged: If so, whether these differ in size.
    """

    sampler: Any
    lengths: tuple[int | None, int | None]
    draws_batches: bool
    shape: EpochShape | None
    is_ragged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How a loader draws its epochs.

    Attributes:
        sampler: The user's: of positions, or of batches.
        dataset: What its positions are of.
        count_max: Most that it may draw.
        is_batched: Whether the data set is asked for lists of indices.
        draws_batches: Whether it draws lists of indices.
        is_ragged: If so, whether these differ in size.
    """

    sampler: Any
    dataset: object
    count_max: int
    is_batched: bool
    draws_batches: bool
    is_ragged: bool


class EpochDraw:
    """One epoch's order, as one worker draws it.

    Attributes:
        shape: How the epoch is cut.
        own: What this worker's own sampler draws it from.
    """

    def __init__(self, way: _Way, epoch: int, shape: EpochShape) -> None:
        self._way = way
        self._epoch = epoch
        self.shape = shape
        self.own = take_origin(way.sampler)
        self._drawn: tuple[Origin, EpochOrder] | None = None
        self._rest: Iterator[Any] = iter(())
        self._has_drawn_own = False

    def order(self, origin: Origin) -> EpochOrder:
        """The epoch's order, as indices into the dataset.

        The random numbers that the user's sampler takes for it are those of a plain
        loader, also where the order is drawn from another worker's.

        Raises:
            LoaderRefused: The sampler drew another number of samples than it has
                said, or something that is no index.
            DataOrderError: The origin is none.
        """
        if self._drawn is None or self._drawn[0] != origin:
            self._drawn = origin, self._order(self._indices(origin))
        return self._drawn[1]

    def end(self) -> None:
        """The epoch was iterated to its end, where samplers may draw once more."""
        for _ in self._rest:
            pass

    def _indices(self, origin: Origin) -> list[Any]:
        sampler = self._way.sampler
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        if is_fixed(sampler):
            return list(sampler)
        if draws_by_generator(sampler):
            return self._indices_by_generator(origin)
        if origin != self.own:
            if not self._has_drawn_own:
                self._spend_own()
            self._has_drawn_own = True
            with drawing_from(origin, sampler):
                return self._begun(sampler)
        self._has_drawn_own = True
        return self._begun(sampler)

    def _indices_by_generator(self, origin: Origin) -> list[Any]:
        sampler = self._way.sampler
        own_generator = sampler.generator
        if type(sampler) is RandomSampler and own_generator is None:
            own_generator = generator_of(self.own)
        generator = None if origin == self.own else generator_of(origin)
        own: list[Any] = []
        if generator is None or not (self._has_drawn_own or is_spent(self.own)):
            # It draws once more where it ends, as a plain loader's does that is
            # iterated to its end.
            self._rest = iter(_drawing_by(sampler, own_generator))
            own = list(islice(self._rest, len(sampler)))
            self._has_drawn_own = True
        return own if generator is None else list(_drawing_by(sampler, generator))

    def _spend_own(self) -> None:
        """Takes the random numbers that the user's sampler would, and nothing else."""
        with _untouched(self._way.sampler, self._way.dataset) as looked:
            self._begun(looked)
            if looked is not self._way.sampler:
                copy_generators(looked, self._way.sampler)

    def _begun(self, sampler: Any) -> list[Any]:  # noqa: ANN401, as the user's
        if self._way.draws_batches:
            return _drawn_batches(sampler, self._way.count_max)
        return list(islice(sampler, self._way.count_max + 1))

    def _order(self, drawn: list[Any]) -> EpochOrder:
        if self._way.draws_batches:
            return self._order_of_batches(drawn)
        order = _positions(drawn)
        if len(order) != self.shape.position_count:
            most = self._way.count_max
            count = len(order) if len(order) <= most else f"more than {most}"
            raise LoaderRefused(
                f"the sampler drew {count} samples, but its length is "
                f"{self.shape.position_count}"
            )
        return EpochOrder(order, is_batched=self._way.is_batched)

    def _order_of_batches(self, batches: list[Any]) -> EpochOrder:
        indices = _positions([index for batch in batches for index in batch])
        if self._way.is_ragged:
            bounds = np.cumsum([0, *map(len, batches)], dtype=np.int64)
            if len(batches) != self.shape.position_count:
                raise LoaderRefused(
                    f"the batch sampler drew {len(batches)} batches, but "
                    f"{self.shape.position_count} when it was prepared; let it draw "
                    "the same number in every epoch, or its __len__ tell another one "
                    "before that begins"
                )
            return EpochOrder(indices, bounds)
        shape, is_ragged = _shape_of(batches)
        if is_ragged or shape != self.shape:
            raise LoaderRefused(
                "the batch sampler drew batches of another number or size than when "
                "it was prepared, where all had one size; let them keep their number "
                "and size in every epoch, or its __len__ tell another number before "
                "that begins, or let them differ in size from the first one on"
            )
        return EpochOrder(indices)


def _shape_of(batches: list[Any]) -> tuple[EpochShape, bool]:
    """How these batches cut an epoch, and whether they differ in size."""
    sizes = [len(batch) for batch in batches]
    size = sizes[0] if sizes else 1
    if any(other != size for other in sizes[:-1]) or (sizes and sizes[-1] > size):
        return EpochShape(
            position_count=len(sizes), batch_size=1, drop_last=False
        ), True
    return EpochShape(
        position_count=sum(sizes), batch_size=max(1, size), drop_last=False
    ), False


def _drawing_by(sampler: Any, generator: torch.Generator | None) -> Any:  # noqa: ANN401
    """The same sampler with another generator; the user's may be shared with others."""
    made = copy.copy(sampler)
    made.generator = generator
    return made


def _drawn_batches(sampler: Any, count_max: int) -> list[Any]:  # noqa: ANN401
    drawn = list(islice(sampler, count_max + 1))
    if len(drawn) > count_max:
        raise LoaderRefused(
            f"the batch sampler {type(sampler).__name__} draws more than "
            f"{count_max} batches, so nobody knows when its epoch ends; "
            "define its __len__"
        )
    return drawn


@contextlib.contextmanager
def _looking(sampler: Any, dataset: object) -> Iterator[Any]:  # noqa: ANN401
    """A sampler to draw from, of which nothing is to be seen later."""
    with (
        _untouched(sampler, dataset) as looked,
        drawing_from(_DRY_RUN_SEED, looked),
    ):
        yield looked


@contextlib.contextmanager
def _untouched(sampler: Any, dataset: object) -> Iterator[Any]:  # noqa: ANN401
    """A copy of a sampler, over the same data set; else itself, and put back then."""
    if is_fixed(sampler):
        yield sampler
        return
    try:
        # The data set may be large, and is looked at only.
        copied = copy.deepcopy(sampler, {id(dataset): dataset})
    except Exception as error:  # whatever a user's object may raise
        logger.info(
            "the sampler %s can't be copied (%s): to know its batches it is drawn from "
            "once, and its attributes are put back after that",
            type(sampler).__name__,
            error,
        )
    else:
        yield copied
        return
    both = sampler, getattr(sampler, "sampler", None)
    owners = [each for each in both if hasattr(each, "__dict__")]
    kept = [dict(vars(each)) for each in owners]
    try:
        yield sampler
    finally:
        for owner, attributes in zip(owners, kept, strict=True):
            vars(owner).clear()
            vars(owner).update(attributes)


def _length(sized: Any) -> int | None:  # noqa: ANN401, whatever may have one
    try:
        return len(sized)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def _check_length(sampler: object) -> None:
    if _length(sampler) is None:
        raise LoaderRefused(
            f"the sampler {type(sampler).__name__} has no __len__, so nobody knows "
            "when its epoch ends; define it"
        )


def _count_max(sampler: Any, loader: DataLoader[Any]) -> int:  # noqa: ANN401
    """Most that a sampler may draw: its length, else one for each sample."""
    length = _length(sampler)
    dataset: Any = loader.dataset
    return len(dataset) if length is None else length


def _draws_lists(sampler: Any, dataset: object) -> bool:  # noqa: ANN401
    """Whether a sampler draws lists of indices, for a dataset that takes them."""
    if isinstance(sampler, BatchSampler):
        return True
    if draws_by_generator(sampler) or type(sampler) is SequentialSampler:
        return False
    with _looking(sampler, dataset) as looked:
        first = next(iter(looked), None)
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
