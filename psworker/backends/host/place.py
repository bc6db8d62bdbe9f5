"""Which process of which host group this is: what `psworker run` tells it.

PS_HOST_GROUP     names the group on this machine; absent where there is none
PS_LOCAL_SIZE     processes of the group
PS_LOCAL_RANK     number of this one, from 0
PS_RESTART_COUNT  how often it was started again, 0 where nothing is said
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from psworker.errors import ConfigurationError

GROUP_VARIABLE: Final = "PS_HOST_GROUP"
COUNT_VARIABLE: Final = "PS_LOCAL_SIZE"
INDEX_VARIABLE: Final = "PS_LOCAL_RANK"
RESTARTS_VARIABLE: Final = "PS_RESTART_COUNT"
PROCESS_COUNT_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class HostPlace:
    """One process of a group.

    Attributes:
        group: Names the group of this job on this machine.
        index: Number of the process, from 0.
        count: Processes of the group.
        is_restart: Whether this one was in it before, so that the others are there by
            now, or done.
    """

    group: str
    index: int
    count: int
    is_restart: bool = False


def find_host_place(environ: Mapping[str, str] | None = None) -> HostPlace | None:
    """This process's place in a host group; `None` if it is in none.

    Raises:
        ConfigurationError: The variables do not go together.
    """
    variables = os.environ if environ is None else environ
    group = variables.get(GROUP_VARIABLE, "")
    if not group:
        return None
    numbers = [variables.get(name, "") for name in (INDEX_VARIABLE, COUNT_VARIABLE)]
    if not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise ConfigurationError(
            f"{GROUP_VARIABLE}={group} needs {INDEX_VARIABLE}, the number of this "
            f"process from 0, and {COUNT_VARIABLE}, how many there are: set both, or "
            "start the processes with `psworker run --one-push-per-host`"
        )
    index, count = map(int, numbers)
    if not index < count <= PROCESS_COUNT_MAX:
        raise ConfigurationError(
            f"{INDEX_VARIABLE}={index} and {COUNT_VARIABLE}={count} do not go "
            f"together: numbers are 0 to {COUNT_VARIABLE} - 1, of at most "
            f"{PROCESS_COUNT_MAX} processes"
        )
    restarts = variables.get(RESTARTS_VARIABLE, "")
    return HostPlace(group, index, count, restarts not in ("", "0"))
