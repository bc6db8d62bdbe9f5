"""`Connection` of a process that is one of several on its host, which push as one."""

import atexit
import os
import sys
from hashlib import blake2b
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from psworker import event_loop, fork_guard, own_places
from psworker.backends.host.data_link import HostDataLink
from psworker.backends.host.messages import GroupStatus
from psworker.backends.host.place import HostPlace
from psworker.backends.host.refused import refuse_unsupported
from psworker.backends.host.steps import HostSteps
from psworker.backends.joint_worker import JointWorker
from psworker.config import WorkerConfig
from psworker.data import LeasedLoader, LoaderRefused, prepare_loader
from psworker.data.split_value import Split
from psworker.data.splitting import check_recorded, to_record
from psworker.errors import ConfigurationError, UnsupportedError, refuse_closed
from psworker.launch.reachability import wait_reachable
from psworker.optim.buffer_policies import BufferChoice, tell_defaults
from psworker.optim.named_objects import NamedObjects
from psworker.optim.optimizer import PreparedOptimizer
from psworker.optim.prepare import (
    Prepared,
    check_overlap,
    point_schedulers,
    sort_objects,
)
from psworker.optim.push_result import PushResult
from psworker.refusals import at_entrance
from psworker.tensors.compression import CompressionChoice


class HostConnection(JointWorker):
    """One process of a host group, with the interface of `Connection`.

    All processes run the same script. Towards the job they are one worker: they have
    one `worker_id`, `rank` and `clock`; `PS_LOCAL_RANK` tells them apart.
    """

    def __init__(self, config: WorkerConfig, place: HostPlace) -> None:
        """Looks for the coordinator; the processes meet in `prepare`.

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
        self._loaders: tuple[LeasedLoader, ...] = ()
        self._process_id = os.getpid()
        self._error_at_start = getattr(sys, "last_value", None)
        atexit.register(self._at_exit)
        own_places.take(
            self, str(config.coordinator), config.worker_id, is_out=self._is_out
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(leaves=kind is None)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"clock {self.clock}"
        place = f"{self._place_on_host.index} of {self._place_on_host.count}"
        return f"<psworker.HostConnection {self.worker_id}, process {place}, {state}>"

    @property
    @override
    def _place(self) -> GroupStatus | None:
        return None if self._steps is None else self._steps.status

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks to the job now; another one may later."""
        return self._steps is not None and self._steps.is_leader

    def _is_out(self) -> bool:
        """Whether the job is over, or goes on without the group, as far as seen."""
        leader = self._steps.leader if self._steps is not None else None
        return leader is not None and leader.is_out

    @property
    def worker_id(self) -> str:
        """The group's name in the job; before `prepare` the wanted one."""
        if self._steps is None:
            return self._config.worker_id
        return self._steps.status.worker.worker_id

    @property
    def last_push(self) -> PushResult | None:
        """What became of the newest push, `None` before the first."""
        return self._steps.last_push if self._steps is not None else None

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages to shards, which only the leader sends."""
        leader = self._steps.leader if self._steps is not None else None
        return leader.session.shards.traffic.sent_bytes if leader is not None else 0

    @property
    def bytes_received(self) -> int:
        """Bytes of all messages from shards, which only the leader gets."""
        leader = self._steps.leader if self._steps is not None else None
        return leader.session.shards.traffic.received_bytes if leader is not None else 0

    @at_entrance
    def prepare(
        self,
        /,
        *objects: Any,  # noqa: ANN401
        clip_grad_norm: float | None = None,
        buffers: BufferChoice = None,
        overlap: bool = False,
        compression: CompressionChoice = None,
        loss: str | None = None,
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401, what was given
        """Meets the other processes and joins the job with them, as one worker.

        All processes call it with the same. Returns when the model holds the job's
        values; see `Connection.prepare`.

        Returns:
            The same in the order of the call, a single one as it is, a dict for a
            dict.

        Raises:
            UnsupportedError: A group can't do that yet.
            PsError: As `Connection.prepare`, in all processes.
        """
        refuse_closed(is_closed=self.is_closed)
        check_overlap(overlap)
        if self._steps is not None:
            raise UnsupportedError(
                "prepare() can be called once with one push per host: give it "
                "everything at once, or start the processes without "
                "--one-push-per-host"
            )
        call = NamedObjects.of(objects, named)
        given = sort_objects(
            call,
            clip_grad_norm=clip_grad_norm,
            buffers=buffers,
            compression=compression,
            loss=loss,
        )
        refuse_unsupported(given, overlap=overlap)
        if buffers is None:
            tell_defaults(given.buffers)
        link = HostDataLink()
        replaced: dict[int, Any] = {
            id(loader): _leased(loader, link, name)
            for name, loader in given.loaders.items()
        }
        self._loaders = tuple(
            each for each in replaced.values() if isinstance(each, LeasedLoader)
        )
        steps = HostSteps(
            self._loop, self._config, self._place_on_host, given, digest=_digest(given)
        )
        self._steps = steps
        optimizers = {
            id(optimizer): PreparedOptimizer(
                optimizer, given.specs[name], steps, given.bound
            )
            for name, optimizer in given.optimizers.items()
        }
        given.states.clear()  # the shards have it
        point_schedulers(given.schedulers, optimizers)
        for each in optimizers.values():
            each.scale_with(given.loss_scales)
            each.follow(given.schedulers, is_late=steps.status.clock > 0)
        replaced.update(optimizers)
        link.start(steps, next(iter(optimizers.values())))
        return call.returned(replaced)

    def wait(self) -> None:
        """Returns at once: a step that has returned is complete."""
        refuse_closed(is_closed=self.is_closed)

    @at_entrance
    def record_split(self, name: str, split: Split) -> Split:
        """Records a split with the job, or checks it; in the leader alone."""
        refuse_closed(is_closed=self.is_closed)
        leader = self._steps.leader if self._steps is not None else None
        if leader is None:
            raise ConfigurationError(
                "with one push per host splits are recorded by the process that leads, "
                "once prepare() was called: call it where ps.is_leader"
            )
        record = self._loop.run(leader.session.record_split(to_record(name, split)))
        check_recorded(split, record)
        return split

    def close(self) -> None:
        """Leaves the group; with the last process the group leaves the job."""
        self._end(leaves=True)

    def _end(self, *, leaves: bool) -> None:
        if self.is_closed:
            return
        self._is_closed = True
        own_places.give_up(self)
        atexit.unregister(self._at_exit)
        if leaves:
            for loader in self._loaders:
                loader.tell_missed()
        try:
            if self._steps is not None:
                self._steps.close(leaves=leaves)
        finally:
            fork_guard.unguard(self._config.coordinator)
            event_loop.release()

    def _at_exit(self) -> None:
        """Leaves when the script ended well, since nobody called `close`."""
        if os.getpid() != self._process_id:
            return  # a forked child has no part in the job
        error = getattr(sys, "last_value", None)
        ended_well = error is None or error is self._error_at_start
        self._end(leaves=ended_well or hasattr(sys, "ps1"))


def _leased(loader: DataLoader[Any], link: HostDataLink, name: str) -> Any:  # noqa: ANN401
    try:
        return prepare_loader(loader, link, name=name)
    except LoaderRefused as refused:
        raise ConfigurationError(f"{name}: {refused}") from None


def _digest(given: Prepared) -> str:
    """What all processes of a group must have prepared alike."""
    told = (
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
    return blake2b(repr(told).encode(), digest_size=16).hexdigest()
