"""What becomes of psworker's objects where a script is pickled or copied with them.

A trainer that has them as attributes travels as a whole to the processes of a
`DataLoader` that are spawned, for one method of it that collates. There they are left
out: none of them is wanted, and each says its name where it is. Whoever wants a copy to
keep is refused, since two of them would speak for one worker.
"""

from multiprocessing.context import get_spawning_popen
from typing import Any, Final, NoReturn

from psworker.errors import UnsupportedError

_ADVICE: Final = (
    "leave it out of what is copied or saved, as by a __getstate__ of the object that "
    "holds it"
)


class LeftBehind:
    """Stands where an object was that belongs to the process which started this one."""

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
    """How an object that belongs to this process is pickled: for a new process only.

    Args:
        what: Its name, for people.
        way: What it is, and what to do instead of copying it.

    Raises:
        UnsupportedError: It is copied, or pickled to be kept.
    """
    if get_spawning_popen() is not None:
        return LeftBehind, (what,)
    raise UnsupportedError(f"{what} can't be copied or pickled: {way}; {_ADVICE}")
