"""Sparse gradients of flat tensors, as torch's optimizers take them."""

from collections.abc import Iterator, Sequence

import torch

from pswire.placement import Slice


def sparse_vector(
    pieces: Sequence[Slice],
    places: Sequence[torch.Tensor | None],
    gradient: torch.Tensor,
) -> torch.Tensor:
    """The gradient of neighbouring slices, coalesced, sharing memory with `gradient`.

    Args:
        pieces: The slices.
        places: Where the elements of each are in it, ascending; None for all of it.
        gradient: Begins with these elements, 1-D; what follows is left.
    """
    checks = torch.sparse.check_sparse_tensor_invariants
    if not checks.is_enabled():
        # As it is; but torch warns of it until somebody has said so. The positions come
        # from rows that were checked, and torch's optimizers make no others.
        checks.disable()
    indices = torch.cat(list(_shifted(pieces, places)))
    return torch.sparse_coo_tensor(
        indices[None],
        gradient[: len(indices)],
        (sum(piece.element_count for piece in pieces),),
        is_coalesced=True,
        check_invariants=False,
    )


def at_origin(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, sharing memory, as a tensor with storage offset 0.

    torch (2.13 and before) adds a coalesced sparse vector to a dense one on the CPU at
    twice the storage offset of that: into the memory of others, or into nobody's.

    Args:
        tensor: 1-D and contiguous, on the CPU.
    """
    if not tensor.storage_offset():
        return tensor
    return torch.from_numpy(tensor.view(torch.uint8).numpy()).view(tensor.dtype)


def _shifted(
    pieces: Sequence[Slice], places: Sequence[torch.Tensor | None]
) -> Iterator[torch.Tensor]:
    start = 0
    for piece, where in zip(pieces, places, strict=True):
        yield (torch.arange(piece.element_count) if where is None else where) + start
        start += piece.element_count
