"""How often a job makes a checkpoint."""

import re
from dataclasses import dataclass
from typing import Final

_FORM: Final = re.compile(r"(?P<count>[0-9]{1,12}) ?(?P<unit>[a-z]+)")
_UNIT_MS: Final = {"s": 1_000, "min": 60_000, "h": 3_600_000}
_STEPS: Final = ("step", "steps")
_DURATION_MS_MAX: Final = 366 * 24 * 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInterval:
    """How often a job makes a checkpoint: by steps or by time.

    Attributes:
        step_count: Steps of all workers between two checkpoints; 0 for by time.
        duration_ms: Time between two checkpoints; 0 for by steps.
    """

    step_count: int = 0
    duration_ms: int = 0

    @classmethod
    def parse(cls, text: str) -> "CheckpointInterval":
        """Reads what `str` writes.

        Raises:
            ValueError: It is no interval; the text says what is one.
        """
        found = _FORM.fullmatch(text.strip())
        count = int(found["count"]) if found else 0
        unit = found["unit"] if found else ""
        if count and unit in _STEPS:
            return cls(step_count=count)
        duration_ms = count * _UNIT_MS.get(unit, 0)
        if not 0 < duration_ms <= _DURATION_MS_MAX:
            raise ValueError(
                f"{text[:64]!r} is not how often a checkpoint is made: give a number "
                "of steps such as 500steps, or a time of at most a year such as 90s, "
                "10min or 2h"
            )
        return cls(duration_ms=duration_ms)

    def __str__(self) -> str:
        if self.step_count:
            return f"{self.step_count}steps"
        unit = max(
            (unit for unit, ms in _UNIT_MS.items() if self.duration_ms % ms == 0),
            key=_UNIT_MS.__getitem__,
        )
        return f"{self.duration_ms // _UNIT_MS[unit]}{unit}"


EVERY_TEN_MINUTES: Final = CheckpointInterval(duration_ms=600_000)
