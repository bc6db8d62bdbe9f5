"""Processes of a host group as threads of the test: each has a driver of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pswire.addresses import parse_address
from psworker.backends.host.backend import Host
from psworker.backends.host.rendezvous import group_of
from psworker.config import WorkerConfig
from psworker.connection import Connection
from psworker.launch.launched import HostPlace
from tests.integration.job import WAIT_TIMEOUT_S, Job

T = TypeVar("T")


def connect(
    job: Job,
    index: int,
    count: int,
    *,
    worker_id: str = "host",
    shares_memory: bool = True,
    address: str = "",
) -> Connection:
    config = WorkerConfig(
        coordinator=parse_address(address or job.address),
        worker_id=worker_id,
        step_timeout_s=WAIT_TIMEOUT_S,
        start_timeout_s=WAIT_TIMEOUT_S,
        shares_memory=shares_memory,
    )
    group = group_of(worker_id, job.address)
    return Connection(Host(config, HostPlace(group, index, count)))


def run_group(
    job: Job,
    count: int,
    script: Callable[[Connection, int], T],
    *,
    worker_id: str = "host",
    shares_memory: bool = True,
    address: str = "",
) -> list[T]:
    """What each process's script returns, in the order of their numbers."""

    def run(index: int) -> T:
        connection = connect(
            job,
            index,
            count,
            worker_id=worker_id,
            shares_memory=shares_memory,
            address=address,
        )
        with connection as ps:
            return script(ps, index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
