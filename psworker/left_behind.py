"""How psworker's objects are pickled and copied: not at all.

A trainer that has them as attributes is pickled as a whole for the spawned processes of
a `DataLoader`, because one method of it collates. There a placeholder takes the place
of each, and says its name when it is used. A copy to keep is refused: two would be one
worker.
"""

from multiprocessing.context import get_spawning_popen
from typing import Any, Final, NoReturn

from psworker.errors import UnsupportedError

_ADVICE: Final = (
    "leave it out of what is copied or saved, as by a __getstate__ of the object that "
    "holds it"
)


class LeftBehind:
    """In place of an object that belongs to the process which started this one."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __repr__(self) -> str:
        return f"<{self._what}, left in the process that started this one>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what pickle and others look for on any object
            raise AttributeError(name)
        raise UnsupportedError(
            f"{self._what} has no {name!r} here: it was left in the process that "
            "started this one, which alone takes part in the job; use it there"
        )


def reduced(what: str, way: str) -> tuple[Any, ...]:
    """What `__reduce_ex__` of an object returns that belongs to this process.

    Args:
        what: Its name, for people.
        way: What it is, and what to do instead of copying it.

    Raises:
        UnsupportedError: It is copied, or pickled for another use than a new process.
    """
    if get_spawning_popen() is not None:
        return LeftBehind, (what,)
    raise UnsupportedError(f"{what} can't be copied or pickled: {way}; {_ADVICE}")
