"""`connect()`: to a job, to a job as part of a group, or to none."""

import logging
import os
from dataclasses import replace
from typing import Final

from pswire.limits import WAIT_S_MAX
from psworker import fork_guard, notebook, own_places
from psworker.backends.backend import Backend
from psworker.backends.group import Group
from psworker.backends.group_channel import GroupChannel, is_in_group
from psworker.backends.host.backend import Host
from psworker.backends.host.place import find_host_place
from psworker.backends.host.rendezvous import group_of
from psworker.backends.job import Job
from psworker.backends.local import alone_text
from psworker.config import (
    WorkerConfig,
    arm_failpoints,
    check_timeouts,
    find_history,
    find_worker_id,
    named_coordinator,
    shares_memory,
)
from psworker.connection import Connection, LocalConnection
from psworker.errors import ConfigurationError
from psworker.launch.launch_plan import LOCAL_RANK_VARIABLE
from psworker.launch.launched import note_connected, note_started
from psworker.refusals import at_entrance
from psworker.torchrun import count_text, find_torchrun, rank_text

logger: Final = logging.getLogger("psworker")

_told_rank = ""

_MARGIN_S: Final = 60.0
"""Beyond its own limits, the time that a leader may take to tell how it failed."""


@at_entrance
def connect(
    address: str | None = None,
    worker_id: str | None = None,
    *,
    connect_timeout_s: float = 8.0,
    step_timeout_s: float = 600.0,
    start_timeout_s: float = 3600.0,
) -> Connection:
    """Connects this process to a job as a worker.

    Without a coordinator, neither here nor in `PS_COORDINATOR`, the process trains
    alone, and a warning says so.

    Args:
        address: `HOST:PORT` of the coordinator; by default `PS_COORDINATOR`.
        worker_id: Stable name of this worker; by default `PS_WORKER_ID`, else one of
            the coordinator's choice. Give ids for runs that repeat bit by bit.
        connect_timeout_s: Longest wait for the coordinator.
        step_timeout_s: Longest time for one `step()`, waits for others included.
        start_timeout_s: Longest wait in `prepare` for the job to start.

    Returns:
        A connection to the job, a `LocalConnection` where there is none. In a group of
        `torch.distributed` all processes must call.

    Raises:
        ConfigurationError: The address, the id or a time is none.
        ConnectError: The coordinator was not reached; the text says why.
    """
    note_started()
    coordinator = named_coordinator(address)
    check_timeouts(
        connect_timeout_s=connect_timeout_s,
        step_timeout_s=step_timeout_s,
        start_timeout_s=start_timeout_s,
    )
    if coordinator is None:
        arm_failpoints()
        group = find_torchrun()
        if group is None or group.rank == 0:
            logger.warning(alone_text(group, count_text()))
        return LocalConnection(find_worker_id(worker_id))
    config = WorkerConfig(
        coordinator=coordinator,
        worker_id=find_worker_id(worker_id),
        connect_timeout_s=min(connect_timeout_s, WAIT_S_MAX),
        step_timeout_s=min(step_timeout_s, WAIT_S_MAX),
        start_timeout_s=min(start_timeout_s, WAIT_S_MAX),
        history=find_history(),
        shares_memory=shares_memory(),
    )
    if fork_guard.is_importing_main():
        raise ConfigurationError(
            "connect() was called by a process that was spawned to load data and is "
            "importing this script for it: it would join the job as one more worker; "
            'put what the script does under `if __name__ == "__main__":`, or give the '
            'DataLoader multiprocessing_context="fork"'
        )
    arm_failpoints()
    _tell_rank()
    place = (str(coordinator), config.worker_id)
    notebook.close_earlier(*place)
    if not notebook.is_running():
        own_places.make_room(*place)
    backend = _backend(config, max(step_timeout_s, start_timeout_s))
    connection = Connection(backend, wait_s=config.step_timeout_s)
    own_places.take(connection, *place, is_out=lambda: backend.is_out)
    note_connected()
    notebook.watch(connection, *place)
    return connection


def _backend(config: WorkerConfig, call_limit_s: float) -> Backend:
    """What trains: this process as a worker, or as one of several that are a worker.

    Args:
        config: Where the job is.
        call_limit_s: Longest time for a call after this one.
    """
    host_place = find_host_place()
    if host_place is not None:
        name = group_of(host_place.group, str(config.coordinator))
        return Host(config, replace(host_place, group=name))
    if is_in_group():
        limit_s = config.connect_timeout_s + call_limit_s + _MARGIN_S
        return Group(GroupChannel(limit_s), config)
    return Job.open(config)


def _tell_rank() -> None:
    """Says once what was believed of ranks that the environment names.

    Under `psworker run` they matter to nobody: it tells its processes apart by itself.
    """
    global _told_rank
    text = rank_text()
    if not text or text == _told_rank:
        return
    _told_rank = text
    is_expected = find_torchrun() is not None or LOCAL_RANK_VARIABLE in os.environ
    logger.log(logging.INFO if is_expected else logging.WARNING, "%s", text)
