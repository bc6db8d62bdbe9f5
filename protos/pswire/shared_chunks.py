"""Messages about chunks whose elements are in shared memory.

Small, and still assembled by hand: a step sends one for each MiB both ways. The bytes
are those of the generated code; see `frames`.
"""

import struct
from typing import Final

from pswire.frames import ENCODING_SHARED_MEMORY, SHARED_CHUNKS_FIELD, join_fields
from pswire.shared_layout import SharedRun

_OUTER: Final = b"\xc2\x02"
_INDEX: Final = b"\x0d"
_LAST_AND_ENCODING: Final = b"\x18\x01\x20" + bytes([ENCODING_SHARED_MEMORY])
_DIGEST: Final = b"\x29"
_PRESENCE_FIELD: Final = 6
_SEGMENT: Final = b"\xc1\x02"
_LENGTH: Final = b"\xc9\x02"
_VERSION: Final = b"\xd1\x02"

_FIXED32_FORMAT: Final = struct.Struct("<I")
_FIXED64_FORMAT: Final = struct.Struct("<Q")


def encode_shared_chunk(
    *, index: int, presence: bytes, digest: int, shared: SharedRun
) -> bytes:
    """Builds a message that holds only a chunk whose elements are in shared memory.

    Such messages may be joined to one that holds several.

    Args:
        index: Index of the chunk in the placement.
        presence: One bit for each slice; see `frames.bits_to_bytes`.
        digest: XXH3-64 of the elements.
        shared: Where they are.
    """
    fields = b"".join(
        (
            _INDEX + _FIXED32_FORMAT.pack(index) if index else b"",
            _LAST_AND_ENCODING,
            _fixed64(_DIGEST, digest),
            join_fields((_PRESENCE_FIELD, presence)) if presence else b"",
            _fixed64(_SEGMENT, shared.segment),
            _fixed64(_LENGTH, shared.length),
            _fixed64(_VERSION, shared.version),
        )
    )
    return join_fields((SHARED_CHUNKS_FIELD, fields))


def is_shared_chunk(message: bytes) -> bool:
    """Whether a message of one chunk may be joined to others like it."""
    return message.startswith(_OUTER)


def _fixed64(tag: bytes, value: int) -> bytes:
    return tag + _FIXED64_FORMAT.pack(value) if value else b""
