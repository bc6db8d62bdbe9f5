"""What a host group can't do, and what it says of that."""

from typing import Final

from pswire.compression import NO_COMPRESSION
from psworker.errors import (
    UnsupportedError,
)
from psworker.optim.prepare import Prepared


def refuse_unsupported(given: Prepared, *, overlap: bool) -> None:
    """Checks that a group of processes can do what was prepared.

    Raises:
        UnsupportedError: It can't; the text says what to do.
    """
    cure = "or start the processes without --one-push-per-host"
    if overlap:
        raise UnsupportedError(
            "prepare(overlap=True) is not possible with one push per host: gradients "
            f"are added up on the host before any leaves; leave overlap out, {cure}"
        )
    if given.compression != NO_COMPRESSION:
        raise UnsupportedError(
            "compression is not possible with one push per host yet: leave it out, "
            + cure
        )
    if len(given.specs) != 1:
        raise UnsupportedError(
            f"{len(given.specs)} optimizers are not possible with one push per host: "
            f"use one, {cure}"
        )


SPARSE_TEXT: Final = (
    "a sparse gradient is not possible with one push per host: build the embedding "
    "with sparse=False, or start the processes without --one-push-per-host"
)
FLOAT16_TEXT: Final = (
    "a float16 gradient that carries a loss scale is not possible with one push per "
    "host: train in bfloat16 or float32, or start the processes without "
    "--one-push-per-host"
)
