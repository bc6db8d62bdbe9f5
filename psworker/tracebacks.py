"""Tracebacks of refusals and of Ctrl-C, which end in the line of the script.

Frames of psworker below it, and of what psworker has called, are left out; a function
of the script that psworker has called is shown again.

Imported first of all, so that Ctrl-C while the rest is imported is shown so too:
nothing but the standard library is imported here.
"""

import functools
import logging
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

logger: Final = logging.getLogger("psworker")

_PACKAGE: Final = __name__.partition(".")[0]
_IMPORTLIB: Final = "<frozen importlib"
_PACKAGE_FOLDERS: Final = ("site-packages", "dist-packages")
_MARK: Final = "_psworker_has_ended_it_in_script"
_LIBRARY: Final = sysconfig.get_path("stdlib") + os.sep

_shortened: tuple[type[BaseException], ...] = (KeyboardInterrupt,)
_has_hooks = False


def shorten(*kinds: type[BaseException]) -> None:
    """From now on errors of these kinds are shown with the script's frames only."""
    global _shortened
    _shortened = (*_shortened, *kinds)


def script_part(
    traceback: TracebackType | None, *, led_to_ours: bool = False
) -> TracebackType | None:
    """What is left of a traceback without psworker's frames and what they called.

    Args:
        traceback: Of an error.
        led_to_ours: Whether frames of ours have been left out at its end already.
    """
    shown: list[TracebackType] = []
    is_within = False
    while traceback is not None:
        frame = traceback.tb_frame
        if _is_ours(frame):
            is_within = True
            _drop_way(shown)
        elif is_within and not _is_of_library(frame):
            is_within = False
        if not is_within:
            shown.append(traceback)
        traceback = traceback.tb_next
    if led_to_ours:
        _drop_way(shown)
    part = None
    for each in reversed(shown):
        part = TracebackType(part, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return part


def end_in_script(error: BaseException) -> None:
    """Leaves out psworker's frames, and errors that psworker has met on its way."""
    is_again = getattr(error, _MARK, False)
    error.__traceback__ = script_part(error.__traceback__, led_to_ours=is_again)
    setattr(error, _MARK, True)
    context = error.__context__
    met_at = context.__traceback__ if context is not None else None
    if met_at is not None and (
        _is_ours(met_at.tb_frame) or _is_of_library(met_at.tb_frame)
    ):
        error.__suppress_context__ = True


def at_entrance(call: Callable[P, T]) -> Callable[P, T]:
    """Lets a refusal by a public function, or Ctrl-C in it, show none of its frames.

    They are logged at level DEBUG.
    """

    @functools.wraps(call)
    def entrance(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except _shortened as error:
            logger.debug("%s was ended", call.__qualname__, exc_info=True)
            end_in_script(error)
            raise  # which does not add this frame again, as `raise error` would

    return entrance


def install_hooks() -> None:
    """Shows uncaught errors so, in every thread; whoever has a hook still has it."""
    global _has_hooks
    if _has_hooks:
        return
    _has_hooks = True
    show, show_of_thread = sys.excepthook, threading.excepthook

    def hook(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, _shortened):
            end_in_script(error)
            traceback = error.__traceback__
        show(kind, error, traceback)

    def hook_of_thread(args: Any, /) -> None:  # noqa: ANN401, as in its stub
        error = args.exc_value
        if isinstance(error, _shortened):
            end_in_script(error)
            traceback = error.__traceback__
            args = threading.ExceptHookArgs(
                (args.exc_type, error, traceback, args.thread)
            )
        show_of_thread(args)

    sys.excepthook, threading.excepthook = hook, hook_of_thread


def _is_ours(frame: FrameType) -> bool:
    return _package(frame) == _PACKAGE


def _drop_way(shown: list[TracebackType]) -> None:
    """Drops the last frames if they are of `import`, or of torch, and run ours."""
    while shown and (
        _is_import(shown[-1].tb_frame) or _package(shown[-1].tb_frame) == "torch"
    ):
        shown.pop()


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def _is_import(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_IMPORTLIB)


def _is_of_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return (
        _is_import(frame)
        or name.startswith(_LIBRARY)
        or any(folder in name for folder in _PACKAGE_FOLDERS)
    )
