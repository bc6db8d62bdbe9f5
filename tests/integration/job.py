"""A whole job in this process: the daemons' own code, called over gRPC or in memory.

The coordinator and the shards run in one event-loop thread as `psserver` runs them;
only the signals that end a daemon are replaced. Workers are threads of the test, each
with a connection of its own. Importing torch once instead of in six processes is what
lets a test start a job in 50 ms. Tests of processes use `processes.py`.
"""

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest import mock

import torch
import uvloop

import psworker
from psserver.config import CoordinatorConfig, ListenConfig, ShardConfig
from psserver.coordinator import daemon as coordinator_daemon
from psserver.coordinator.core.start_point import SavedJob
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.storage.job_store import JobStore
from psserver.edge import lifecycle
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.ending import JobFailedError
from psserver.edge.limits import DEFAULT_LIMITS, Limits
from psserver.shard import daemon as shard_daemon
from psserver.shard.host.shard_host import ShardHost
from pswire.addresses import Address, parse_address
from pswire.job_terms import JobTerms
from pswire.membership import Record, WorkerKey, WorkerState
from pswire.security.credentials import Credentials
from pswire.security.roles import Role
from psworker.backends.job import Job as WorkerOfJob
from tests.doubles.fault_proxy import FaultProxy
from tests.doubles.free_addresses import free_address
from tests.doubles.job_tokens import JobTokens
from tests.doubles.memory_network import MEMORY_HOST, NETWORK, MemoryNetwork

T = TypeVar("T")

WAIT_TIMEOUT_S = 60.0
"""Longest wait for anything that the tests wait for."""

WORKERS_TIMEOUT_S = 3 * WAIT_TIMEOUT_S
"""Longest time for all that workers do."""

_NO_CREDENTIALS = Credentials()

JOB_SEED = 1
"""Of jobs whose tests name no other one."""


class Daemon:
    """One daemon of the job, on the server's event loop."""

    def __init__(self) -> None:
        self.listening: asyncio.Future[Address] = (
            asyncio.get_running_loop().create_future()
        )
        self.told = asyncio.Event()
        self.drains = True
        self.coordinator: CoordinatorHost | None = None
        self.shard: ShardHost | None = None
        self.task: asyncio.Task[None] | None = None

    async def start(self, main: Coroutine[Any, Any, None]) -> Address:
        """Runs a daemon's main function until it listens."""
        # The task takes a copy of the context with it.
        token = _current.set(self)
        self.task = asyncio.create_task(main)
        _current.reset(token)
        first: set[asyncio.Future[Any]] = {self.task, self.listening}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            self.task.result()
        return await self.listening

    async def stop(self, *, drains: bool = True) -> BaseException | None:
        """As SIGTERM would; what has ended it before, but for a failed job.

        Args:
            drains: Whether it does what SIGTERM lets it do before it ends.
        """
        self.drains = drains
        self.told.set()
        if self.task is None:
            return None
        (ended,) = await asyncio.gather(self.task, return_exceptions=True)
        return None if isinstance(ended, JobFailedError) else ended


_current: ContextVar[Daemon] = ContextVar("daemon")


def _announce(role: str, address: Address) -> None:
    _current.get().listening.set_result(address)


