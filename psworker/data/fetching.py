"""Copies of a user's loader that fetch other batches, or count what they fetch.

A shallow copy and not a new loader: whatever options its class has, of this and later
releases of torch, are those of the user's.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from psworker.data.order import LoaderRefused


def refuse_own_iteration(loader: DataLoader[Any]) -> None:
    """Refuses a loader whose class has an iteration of its own: it would be lost.

    Raises:
        LoaderRefused: It has.
    """
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise LoaderRefused(
            f"the loader's class {type(loader).__name__} has an __iter__ of its own, "
            "which leased loading does not call; do in a collate_fn or around the "
            "prepared loader what it does, or leave the loader out of prepare() and "
            "name the weight in optimizer.step(weight=n)"
        )


def fetching(
    loader: DataLoader[Any], feed: object, *, seeds: torch.Generator
) -> DataLoader[Any]:
    """A copy that fetches what a feed names, in that order.

    Args:
        loader: The user's.
        feed: Iterable of lists of indices; of indices, for a loader without batches.
        seeds: Where worker processes' seeds come from.
    """
    made = copy.copy(loader)
    options = vars(made)
    options["sampler" if loader.batch_sampler is None else "batch_sampler"] = feed
    options["generator"] = seeds
    # Batches must come in the order of their ranges.
    options["in_order"] = True
    # Its pipeline may run dry and start again within one epoch.
    options["persistent_workers"] = loader.num_workers > 0
    options["_iterator"] = None
    return made


def noting(
    loader: DataLoader[Any], feed: object, *, older: DataLoader[Any] | None
) -> DataLoader[Any]:
    """A copy that draws through a feed and is the user's in all else.

    Args:
        loader: The user's.
        feed: What it draws through.
        older: The copy before this one, whose persistent processes go on.
    """
    made = copy.copy(loader)
    options = vars(made)
    options["sampler" if loader.batch_sampler is None else "batch_sampler"] = feed
    options["_iterator"] = older._iterator if older is not None else None
    return made


def end_processes(iterator: object) -> None:
    """Ends the worker processes of an iterator that has failed, if it has any.

    Left to garbage collection they would outlive the error that a script handles, and
    a process forked meanwhile would take seconds to end.
    """
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


def counting(
    loader: DataLoader[Any], *, older: DataLoader[Any] | None
) -> DataLoader[Any]:
    """A copy whose batches come with the number of their samples before them.

    Args:
        loader: The user's.
        older: The copy before this one, whose persistent processes go on.
    """
    made = copy.copy(loader)
    options = vars(made)
    options["collate_fn"] = _CountingCollate(
        loader.collate_fn, is_batched=loader.batch_sampler is not None
    )
    options["_iterator"] = older._iterator if older is not None else None
    return made


class _CountingCollate:
    """Runs where the user's does: in worker processes, if there are any."""

    def __init__(self, collate: Callable[[Any], Any], *, is_batched: bool) -> None:
        self._collate = collate
        self._is_batched = is_batched

    def __call__(self, samples: Any) -> tuple[int, Any]:  # noqa: ANN401
        count = len(samples) if self._is_batched else 1
        return count, self._collate(samples)
