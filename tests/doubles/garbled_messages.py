"""Messages that are cut, overwritten, added to and thinned out."""

from typing import Final

Change = tuple[str, int, int, bytes]
"""Its kind, its place as a share of the length in 1/256, a count, and noise."""

CHANGE_KINDS: Final = ("cut", "overwrite", "insert", "delete", "repeat")


def mutated(message: bytes, changes: list[Change]) -> bytes:
    """A message with all of these changes, one after the other."""
    data = bytearray(message)
    for kind, share, count, noise in changes:
        place = len(data) * share // 256
        if kind == "cut":
            del data[place:]
        elif kind == "overwrite":
            data[place : place + len(noise)] = noise[: len(data) - place]
        elif kind == "insert":
            data[place:place] = noise
        elif kind == "delete":
            del data[place : place + count]
        else:
            data += bytes(data[place:]) * count
    return bytes(data)