async def _stay(
    *duties: Coroutine[None, None, None], drain: Callable[[], Awaitable[None]]
) -> None:
    """As `lifecycle.stay`, ended by the test instead of a signal."""
    tasks = [asyncio.create_task(duty) for duty in duties]
    waiter = asyncio.create_task(_current.get().told.wait())
    try:
        done, _ = await asyncio.wait(
            [*tasks, waiter], return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            if task is not waiter:
                task.result()
        if _current.get().drains:
            await drain()
    finally:
        for task in (*tasks, waiter):
            task.cancel()
        await asyncio.gather(*tasks, waiter, return_exceptions=True)


def _coordinator_host(
    settings: CoordinatorSettings,
    store: JobStore,
    saved: SavedJob | None,
    limits: Limits,
) -> CoordinatorHost:
    host = CoordinatorHost(settings, store, saved, limits)
    _current.get().coordinator = host
    return host


def _shard_host(**arguments: Any) -> ShardHost:  # noqa: ANN401, as the host has them
    host = ShardHost(**arguments)
    _current.get().shard = host
    return host


@contextmanager
def _daemons_under_test(network: MemoryNetwork | None) -> Iterator[None]:
    """Puts the tests' ends of the daemons in, and what daemons change back."""
    switch_interval = sys.getswitchinterval()
    thread_count = torch.get_num_threads()
    level = logging.getLogger("psserver").level
    logging.getLogger("psserver").setLevel(logging.INFO)
    with (
        mock.patch.multiple(
            coordinator_daemon,
            announce=_announce,
            stay=_stay,
            CoordinatorHost=_coordinator_host,
        ),
        mock.patch.multiple(
            shard_daemon, announce=_announce, stay=_stay, ShardHost=_shard_host
        ),
        # A daemon with an event loop of its own waits for all that runs on it. Here
        # they would wait for each other; the job waits once they all have ended.
        mock.patch.object(lifecycle, "HANDLER_TIMEOUT_S", 0.0),
        nullcontext() if network is None else network.installed(),
    ):
        try:
            yield
        finally:
            sys.setswitchinterval(switch_interval)
            torch.set_num_threads(thread_count)
            logging.getLogger("psserver").setLevel(level)


class Job:
    """A coordinator and its shards. A context manager: leaving it ends them.

    Attributes:
        address: Of the coordinator.
        workers_min: Workers that the start waits for.
    """

    def __init__(
        self,
        folder: Path,
        *,
        shard_count: int = 2,
        workers_min: int = 1,
        lease_ttl_ms: int = 10_000,
        advertise: Mapping[int, Callable[[Address], Address]] | None = None,
        port: int = 0,
        shares_memory: bool = True,
        sockets: bool = False,
        job_seed: int = JOB_SEED,
        tokens: JobTokens | None = None,
        credentials: Credentials = _NO_CREDENTIALS,
        limits: Limits = DEFAULT_LIMITS,
        history: str = "",
        record: Path | None = None,
        **settings: Any,  # noqa: ANN401, as the coordinator has them
    ) -> None:
        """Starts nothing yet.

        Args:
            folder: For the daemons' state.
            shard_count: Shards.
            workers_min: Workers that the start waits for.
            lease_ttl_ms: Bound on the detection of a lost process.
            advertise: For some shards, makes the address that workers are told from
                the one that it listens on.
            port: Of the coordinator; 0 takes a free one.
            shares_memory: Whether chunks of `SHARED_BYTES_MIN` and more go through
                shared memory, but for shards that advertise another address.
            sockets: Whether calls go over loopback ports, as tests need that have a
                proxy, another process or a gRPC channel of their own, or that are of
                what gRPC does. Else they stay in memory, but for jobs that name a
                `port` or what to `advertise`.
            job_seed: From which the orders of all epochs follow; 0 leaves them to the
                scripts.
            tokens: Of the job, where its callers need one.
            credentials: What the daemons show whoever connects; what they show others
                is of the process, as it is in theirs.
            limits: Of all daemons.
            history: Where all daemons write their histories.
            record: Where the shards write their recordings.
            settings: Further ones of `CoordinatorConfig`.
        """
        self._settings = {"job_seed": job_seed, **settings}
        self._limits = limits
        self._history = history
        self._record = record
        self._port = port
        self._tokens = tokens
        self._credentials = credentials
        self._shares_memory = shares_memory
        self._folder = folder
        self._shard_count = shard_count
        self.workers_min = workers_min
        self._lease_ttl_ms = lease_ttl_ms
        self._advertise = advertise or {}
        self._coordinator: Daemon | None = None
        self._shards: list[Daemon] = []
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="daemons")
        network = None if sockets or advertise or port else NETWORK
        self._host = "127.0.0.1" if network is None else MEMORY_HOST
        self._patches = _daemons_under_test(network)
        self.address = ""

    def __enter__(self) -> Self:
        self._patches.__enter__()
        self._thread.start()
        try:
            self.run(self._start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        ended = self._end()
        if error is None and ended:
            raise AssertionError("a daemon ended by itself") from ended[0]
        for each in ended:
            assert error is not None
            error.add_note(f"a daemon ended by itself: {each!r}")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the daemons' event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_TIMEOUT_S)

    def ask(self, question: Callable[[], T]) -> T:
        """Looks at the daemons' state from their own thread."""

        async def ask() -> T:
            return question()

        return self.run(ask())

    @property
    def coordinator(self) -> CoordinatorHost:
        assert self._coordinator is not None
        assert self._coordinator.coordinator is not None
        return self._coordinator.coordinator

    @property
    def shards(self) -> list[ShardHost]:
        """In the order of their indexes."""
        hosts = [daemon.shard for daemon in self._shards if daemon.shard is not None]
        return sorted(hosts, key=lambda host: host.shard_index)

    def shard_addresses(self) -> list[str]:
        """Where workers reach each shard."""
        return self.ask(
            lambda: [slot.address for slot in self.coordinator.core.shards.slots]
        )

    def end_shard(self, shard_index: int, *, drains: bool = False) -> None:
        """Ends a shard for good, as one that is lost or, if it drains, by SIGTERM."""
        self.run(self._shards[shard_index].stop(drains=drains))

    def replace_shard(self, shard_index: int) -> None:
        """Ends a shard, and starts another one that asks for its place."""
        self.end_shard(shard_index)
        self._shards.pop(shard_index)
        listen = self._listening(Address(self._host, 0))
        self.run(self._start_shard(shard_index, parse_address(self.address), listen))

    def stop_coordinator(self) -> None:
        """Ends the coordinator, as SIGTERM would."""
        assert self._coordinator is not None
        ended = self.run(self._coordinator.stop())
        if ended is not None:
            raise ended

    def start_coordinator(self) -> None:
        """Starts it again where it was, on the state that it has left."""
        self.run(self._start_coordinator(parse_address(self.address).port))

    @property
    def terms(self) -> JobTerms:
        """What the job trains, once a worker has joined."""
        terms = self.coordinator.core.model.terms
        assert terms is not None
        return terms

    def wait_record(self, is_wanted: Callable[[Record], bool]) -> Record:
        """Returns the newest record once it is as wanted."""
        core = self.coordinator.core
        reached = self.run(
            self.coordinator.changes.wait_until(
                lambda: core.record is not None and is_wanted(core.record),
                WAIT_TIMEOUT_S / 2,
            )
        )
        assert reached, f"the newest record is {core.record}"
        record = core.record
        assert record is not None
        return record

    def wait_workers(self, count: int, *states: WorkerState) -> None:
        """Returns once so many workers are in these states."""
        core = self.coordinator.core
        reached = self.run(
            self.coordinator.changes.wait_until(
                lambda: len(core.roster.in_state(*states)) >= count, WAIT_TIMEOUT_S / 2
            )
        )
        assert reached, f"no {count} workers in {[state.value for state in states]}"

    def wait_worker(self, worker_id: str, *states: WorkerState) -> None:
        """Returns once a worker is in one of these states."""
        roster = self.coordinator.core.roster
        reached = self.run(
            self.coordinator.changes.wait_until(
                lambda: any(
                    each.worker.worker_id == worker_id
                    for each in roster.in_state(*states)
                ),
                WAIT_TIMEOUT_S / 2,
            )
        )
        assert reached, f"{worker_id} is in none of {[each.value for each in states]}"

    def wait_pushed(self, worker_id: str, clock: int) -> None:
        """Returns once every shard has all that a worker pushes for a clock."""
        for host in self.shards:
            reached = self.run(
                host.changes.wait_until(
                    lambda host=host: _has_pushed(host, worker_id, clock),  # type: ignore[misc]
                    WAIT_TIMEOUT_S / 2,
                )
            )
            assert reached, f"{worker_id} has not pushed clock {clock}"

    def step_counts(self, entry_index: int, optimizer: str = "optimizer") -> set[int]:
        """Updates that the slices of a tensor have had, over all shards."""
        return self.ask(
            lambda: {
                count
                for host in self.shards
                for count in host.model.engine.step_counts(optimizer, entry_index)
            }
        )

    def values_digest(self) -> int:
        """Changes whenever any value on any shard does."""
        return self.ask(
            lambda: hash(
                tuple(
                    bytes(host.model.engine.vectors.read(chunk.index))
                    for host in self.shards
                    for chunk in host.model.chunks
                )
            )
        )

    async def _start(self) -> None:
        address = await self._start_coordinator(self._port)
        self.address = str(address)
        listen = self._listening(Address(self._host, 0))
        for index in range(self._shard_count):
            await self._start_shard(index, address, listen)

    def _listening(self, address: Address) -> ListenConfig:
        if self._tokens is None:
            return ListenConfig(address=address, credentials=self._credentials)
        return ListenConfig(
            address=address,
            tokens=self._tokens.store,
            credentials=self._tokens.credentials(Role.SHARD),
        )

    async def _start_coordinator(self, port: int) -> Address:
        self._coordinator = Daemon()
        return await self._coordinator.start(
            coordinator_daemon.run_coordinator(
                CoordinatorConfig(
                    listen=self._listening(Address(self._host, port)),
                    state_dir=self._folder / "coordinator",
                    shard_count=self._shard_count,
                    workers_min=self.workers_min,
                    lease_ttl_ms=self._lease_ttl_ms,
                    limits=self._limits,
                    history=self._history,
                    **self._settings,
                )
            )
        )

    async def _start_shard(
        self, index: int, coordinator: Address, listen: ListenConfig
    ) -> None:
        advertise = None
        if index in self._advertise:
            listen = self._listening(free_address())
            advertise = self._advertise[index](listen.address)
        daemon = Daemon()
        self._shards.append(daemon)
        admin: ListenConfig | None = self._settings.get("admin")
        await daemon.start(
            shard_daemon.run_shard(
                ShardConfig(
                    listen=listen,
                    coordinator=coordinator,
                    advertise=advertise,
                    # As `psserver local` has it: a free port for each.
                    admin=admin and admin.admin(Address(admin.address.host, 0)),
                    state_dir=self._folder / f"shard-{index}",
                    thread_count=2,
                    # What goes through a proxy is for it to break.
                    shares_memory=self._shares_memory and advertise is None,
                    limits=self._limits,
                    history=self._history,
                    record=self._record,
                )
            )
        )
        # One after the other, so that each has the index of its turn.
        assert await self.coordinator.changes.wait_until(
            lambda: self.coordinator.core.shards.slots[index].is_watching,
            WAIT_TIMEOUT_S / 2,
        )

    def _end(self) -> list[BaseException]:
        """Ends all; why those ended that nobody had told to, but for a failed job."""
        try:
            return self.run(self._stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._patches.__exit__(None, None, None)

    async def _stop(self) -> list[BaseException]:
        ended = await asyncio.gather(
            *(daemon.stop(drains=False) for daemon in self._shards)
        )
        if self._coordinator is not None:
            ended.append(await self._coordinator.stop())
        handlers = asyncio.all_tasks() - {asyncio.current_task()}
        if handlers:
            _, left = await asyncio.wait(handlers, timeout=WAIT_TIMEOUT_S / 2)
            assert not left, f"handlers go on after their daemons: {left}"
        return [each for each in ended if each is not None]


def _has_pushed(host: ShardHost, worker_id: str, clock: int) -> bool:
    if host.end_reason or not host.has_model:
        return bool(host.end_reason)
    core = host.model.core
    if core.clocks.applied_clock >= clock:
        return True
    for push in core.pushes_of(clock):
        if push.worker.worker_id == worker_id:
            entry = core.on_shard.window_of(push.worker).entries.get(push.sequence)
            return entry is not None and entry.is_complete
    return False


def run_workers(
    works: Mapping[str, Callable[[str], T]], timeout_s: float = WORKERS_TIMEOUT_S
) -> dict[str, T]:
    """Runs workers in threads of their own and returns their results.

    Args:
        works: What each worker does, given its id.
        timeout_s: Longest time for all.

    Raises:
        Whatever the first worker that failed raised.
    """
    with Crew(works) as crew:
        return crew.results(timeout_s)


class Crew:
    """Workers that run. A context manager: leaving it waits for their threads."""

    def __init__(self, works: Mapping[str, Callable[[str], Any]]) -> None:
        # What MKL may use is each thread's own affair, and begins with the machine's.
        self._threads = ThreadPoolExecutor(
            len(works),
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        )
        self.futures: dict[str, Future[Any]] = {
            worker_id: self._threads.submit(work, worker_id)
            for worker_id, work in works.items()
        }

    def results(self, timeout_s: float = WORKERS_TIMEOUT_S) -> dict[str, Any]:
        """What each has returned; the first failure is raised."""
        done, pending = wait(
            self.futures.values(), timeout_s, return_when="FIRST_EXCEPTION"
        )
        for future in done:
            future.result()
        late = [name for name, future in self.futures.items() if future in pending]
        assert not late, f"{late} did not end in {timeout_s} s"
        return {name: future.result() for name, future in self.futures.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def connect(
    job: Job, worker_id: str, *, address: str = "", **settings: float
) -> psworker.Connection:
    """A worker's connection, with limits that make a hang a failure."""
    limits: dict[str, Any] = dict.fromkeys(
        ("connect_timeout_s", "step_timeout_s", "start_timeout_s"), WAIT_TIMEOUT_S
    )
    limits |= settings
    return psworker.connect(address or job.address, worker_id, **limits)


def worker_behind(ps: psworker.Connection) -> WorkerOfJob:
    """What of a connection to a job is not public."""
    assert isinstance(ps._backend, WorkerOfJob)
    return ps._backend


@contextmanager
def short_steps(ps: psworker.Connection, timeout_s: float) -> Iterator[None]:
    """Limits the steps that are to run out of time, and none before or after them."""
    stepper = worker_behind(ps)._stepper
    assert stepper is not None, "it is prepared"
    with (
        mock.patch.object(stepper, "_timeout_s", timeout_s),
        mock.patch.object(stepper._states, "_timeout_s", timeout_s),
    ):
        yield


def key(worker_id: str, incarnation: int = 1) -> WorkerKey:
    return WorkerKey(worker_id, incarnation)


def deviation(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Largest absolute difference over the largest absolute value of its tensor."""
    worst = 0.0
    for mine, exact in zip(ours, theirs, strict=True):
        if not exact.numel():
            continue
        difference = (mine.double() - exact.double()).abs().max()
        worst = max(worst, float(difference / exact.double().abs().max()))
    return worst


def evict(job: Job, proxy: FaultProxy, worker_id: str) -> None:
    """Cuts a worker off until the job goes on without it."""
    proxy.refuse()
    job.wait_record(
        lambda record: worker_id not in {m.worker.worker_id for m in record.members}
    )
    proxy.heal()
