"""Whether a job's model fits its shards, before any of them takes a byte of it.

The figures are those of docs/memory.md. What comes and goes by itself, as images for
readers and answers, is left out: a model is refused only if it can't be trained, or no
checkpoint of it made where the job makes some.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from psserver.edge.memory_grant import MemoryGrant
from pswire.byte_text import byte_text
from pswire.optimizers import slot_count
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import NARROW_TYPES, ModelSchema, OptimizerSpec

if TYPE_CHECKING:
    from psserver.coordinator.core.shard_map import ShardSlot

PROCESS_BYTES: Final = 220 << 20
"""What a shard takes before it has a model."""

APPLY_THREAD_COUNT: Final = 4
"""Threads of a shard that apply updates, unless `--threads` says how many."""

_MASTER_BYTES: Final = 4
"""Of an element of 16 bits that an optimizer updates, as it updates it."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a model takes at all shards together, in bytes.

    Attributes:
        values: Parameters and buffers.
        state: Of optimizers, from their first step on, with master values.
        members: Kept for members: gradients of a clock until all are there, and values
            that each was given where updates are compressed or compensated.
        image: The copy of values and state that a checkpoint is written from.
    """

    values: int
    state: int
    members: int
    image: int = 0

    @classmethod
    def of(
        cls,
        schema: ModelSchema,
        optimizers: Sequence[OptimizerSpec],
        kept_count: int,
        *,
        scratch_bytes: int = 0,
        makes_checkpoints: bool = False,
    ) -> "ModelMemory":
        """What a model takes.

        Args:
            schema: Its tensors.
            optimizers: All declarations of its optimizers.
            kept_count: How many copies of all that is updated are kept for members.
            scratch_bytes: What looking at gradients one by one takes.
            makes_checkpoints: Whether the job makes checkpoints.
        """
        slots: dict[tuple[str, int], int] = {}
        for spec in optimizers:
            for group in spec.groups:
                names = spec.hyperparameter_names
                count = slot_count(spec.class_name, names, group.hyperparameters)
                for index in group.entry_indexes:
                    key = spec.name, index
                    slots[key] = max(count, slots.get(key, 0))
        updated = {index for _, index in slots}
        state = sum(
            count * schema.entries[index].element_count * _state_bytes(schema, index)
            for (_, index), count in slots.items()
        )
        masters = sum(
            _MASTER_BYTES * schema.entries[index].element_count
            for index in updated
            if schema.entries[index].element_type in NARROW_TYPES
        )
        gradient = sum(schema.entries[index].byte_count for index in updated)
        values = sum(entry.byte_count for entry in schema.entries)
        state += masters
        return cls(
            values=values,
            state=state,
            members=kept_count * gradient + scratch_bytes,
            image=values + state if makes_checkpoints else 0,
        )

    @property
    def byte_count(self) -> int:
        """All of it."""
        return self.values + self.state + self.members + self.image

    def check_fits(self, slots: "Sequence[ShardSlot]") -> None:
        """Checks that each shard's part fits the memory that it may use.

        Raises:
            Refusal: `MEMORY_EXCEEDED`, with both numbers and the number of shards that
                would do; no state changed.
        """
        part = PROCESS_BYTES + -(-self.byte_count // len(slots))
        sharing: dict[MemoryGrant, list[int]] = {}
        for slot in slots:
            if slot.memory.byte_count:
                alone = slot.memory.scope or f"shard {slot.index}"
                grant = MemoryGrant(slot.memory.byte_count, alone)
                sharing.setdefault(grant, []).append(slot.index)
        for grant, indexes in sharing.items():
            if part * len(indexes) > grant.byte_count:
                raise Refusal(
                    ErrorReason.MEMORY_EXCEEDED,
                    self._text(part, grant.byte_count, indexes, len(slots)),
                )

    def _text(
        self, part: int, byte_count: int, indexes: list[int], shard_count: int
    ) -> str:
        names = ", ".join(str(index) for index in indexes)
        who = (
            f"shard {names} may use {byte_text(byte_count)}"
            if len(indexes) == 1
            else f"shards {names} share {byte_text(byte_count)}"
        )
        image = f", for checkpoints {byte_text(self.image)}" if self.image else ""
        return (
            f"the model does not fit: each of {shard_count} shards would take "
            f"{byte_text(part)} (of all together: values {byte_text(self.values)}, "
            f"optimizer state {byte_text(self.state)}, for members "
            f"{byte_text(self.members)}{image}), and {who}; {self._enough(byte_count)}"
        )

    def _enough(self, byte_count: int) -> str:
        room = byte_count - PROCESS_BYTES
        if room <= 0:
            return "no number of shards with so little memory would do"
        return (
            f"{-(-self.byte_count // room)} shards would do, each with "
            f"{byte_text(byte_count)} of its own"
        )


def _state_bytes(schema: ModelSchema, index: int) -> int:
    """Bytes of an element of an optimizer's state."""
    element_type = schema.entries[index].element_type
    return _MASTER_BYTES if element_type in NARROW_TYPES else element_type.byte_count
