"""Notices that a script has changed parameters by itself.

The values live on the shards: what a script writes into its own copies is gone with
the next values that come. Torch counts the writes to a tensor, so that looking costs
a comparison for each tensor. Writes through `.data` and to memory behind torch's back
are not counted, and not seen here.
"""

import logging
from collections.abc import Sequence
from typing import Final

import torch

from pswire.schema import EntryKind, ModelSchema

logger: Final = logging.getLogger("psworker")


class EditedValues:
    """Warns once."""

    def __init__(self, schema: ModelSchema, tensors: Sequence[torch.Tensor]) -> None:
        """Starts with values that are those of the shards.

        Args:
            schema: What the tensors are.
            tensors: One for each entry.
        """
        self._schema = schema
        self._tensors = tensors
        self._indexes = [
            index
            for index, entry in enumerate(schema.entries)
            if entry.kind == EntryKind.PARAMETER
        ]
        self._has_warned = False
        self._versions: list[int] = []
        self.note()

    def note(self) -> None:
        """The values are as they came."""
        if not self._has_warned:
            self._versions = self._now()

    def check(self) -> None:
        """Warns if a parameter was written to since."""
        if self._has_warned or (now := self._now()) == self._versions:
            return
        self._has_warned = True
        edited = [
            index
            for index, before, after in zip(
                self._indexes, self._versions, now, strict=True
            )
            if before != after
        ]
        first = self._schema.entries[edited[0]]
        others = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
        logger.warning(
            "the script has changed the values of %r of %s%s between two steps; they "
            "are lost with the next values from the shards, which hold the job's "
            "own. Set values (load_state_dict() too) before prepare(), and make what "
            "holds for every step a part of the model, such as with "
            "torch.nn.utils.parametrize",
            first.name,
            first.model,
            others,
        )

    def _now(self) -> list[int]:
        return [self._tensors[index]._version for index in self._indexes]
