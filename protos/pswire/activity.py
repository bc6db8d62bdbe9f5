"""What the script of a worker does. Pure."""

from enum import IntEnum


class Activity(IntEnum):
    """What a script's thread does; mirrors `pswire.v1.Activity`."""

    UNKNOWN = 0
    COMPUTING = 1
    LOADING = 2
    SENDING = 3
    WAITING = 4
    IDLE = 5
