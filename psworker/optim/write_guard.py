"""Notices by samples that a script has written to tensors, and warns if that is lost.

The values live on the shards: the next ones overwrite what a script writes into its
copies, unless it publishes them. What is undone before the step, as the perturbation of
a sharpness-aware optimizer, is no edit.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from pswire.schema import EntryKind, ModelSchema
from pswire.torch_types import bytes_of

logger: Final = logging.getLogger("psworker")

_COUNT: Final = 32
"""Elements of each tensor that are compared, and up to twice as many."""

_ROUNDING_COUNT: Final = 4
"""Roundings that adding and taking away again may have made."""

_PERTURBATION: Final = 0.1
"""Size of what is added and taken away, beside that of the values themselves."""

Look = tuple[int, int, bytes]
"""Where a tensor is, torch's count of writes to it, and the bytes of its sample."""


class Samples:
    """Looks at the same elements of the same tensors again and again.

    Cheap enough for each step: half a microsecond for each tensor in host memory.
    Writes through `.data`, which torch does not count, are seen too. An edit of a few
    elements of a large tensor may not be.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._addresses = [0] * len(tensors)
        self._parts: list[Any] = [_NOTHING] * len(tensors)
        self._elsewhere: dict[int, torch.Tensor] = {}

    def looks(self) -> list[Look]:
        """Of each tensor, how it looks now."""
        addresses = [each.data_ptr() for each in self.tensors]
        if addresses != self._addresses:
            self._find(addresses)
        bits = [part.tobytes() for part in self._parts]
        if self._elsewhere:
            here = bytes_here(self._elsewhere.values())
            for position, part in zip(self._elsewhere, here, strict=True):
                bits[position] = part.numpy().tobytes()
        versions = [each._version for each in self.tensors]
        return list(zip(addresses, versions, bits, strict=True))

    def _find(self, addresses: list[int]) -> None:
        """Takes views of tensors that are elsewhere now."""
        pairs = enumerate(zip(addresses, self._addresses, strict=True))
        for position, (new, old) in pairs:
            if new == old:
                continue
            view = _view(self.tensors[position])
            self._elsewhere.pop(position, None)
            if view is None or view.device.type != "cpu":
                self._parts[position] = _NOTHING
                if view is not None:
                    self._elsewhere[position] = view
            else:
                self._parts[position] = view.numpy()
        self._addresses = addresses


_NOTHING: Final = np.empty(0, dtype=np.uint8)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def are_close(old: bytes, new: bytes, dtype: torch.dtype) -> bool:
    """Whether floats differ by no more than adding and taking away again rounds."""
    if len(old) != len(new):
        return False
    if old == new:
        return True
    before, now = (
        torch.frombuffer(bytearray(each), dtype=dtype).double() for each in (old, new)
    )
    finite = before[before.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 0.0
    limit = torch.finfo(dtype).eps * _ROUNDING_COUNT * (largest + _PERTURBATION)
    is_close = (before == now) | (before.isnan() & now.isnan())
    return bool((is_close | ((now - before).abs() <= limit)).all())


@torch.no_grad()
def bytes_here(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of each tensor, 1-D in host memory: one transfer from each device."""
    found = [bytes_of(each) for each in tensors]
    positions_by_device: dict[torch.device, list[int]] = {}
    for position, part in enumerate(found):
        if part.device.type != "cpu":
            positions_by_device.setdefault(part.device, []).append(position)
    for positions in positions_by_device.values():
        parts = [found[position] for position in positions]
        fetched = torch.cat(parts).cpu().split([len(part) for part in parts])
        for position, part in zip(positions, fetched, strict=True):
            found[position] = part
    return found


@torch.no_grad()
def _view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bits of elements at equal distances in memory, 1-D.

    None of a tensor whose elements are no run of memory, or that has none.
    """
    count = tensor.numel()
    if not count or not _is_dense(tensor):
        return None
    distance = max(1, count // _COUNT)
    length = (count - 1) // distance + 1
    whole = tensor.detach().view(_BITS[tensor.itemsize])
    return whole.as_strided((length,), (distance,), whole.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are a run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


class WriteGuard:
    """Warns once of writes that are lost, and once of those no snapshot will have."""

    def __init__(
        self,
        schema: ModelSchema,
        tensors: Sequence[torch.Tensor],
        *,
        held: Collection[int],
        followed: Collection[int] = (),
    ) -> None:
        """Takes the values for those of the shards.

        Args:
            schema: What the tensors are.
            tensors: One for each entry.
            held: Entries that some optimizer has.
            followed: Of the others, those whose values are sent when they change.
        """
        self._schema = schema
        self._held = frozenset(held)
        self._indexes = [
            index
            for index, entry in enumerate(schema.entries)
            if entry.kind == EntryKind.PARAMETER
            and entry.element_count
            and index not in followed
        ]
        self._samples = Samples([tensors[index] for index in self._indexes])
        self._has_warned_of_lost = False
        self._has_warned_of_unknown = False
        self._noted: list[Look] = []
        self.note()

    def note(self) -> None:
        """The values are those of the shards now."""
        self._noted = self._samples.looks()

    @property
    def has_writes(self) -> bool:
        """Whether a parameter was written to since, with whatever values."""
        return self._noted != self._samples.looks()

    def check(self, clock: int) -> None:
        """Warns if a parameter has other values; `clock` is that of the next step."""
        if self._has_warned_of_lost and self._has_warned_of_unknown:
            return
        looks = self._samples.looks()
        if looks == self._noted:
            return
        edited = self._edited(looks)
        lost = [index for index in edited if index in self._held]
        unknown = [index for index in edited if index not in self._held]
        if lost and not self._has_warned_of_lost:
            self._has_warned_of_lost = True
            logger.warning(
                "step %d: the script has changed the values of %s since those of the "
                "step before came. They are lost with the next values from the "
                "shards, which hold the job's own: call ps.publish(model) after such "
                "a change, at the same place on every worker, or make what holds for "
                "every step a part of the model, such as with "
                "torch.nn.utils.parametrize",
                clock,
                self._named(lost),
            )
        if unknown and not self._has_warned_of_unknown:
            self._has_warned_of_unknown = True
            logger.warning(
                "step %d: the script has changed the values of %s, which no optimizer "
                "has. They stay as they are here, but snapshots and workers that join "
                "later have those of prepare(): call ps.publish(model) before either "
                "needs them",
                clock,
                self._named(unknown),
            )

    def _edited(self, looks: Sequence[Look]) -> list[int]:
        """Entries with other values than those of the shards."""
        tensors = self._samples.tensors
        return [
            index
            for index, tensor, old, new in zip(
                self._indexes, tensors, self._noted, looks, strict=True
            )
            if not are_close(old[2], new[2], tensor.dtype)
        ]

    def _named(self, edited: Sequence[int]) -> str:
        first = self._schema.entries[edited[0]]
        others = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
        return f"{first.name!r} of {first.model}{others}"
