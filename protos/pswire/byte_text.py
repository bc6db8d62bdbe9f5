"""Numbers of bytes in words."""

import re
from collections.abc import Mapping
from typing import Final

_FACTORS: Final[Mapping[str, int]] = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


def parsed_bytes(text: str) -> int:
    """The number of bytes, at least 1, that a text such as `5GB` or `512MiB` says.

    Raises:
        ValueError: It says none.
    """
    found = re.fullmatch(r"([0-9]{1,12}) ?([A-Z]+)", text.strip().upper())
    if found is None or found[2] not in _FACTORS or not int(found[1]):
        raise ValueError(f"{text[:64]!a} is no size, such as 5GB or 512MiB")
    return int(found[1]) * _FACTORS[found[2]]


def byte_text(count: float) -> str:
    """Bytes as a person reads them, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
