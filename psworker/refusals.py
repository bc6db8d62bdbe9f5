"""Refusals end at the call that a script made, without the frames inside of it."""

import functools
import logging
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from psworker.errors import (
    ClosedError,
    ConfigurationError,
    ConnectError,
    DataOrderError,
    OptimizerMismatchError,
    OptimizerUnsupportedError,
    SchemaMismatchError,
    SplitError,
    UnsupportedError,
)

P = ParamSpec("P")
T = TypeVar("T")

logger: Final = logging.getLogger("psworker")

REFUSALS: Final = (
    ClosedError,
    ConfigurationError,
    ConnectError,
    DataOrderError,
    OptimizerMismatchError,
    OptimizerUnsupportedError,
    SchemaMismatchError,
    SplitError,
    UnsupportedError,
)
"""Errors that speak of the script or its place, so that their line says all. Where
psworker was when it saw that tells nothing more. Whatever else is raised may be a bug
of ours, and keeps its traceback whole."""


def at_entrance(call: Callable[P, T]) -> Callable[P, T]:
    """Lets a refusal by a public function show none of psworker's frames but one.

    They are logged at level DEBUG.
    """

    @functools.wraps(call)
    def entrance(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except REFUSALS as refusal:
            logger.debug("%s refused", call.__qualname__, exc_info=True)
            raise refusal.with_traceback(None) from refusal.__cause__

    return entrance
