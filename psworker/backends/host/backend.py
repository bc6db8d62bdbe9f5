"""A process that is one of several on its host, which push as one."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NoReturn

from torch.optim import Optimizer

from pswire.compression import NO_COMPRESSION
from pswire.leased_data import Origin, RecordedSplit
from pswire.membership import Mode
from pswire.schema import OptimizerSpec
from psworker import event_loop, fork_guard
from psworker.backends.backend import (
    GROUP_PUBLISH_TEXT,
    GROUP_REWIND_TEXT,
    GROUP_STATE_TEXT,
    GROUP_STRATEGY_TEXT,
    WorkerPlace,
)
from psworker.backends.host.messages import AwaitTurn
from psworker.backends.host.steps import HostSteps
from psworker.backends.prepared import PreparedObjects, leased
from psworker.config import WorkerConfig
from psworker.data.pending import PendingData
from psworker.data.source import part_in_rounds
from psworker.errors import ConfigurationError, UnsupportedError
from psworker.event_loop import LoopFuture
from psworker.launch.launched import HostPlace
from psworker.launch.reachability import wait_reachable
from psworker.member.script_state import HasState, RewindCallback
from psworker.optim.buffer_policies import warn_of_defaults
from psworker.optim.named_objects import NamedObjects
from psworker.optim.optimizer import PreparedOptimizer
from psworker.optim.prepare import Prepared, PrepareOptions, sort_objects
from psworker.optim.published import Published
from psworker.transport.ports import Traffic
from psworker.transport.values import EpochRequest, Lease, LeaseRequest
from psworker.work_log import WorkLog


class Host:
    """One process of a host group: a `Backend`.

    All processes run the same script. Towards the job they are one worker;
    each has a `PS_LOCAL_RANK` of its own.
    """

    def __init__(self, config: WorkerConfig, place: HostPlace) -> None:
        """Looks for the coordinator; the processes meet in `join`.

        Args:
            config: Where the job is.
            place: Which process of which group this is.

        Raises:
            ConnectError: The coordinator was not reached; the text says why.
        """
        wait_reachable(config.coordinator, config.connect_timeout_s)
        self._config = config
        self._place_on_host = place
        self._loop = event_loop.acquire()
        fork_guard.guard(config.coordinator)
        self._steps: HostSteps | None = None
        self._work = WorkLog()

    @property
    def coordinator(self) -> str:
        """HOST:PORT of the job."""
        return str(self._config.coordinator)

    @property
    def title(self) -> str:
        """Which process of the group this is."""
        return f"process {self._place_on_host.index} of {self._place_on_host.count}"

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the job now; another one may later."""
        return self._steps is not None and self._steps.is_leader

    @property
    def is_out(self) -> bool:
        """Whether the job is over, or goes on without the group, as far as seen."""
        leader = self._steps.leader if self._steps is not None else None
        return leader is not None and leader.is_out

    @property
    def place(self) -> WorkerPlace:
        """Where the group stands."""
        if self._steps is None:
            return WorkerPlace(worker_id=self._config.worker_id, mode="")
        status = self._steps.status
        return WorkerPlace(
            worker_id=status.worker.worker_id,
            mode=status.mode,
            rank=status.rank,
            worker_count=status.worker_count,
            clock=status.clock,
            generation=status.generation,
            last_push=self._steps.last_push,
        )

    @property
    def traffic(self) -> Traffic:
        """Of this process, if it is the one that leads."""
        leader = self._steps.leader if self._steps is not None else None
        return leader.session.shards.traffic if leader is not None else Traffic()

    @property
    def work(self) -> WorkLog:
        """What this process does; that of the leader is reported."""
        return self._work

    @property
    def between_pushes(self) -> NoReturn:
        """Refused: its pushes are those of all its processes."""
        raise UnsupportedError(GROUP_STRATEGY_TEXT)

    def join(self, call: NamedObjects, options: PrepareOptions) -> Mapping[int, Any]:
        """Meets the other processes, and joins the job with them as one worker."""
        if options.local_training is not None:
            raise UnsupportedError(GROUP_STRATEGY_TEXT)
        given = sort_objects(call, options)
        _refuse_unsupported(given, overlap=options.overlap)
        link = HostDataLink(self._work)
        loaders = leased(given.loaders, link)
        steps = self._steps = HostSteps(
            self._loop,
            self._config,
            self._place_on_host,
            given,
            digest=_digest(given),
            work=self._work,
        )

        is_first = steps.status.rank == 0 and self._place_on_host.index == 0
        if options.buffers is None and is_first:  # once in a job
            warn_of_defaults(given.buffers)

        def make(inner: Optimizer, spec: OptimizerSpec) -> PreparedOptimizer:
            return PreparedOptimizer(inner, spec, steps, given.bound)

        prepared = PreparedObjects(given, loaders, make)
        link.start(steps, next(iter(prepared.optimizers.values())))
        self._work.start()
        return prepared.follow_schedulers(is_late=steps.status.clock > 0)

    def exchange(
        self, call: NamedObjects, options: PrepareOptions
    ) -> Mapping[int, Any]:
        """Refused: processes that lead later would not know of it."""
        raise UnsupportedError(
            "prepare() can be called once with one push per host: give it everything "
            "at once, or start the processes without --one-push-per-host"
        )

    def settle(self) -> None:
        """Does nothing: a step that has returned is complete."""

    def publish(self, what: Sequence[Published]) -> None:
        """Refused."""
        raise UnsupportedError(GROUP_PUBLISH_TEXT)

    def register_state(self, name: str, holder: HasState) -> None:
        """Refused."""
        raise UnsupportedError(GROUP_STATE_TEXT)

    def on_rewind(self, callback: RewindCallback) -> None:
        """Refused."""
        raise UnsupportedError(GROUP_REWIND_TEXT)

    def record_split(self, record: RecordedSplit) -> RecordedSplit:
        """Records a split with the job, in the leader alone."""
        leader = self._steps.leader if self._steps is not None else None
        if leader is None:
            raise ConfigurationError(
                "with one push per host splits are recorded by the process that leads, "
                "once prepare() was called: call it where ps.is_leader"
            )
        return self._loop.run(lambda: leader.session.record_split(record))

    def close(self, *, leaves: bool) -> None:
        """Leaves the group; with the last process the group leaves the job."""
        try:
            if self._steps is not None:
                self._steps.close(leaves=leaves)
        finally:
            fork_guard.unguard(self._config.coordinator)
            event_loop.release()


