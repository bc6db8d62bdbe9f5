"""Refusals and Ctrl-C end at the call that a script made, without what is inside."""

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
    WaitTimeoutError,
)
from psworker.tracebacks import end_in_script, shorten

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
    WaitTimeoutError,
)
"""Errors that speak of the script, its place or its job, so that their line says all.
Where psworker was when it saw that tells nothing more. Whatever else is raised may be a
bug of ours, and keeps its traceback whole."""


shorten(*REFUSALS)


def at_entrance(call: Callable[P, T]) -> Callable[P, T]:
    """Lets a refusal by a public function, or Ctrl-C in it, show none of its frames.

    They are logged at level DEBUG.
    """

    @functools.wraps(call)
    def entrance(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except (*REFUSALS, KeyboardInterrupt) as error:
            logger.debug("%s was ended", call.__qualname__, exc_info=True)
            end_in_script(error)
            raise  # which does not add this frame again, as `raise error` would

    return entrance
