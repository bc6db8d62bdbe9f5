"""How a user says how to send fewer bytes."""

from pswire.compression import NO_COMPRESSION, Compression
from pswire.encodings.known import ENCODINGS
from psworker.errors import ConfigurationError

__all__ = ["Compression", "CompressionChoice", "read_compression"]

CompressionChoice = str | Compression | None
"""The name of a method, for both directions, or all of it."""


def read_compression(choice: CompressionChoice) -> Compression:
    """The choice of how to send fewer bytes.

    Raises:
        ConfigurationError: There is no such method.
    """
    if choice is None:
        return NO_COMPRESSION
    if isinstance(choice, Compression):
        return choice
    if choice not in list(ENCODINGS):
        raise ConfigurationError(
            f"compression={choice!r} is no way to send fewer bytes: give one of "
            f"{', '.join(map(repr, ENCODINGS))}, or a psworker.Compression, or leave "
            "it out"
        )
    return Compression(choice, choice)
