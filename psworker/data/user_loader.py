"""What is put in place of a user's loader: a wrapper, and copies that fetch otherwise.

A copy is a shallow one and not a new loader: whatever options its class has, of this
and later releases of torch, are those of the user's.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from psworker.data.order import LoaderRefused


class PreparedLoader:
    """Has the attributes of the loader that was prepared.

    What a script sets here is set there, and counts, or is refused, as without a job: a
    `collate_fn` from the next iteration on, a `batch_size` never. Only names that the
    wrapper itself has are its own.
    """

    # Set last in `__init__`: from then on the wrapper has no new names.
    _loader: DataLoader[Any]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401, the wrapped one's
        if name == "_loader":  # Not yet set while being made, unpickled or copied.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: object) -> None:
        if self._is_own(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self._loader, name)

    def _is_own(self, name: str) -> bool:
        own = vars(self)
        return "_loader" not in own or name in own or hasattr(type(self), name)


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
        seeds: Generator of the seeds of worker processes.
    """
    options = {
        _drawn_through(loader): feed,
        "generator": seeds,
        # Batches must come in the order of their ranges.
        "in_order": True,
        # Its pipeline may run dry and start again within one epoch.
        "persistent_workers": loader.num_workers > 0,
    }
    return _copied(loader, options)


def noting(
    loader: DataLoader[Any], feed: object, *, older: DataLoader[Any] | None
) -> DataLoader[Any]:
    """A copy that draws through a feed and is the user's in all else.

    The persistent processes of `older`, the copy before this one, go on.
    """
    return _copied(loader, {_drawn_through(loader): feed}, older)


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
    """A copy whose batches have the number of their samples before them.

    The persistent processes of `older`, the copy before this one, go on.
    """
    collate = _CountingCollate(
        loader.collate_fn, is_batched=loader.batch_sampler is not None
    )
    return _copied(loader, {"collate_fn": collate}, older)


def _copied(
    loader: DataLoader[Any],
    options: Mapping[str, object],
    older: DataLoader[Any] | None = None,
) -> DataLoader[Any]:
    made = copy.copy(loader)
    # Past torch's own setter, which lets no sampler be set.
    vars(made).update(options, _iterator=None if older is None else older._iterator)
    return made


def _drawn_through(loader: DataLoader[Any]) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


class _CountingCollate:
    """Runs where the user's does: in worker processes, if there are any."""

    def __init__(self, collate: Callable[[Any], Any], *, is_batched: bool) -> None:
        self._collate = collate
        self._is_batched = is_batched

    def __call__(self, samples: Any) -> tuple[int, Any]:  # noqa: ANN401
        count = len(samples) if self._is_batched else 1
        return count, self._collate(samples)
