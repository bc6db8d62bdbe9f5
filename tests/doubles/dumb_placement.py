"""Placement a second time: element by element, slow and obviously right."""

from dataclasses import dataclass, field

from pswire.schema import ElementType, ModelSchema

Element = tuple[int, int]
"""Index of the entry, and the element's position in it."""


@dataclass
class DumbChunk:
    element_type: ElementType
    elements: list[Element] = field(default_factory=list)
    shard_index: int = -1

    @property
    def byte_count(self) -> int:
        return len(self.elements) * self.element_type.byte_count


@dataclass
class DumbPlacement:
    chunks: list[DumbChunk]
    vectors: dict[tuple[int, ElementType], list[Element]]


def dumb_place(
    schema: ModelSchema, shard_count: int, chunk_bytes: int
) -> DumbPlacement:
    chunks: list[DumbChunk] = []
    for entry_index, entry in enumerate(schema.entries):
        for position in range(entry.element_count):
            if (
                not chunks
                or chunks[-1].element_type is not entry.element_type
                or chunks[-1].byte_count + entry.element_type.byte_count > chunk_bytes
            ):
                chunks.append(DumbChunk(entry.element_type))
            chunks[-1].elements.append((entry_index, position))
    vectors: dict[tuple[int, ElementType], list[Element]] = {}
    for chunk in chunks:
        loads = [
            sum(other.byte_count for other in chunks if other.shard_index == shard)
            for shard in range(shard_count)
        ]
        chunk.shard_index = loads.index(min(loads))
        vector = vectors.setdefault((chunk.shard_index, chunk.element_type), [])
        vector.extend(chunk.elements)
    return DumbPlacement(chunks, vectors)
