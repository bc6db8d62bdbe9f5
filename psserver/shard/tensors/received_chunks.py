"""Checks of the chunks that workers send."""

from pswire.placement import Chunk
from pswire.reasons import ErrorReason, Refusal


def present_count(
    chunk: Chunk,
    presence: tuple[bool, ...],
    membership: tuple[bool, ...],
    optimizer: str,
) -> int:
    """Elements of the slices that came.

    Args:
        chunk: The chunk.
        presence: Which of its slices came.
        membership: Slices that may come.
        optimizer: Whose push it is, for the text.

    Raises:
        Refusal: `CHUNK_INVALID` for a slice that may not.
    """
    count = 0
    for piece, present, is_member in zip(
        chunk.slices, presence, membership, strict=True
    ):
        if present and not is_member:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {chunk.index} has a slice of tensor {piece.entry_index}, "
                f"which {optimizer[:64]!r} does not update",
            )
        count += piece.element_count * present
    return count
