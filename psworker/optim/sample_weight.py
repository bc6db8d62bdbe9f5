"""The number of samples behind a gradient, as users give it."""

import math

from psworker.errors import ConfigurationError


def check_weight(weight: float | None) -> None:
    """Checks what was given as `step(weight=...)`.

    Raises:
        ConfigurationError: It is no number of samples.
    """
    if weight is not None and not (math.isfinite(weight) and weight >= 0):
        raise ConfigurationError(
            f"weight={weight} is not a number of samples: it must be finite and at "
            "least 0"
        )
