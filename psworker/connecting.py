"""`connect()`: to a job, to a job as part of a group, or to none.

A connection that is dropped without `close()` stays a worker: what it has prepared may
still be used. A script that connects again from the same thread and gives no other
worker id has forgotten it, and in BSP the second would wait for the first, which is
itself. One that connects from another thread, or under another id, may well mean to be
several workers, and a warning says once what that takes.
"""

import logging
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final
from weakref import WeakKeyDictionary

from pswire.logs import know
from psworker import fork_guard, notebook
from psworker.backends.backend import Backend
from psworker.backends.group import Group, GroupChannel
from psworker.backends.host.backend import Host
from psworker.backends.host.rendezvous import group_of
from psworker.backends.job import Job
from psworker.backends.local import alone_text
from psworker.config import (
    WORKER_ID_VARIABLE,
    WorkerConfig,
    arm_failpoints,
    check_credentials,
    find_admin,
    find_history,
    named_coordinator,
    settings,
    shares_memory,
    timeout_s,
)
from psworker.connection import Connection, LocalConnection
from psworker.errors import ConfigurationError
from psworker.launch.launched import (
    INDEX_VARIABLE,
    find_host_place,
    keep_logs,
    note_connected,
    note_started,
)
from psworker.launch.torchrun import count_text, find_torchrun, rank_text
from psworker.optim.wrappers import is_in_group
from psworker.tracebacks import at_entrance

logger: Final = logging.getLogger("psworker")

