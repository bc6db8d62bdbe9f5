"""Warns of a script that writes to parameters by itself.

The values live on the shards: the next ones overwrite what a script writes into its
copies, unless it publishes them. What is undone before the step, as the perturbation of
a sharpness-aware optimizer, is no edit.
"""

import logging
from collections.abc import Collection, Sequence
from typing import Final

import torch

from pswire.schema import EntryKind, ModelSchema
from psworker.tensors.samples import Look, Samples, are_close

logger: Final = logging.getLogger("psworker")


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
