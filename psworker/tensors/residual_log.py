"""Says in the log that residuals were thrown away, and not once for each."""

import logging
from typing import Final

from pswire.limits import GRADIENT_NORM_MAX

logger: Final = logging.getLogger("psworker")

PUSH_COUNT_PER_LINE: Final = 100
"""Gradients near the limit have it in every second push."""


class ResidualLog:
    """One line for the first push without a residual, then one for each hundred."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, chunk_count: int) -> None:
        """A push that counts was sent without the residuals of some chunks.

        Args:
            chunk_count: How many; at least 1.
        """
        self._count += 1
        if self._count == 1:
            logger.warning(
                "in %d of a push's chunks what earlier ones had not sent was thrown "
                "away, since together with the gradient its norm was not finite or "
                "above %g, which no shard takes; the gradient itself was sent. "
                "Gradients so large most often mean that training diverges: lower the "
                "learning rate, or clip with prepare(..., clip_grad_norm=...)",
                chunk_count,
                GRADIENT_NORM_MAX,
            )
        elif self._count % PUSH_COUNT_PER_LINE == 0:
            logger.warning(
                "%d pushes were sent without what earlier ones had left out so far",
                self._count,
            )