_MARGIN_S: Final = 60.0
"""Beyond its own limits, the time that a leader may take to send how it failed."""


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker that this process is, and who has connected it."""

    backend: Backend
    process_id: int
    thread: threading.Thread
    coordinator: str
    wanted_id: str


_workers: Final[WeakKeyDictionary[Connection, _Worker]] = WeakKeyDictionary()
_lock: Final = threading.RLock()  # a signal handler may connect too
_has_warned_of_several = False
_logged_rank = ""


@at_entrance
def connect(
    address: str | None = None,
    worker_id: str | None = None,
    *,
    connect_timeout_s: float | None = None,
    step_timeout_s: float | None = None,
    start_timeout_s: float | None = None,
    admin_listen: str | None = None,
) -> Connection:
    """Connects this process to a job as a worker.

    What is not given here is taken from a variable, `PS_STEP_TIMEOUT_S` for
    `step_timeout_s`, else from the sections `[worker]` and `[job]` of the file that
    `PS_CONFIG` names. Without a coordinator in any of them the process trains alone,
    and a warning says so.

    Args:
        address: `HOST:PORT` of the coordinator; by default `PS_COORDINATOR`.
        worker_id: Stable name of this worker; by default `PS_WORKER_ID`, else one of
            the coordinator's choice. Give ids for runs that repeat bit by bit.
        connect_timeout_s: Longest wait for the coordinator, by default 8 s.
        step_timeout_s: Longest time for one `step()`, waits for others included; by
            default 600 s.
        start_timeout_s: Longest wait in `prepare` for the job to start, by default an
            hour.
        admin_listen: `HOST:PORT` where this process serves `/healthz`, `/readyz` and
            `/metrics`, by default `PS_ADMIN_LISTEN`, else `off`. Under `psworker run`
            each process takes the port after that of the one before it.

    Returns:
        A connection to the job, a `LocalConnection` where there is none. In a group of
        `torch.distributed` all processes must call.

    Raises:
        ConfigurationError: The address, the id or a time is none, or the job's file or
            the files of TLS can't be used.
        ConnectError: The coordinator was not reached; the text says why.
    """
    note_started()
    found = settings()
    coordinator = named_coordinator(address, found)
    connect_s = timeout_s("connect_timeout_s", connect_timeout_s, found)
    step_s = timeout_s("step_timeout_s", step_timeout_s, found)
    start_s = timeout_s("start_timeout_s", start_timeout_s, found)
    admin = find_admin(admin_listen, found)
    if coordinator is None:
        arm_failpoints()
        group = find_torchrun()
        if group is None or group.rank == 0:
            logger.warning(alone_text(group, count_text()))
        return LocalConnection(find_worker_id(worker_id, found))
    config = WorkerConfig(
        coordinator=coordinator,
        worker_id=find_worker_id(worker_id, found),
        connect_timeout_s=connect_s,
        step_timeout_s=step_s,
        start_timeout_s=start_s,
        history=find_history(found),
        shares_memory=shares_memory(found),
    )
    if fork_guard.is_importing_main():
        raise ConfigurationError(
            "connect() was called by a process that was spawned to load data and is "
            "importing this script for it: it would join the job as one more worker; "
            'put what the script does under `if __name__ == "__main__":`, or give the '
            'DataLoader multiprocessing_context="fork"'
        )
    check_credentials()
    arm_failpoints()
    keep_logs(found)
    _log_rank()
    place = (str(coordinator), config.worker_id)
    notebook.close_earlier(*place)
    if not notebook.is_running():
        refuse_second(*place)
    backend = _backend(config, max(step_s, start_s))
    port = None
    if admin is not None:
        from psworker.metrics_port import MetricsPort

        port = MetricsPort.open(admin, backend)
    connection = Connection(backend, wait_s=config.step_timeout_s, metrics_port=port)
    note_worker(connection, backend, *place)
    _know(backend)
    note_connected()
    notebook.watch(connection, *place)
    return connection


def _backend(config: WorkerConfig, call_limit_s: float) -> Backend:
    """This process as a worker, or as one of several; no call takes `call_limit_s`."""
    host_place = find_host_place()
    if host_place is not None:
        name = group_of(host_place.group, str(config.coordinator))
        return Host(config, replace(host_place, group=name))
    if is_in_group():
        limit_s = config.connect_timeout_s + call_limit_s + _MARGIN_S
        return Group(GroupChannel(limit_s), config)
    return Job.open(config)


def _know(backend: Backend) -> None:
    """Has lines of the log say which worker this process is, and its clock."""
    made = weakref.ref(backend)  # one that is dropped is closed for that

    def worker_id() -> str | None:
        here = made()
        return (here.place.worker_id or None) if here is not None else None

    def clock() -> int | None:
        here = made()
        # None before the first step: lines of other threads would say 0 for long.
        return (here.place.clock or None) if here is not None else None

    know(id=worker_id, clock=clock)


def _log_rank() -> None:
    """Logs once whether ranks that the environment names count.

    Under `psworker run` they matter to nobody: it numbers its processes by itself.
    """
    global _logged_rank
    text = rank_text()
    if not text or text == _logged_rank:
        return
    _logged_rank = text
    is_expected = find_torchrun() is not None or INDEX_VARIABLE in os.environ
    logger.log(logging.INFO if is_expected else logging.WARNING, "%s", text)


def find_worker_id(
    worker_id: str | None, environ: Mapping[str, str] | None = None
) -> str:
    """The wanted worker id, from the argument or `PS_WORKER_ID`; empty if none.

    torchrun gives all processes of a group the same environment, and each its rank: the
    id is then `r3`, or `ID-r3`. Variables that another launcher has left do not count.

    Raises:
        ConfigurationError: The argument is no text, or an empty one.
    """
    if worker_id is not None:
        if not isinstance(worker_id, str):
            raise ConfigurationError(
                f"connect(worker_id={worker_id!r}) is no text: give one, as in 'w0'"
            )
        if not worker_id:
            raise ConfigurationError(
                "connect(worker_id='') names no worker: leave it out, or give None, "
                f"for {WORKER_ID_VARIABLE} or an id of the coordinator's choice"
            )
        return worker_id
    named = (environ or os.environ).get(WORKER_ID_VARIABLE, "")
    group = find_torchrun(environ)
    if group is None or group.process_count == 1:
        return named
    return f"{named}-r{group.rank}" if named else f"r{group.rank}"


def refuse_second(coordinator: str, wanted_id: str) -> None:
    """Checks that this thread may connect as one more worker.

    A connection that the job has ended or evicted is closed for it.

    Raises:
        ConfigurationError: It is connected already, and gives no other id.
    """
    for connection, each in _open_workers(coordinator):
        if (each.thread, each.wanted_id) != (threading.current_thread(), wanted_id):
            continue
        if not each.backend.is_out:
            raise ConfigurationError(
                f"this process is connected to {each.coordinator} already, as worker "
                f"{connection.worker_id}, and one would wait for the other: call "
                "close() on that connection first, which `with psworker.connect() as "
                "ps:` does by itself; or give connect() worker ids that differ, to be "
                "several workers"
            )
        connection.close()


def note_worker(
    connection: Connection, backend: Backend, coordinator: str, wanted_id: str
) -> None:
    """Notes that this thread has connected.

    Warns once if this process is several workers then, unless each has an id and a
    thread of its own, which is clearly meant.
    """
    global _has_warned_of_several
    thread, place = threading.current_thread(), _canonical(coordinator)
    others = [each for each in _open_workers(coordinator) if not each[1].backend.is_out]
    with _lock:
        _workers[connection] = _Worker(backend, os.getpid(), thread, place, wanted_id)
    here = [each for each in others if each[1].thread is thread]
    unnamed = [each for each in others if each[1].wanted_id == wanted_id]
    if _has_warned_of_several or not (here or unnamed):
        return
    _has_warned_of_several = True
    other, _ = (here or unnamed)[0]
    why = (
        "in BSP a step of one waits for the other's: step them in threads of their own"
        if here
        else "each must make its steps, since in BSP they wait for each other"
    )
    logger.warning(
        "connect() was called again, so that this process is two workers of the job at "
        "%s, %s and %s, and %s; if one is meant, connect once and pass the connection "
        "on, or call close() on the first one before",
        place,
        other.worker_id or "the first",
        connection.worker_id or "this one",
        why,
    )


def _open_workers(coordinator: str) -> list[tuple[Connection, _Worker]]:
    """Open connections of this process to a job."""
    here = os.getpid(), _canonical(coordinator)
    with _lock:
        known = list(_workers.items())
    return [
        (connection, each)
        for connection, each in known
        if (each.process_id, each.coordinator) == here and not connection.is_closed
    ]


def _canonical(coordinator: str) -> str:
    """One name for what is written in two ways."""
    host, _, port = coordinator.rpartition(":")
    return f"127.0.0.1:{port}" if host == "localhost" else coordinator
