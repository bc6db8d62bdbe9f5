"""What goes wrong with checkpoints. Each text says what, why, and what to do."""

from typing import Final

from pswire.reasons import Refusal

UNREADABLE: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    Refusal,
    TypeError,
    ValueError,
)
"""What decoding raises of stored values that no release has written."""


class CheckpointError(Exception):
    """A checkpoint can't be written, read or deleted."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is not as it was written. Another one may be whole."""


class MissingError(CheckpointError):
    """There is no such checkpoint, or none that is complete."""


class FormatError(CheckpointError):
    """A newer release wrote the checkpoint."""


class OwnerError(CheckpointError):
    """The folder is another job's, or another coordinator writes there now."""


class StorageError(CheckpointError):
    """The folder can't be read or written, whatever its files are like."""