class HostDataLink:
    """A process of a group, as its loaders see it: a `psworker.data.DataSource`.

    Everything is asked of the group's leader, who leases for all of it. Loaders are
    named before the group meets, and iterated after it.
    """

    def __init__(self, work: WorkLog) -> None:
        self.work = work
        self._steps: HostSteps | None = None
        self._optimizer: PreparedOptimizer | None = None

    def start(self, steps: HostSteps, optimizer: PreparedOptimizer) -> None:
        """Connects it with the process in its group."""
        self._steps = steps
        self._optimizer = optimizer

    @property
    def _here(self) -> HostSteps:
        assert self._steps is not None, "loaders are handed out after joining"
        return self._steps

    @property
    def pending(self) -> PendingData:
        """What was drawn and not yet pushed or reported."""
        return self._here.pending

    @property
    def rejoin_count(self) -> int:
        """How often this process has entered again, or its group has rejoined."""
        return self._here.rejoin_count

    def open_before(self, loader: str, epoch: int) -> Iterable[int]:
        """Epochs before one of which something was left when the group rejoined."""
        return range(self._here.first_epochs.get(loader, epoch), epoch)

    def enter_again(self, loader: str, epoch: int) -> None:
        """Nothing: schedulers of a group go on with their script."""

    @property
    def sharer_count(self) -> int:
        """Processes that take ranges on demand; 0 where they are dealt in rounds."""
        status = self._here.status
        if Mode.labelled(status.mode).rules.deals_rounds:
            return 0
        return status.worker_count * self._here.member_count

    @property
    def worker_count(self) -> int:
        """Processes that share the data, if all workers are groups like this one."""
        return max(1, self._here.status.worker_count) * self._here.member_count

    @property
    def rank(self) -> int:
        """This process's place among these, from 0."""
        return self._here.status.rank * self._here.member_count + self._here.place

    def dealt_count(self, batch_count: int) -> int:
        """Of the batches of an epoch those that this process gets."""
        if self.sharer_count:
            return part_in_rounds(batch_count, 0, self.worker_count)
        status, here = self._here.status, self._here
        of_group = part_in_rounds(batch_count, status.rank, max(1, status.worker_count))
        return part_in_rounds(of_group, here.place, here.member_count)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient was begun that no step has taken yet."""
        return self._here.has_gradient

    def note_draw(self, loader: str, epoch: int) -> None:
        """Nothing hangs on it: a group registers no state."""

    def settle(self) -> None:
        """Checks that the group has not gone on without this process."""
        self._here.refuse_out()

    def rejoin(self, rejoin_count: int) -> None:
        """Enters again, or has the group rejoin, after an exclusion or eviction."""
        self._here.rejoin()

    def open_epoch(self, request: EpochRequest) -> LoopFuture[Origin]:
        """Opens an epoch; what its order is drawn from."""
        self._here.refuse_out()
        return self._here.driver.ask(request)

    def lease_data(self, request: LeaseRequest) -> LoopFuture[Lease]:
        """Leases ranges."""
        self._here.refuse_out()
        return self._here.driver.ask(request)

    def await_contribution(self) -> LoopFuture[None]:
        """Done once a step of the group, or of the job, waits for nobody with data."""
        self._here.refuse_out()
        return self._here.driver.ask(AwaitTurn())

    def holders(self) -> str:
        """Empty: only the process that leads knows what the coordinator sends of it."""
        return ""

    def end_round(self) -> None:
        """It takes no local steps."""

    def push_nothing(self) -> None:
        """Takes part in the group's next push with weight 0."""
        assert self._optimizer is not None, "loaders are handed out after joining"
        self._optimizer.push_nothing()


def _refuse_unsupported(given: Prepared, *, overlap: bool) -> None:
    """Checks that a group of processes can do what was prepared."""
    cure = "or start the processes without --one-push-per-host"
    if overlap:
        raise UnsupportedError(
            "prepare(overlap=True) is not possible with one push per host: gradients "
            f"are added up on the host before any leaves; leave overlap out, {cure}"
        )
    if given.compression != NO_COMPRESSION:
        raise UnsupportedError(
            "compression is not possible with one push per host yet: leave it out, "
            + cure
        )
    if given.privacy is not None:
        raise UnsupportedError(
            "differential_privacy is not possible with one push per host yet: leave "
            "it out, " + cure
        )
    if len(given.specs) != 1:
        raise UnsupportedError(
            f"{len(given.specs)} optimizers are not possible with one push per host: "
            f"use one, {cure}"
        )


def _digest(given: Prepared) -> str:
    """What all processes of a group must have prepared alike."""
    alike = (
        [
            entry.described + entry.model + entry.name
            for entry in given.bound.schema.entries
        ],
        sorted(given.loaders),
        {
            name: (spec.class_name, [group.entry_indexes for group in spec.groups])
            for name, spec in given.specs.items()
        },
        given.clip_grad_norm,
        given.loss,
        {index: policy.value for index, policy in given.buffers.items()},
    )
    return blake2b(repr(alike).encode(), digest_size=16).hexdigest()
