"""What is said of a job in which nothing happens any more."""

from typing import Final

from psctl.failures import CommandError
from psctl.status import read_status
from pswire.addresses import Address

STALL_TIMEOUT_S: Final = 90.0
"""Without any step, after which a command says whom the job waits for and gives up. A
busy machine takes most of a minute to start the processes alone."""


def stalled(coordinator: Address) -> CommandError:
    """The failure, with whom the job waits for."""
    status = read_status(coordinator)
    return CommandError(
        f"no worker made a step for {STALL_TIMEOUT_S:.0f} s; the job is "
        f"{status.phase} and waits for {status.waiting_for or 'nobody'}"
    )
