"""Steps of a data-parallel group, which is one worker of the job."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from pswire.schema import OptimizerSpec
from psworker.backends.backend import WorkerPlace
from psworker.backends.group_channel import GroupChannel
from psworker.data.pending import PendingData
from psworker.errors import UnsupportedError, refuse_closed
from psworker.optim.buffers import Buffers
from psworker.optim.declared_tensors import DeclaredTensors
from psworker.optim.gradients import SpentGradients
from psworker.optim.optimizer import Steps
from psworker.optim.optimizer_state import States
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import NO_EXTRAS, Groups, PushExtras
from psworker.transport.values import OptimizerSettings


class GroupSteps:
    """Lets the leader push for all, and gives all what it gets.

    `DistributedDataParallel` has averaged the gradient over the group already, so that
    the leader's is everybody's. The samples behind it are those of all processes.

    Attributes:
        place: Where the group stands in the job.
    """

    def __init__(
        self,
        channel: GroupChannel,
        declared: DeclaredTensors,
        buffers: Buffers,
        device_group: Any,  # noqa: ANN401, untyped in torch
        *,
        place: WorkerPlace,
        look: Callable[[], WorkerPlace],
        optimizer_count: int = 1,
    ) -> None:
        """Begins with the leader's values in all processes.

        Args:
            channel: To the other processes.
            declared: The models' tensors, the same in all processes.
            buffers: Those of them that are buffers.
            device_group: The group that carries tensors which are not on the CPU.
            place: Where the group stands after joining.
            look: Tells, in the leader, where it stands.
            optimizer_count: Optimizers that step.
        """
        self._channel = channel
        self._declared = declared
        self._buffers = buffers
        self._device_group = device_group
        self._look = look
        self._sample_count = 1
        self._is_closed = False
        self._leader: Steps | None = None
        self._pending = PendingData()
        self._spent = SpentGradients(len(declared.tensors))
        self._looked = SpentGradients(len(declared.tensors))
        self._pending.watch(
            lambda: self._looked.differ_from(declared.tensors),
            parameters=declared.tensors,
            optimizer_count=optimizer_count,
        )
        # What each step that may carry loaded state tells when that is loaded. Steps
        # have the same numbers in all processes.
        self._step_count = 0
        self._loading: dict[int, Callable[[], None]] = {}
        self._loaded: list[int] = []  # of the leader, not yet told to the others
        self.place = place
        self._spread(frozenset())

    @property
    def _tensors(self) -> Sequence[torch.Tensor]:
        """One for each entry of the schema, as of the last look."""
        return self._declared.tensors

    @property
    def pending(self) -> PendingData:
        """Samples that this process has drawn since the last step."""
        return self._pending

    @property
    def worker_count(self) -> int:
        """Processes of the group, whose samplers split its data."""
        return self._channel.process_count

    @property
    def rank(self) -> int:
        """This process's place among these, from 0."""
        return self._channel.rank

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient that a step may have to take yet."""
        return self._spent.has_others(self._tensors)

    @property
    def reads_state(self) -> bool:
        """Whether this process can ask shards for optimizer state, as the leader."""
        return self._leader is not None

    def lead(self, inner: Steps) -> Steps:
        """Takes over an optimizer of the leader, whose own steps are `inner`."""
        self._leader = inner
        return self

    def step(
        self,
        spec: OptimizerSpec,
        groups: Groups,
        *,
        weight: float | None,
        is_finite: bool = True,
        scale: torch.Tensor | None = None,
        extras: PushExtras = NO_EXTRAS,
    ) -> PushResult:
        """Pushes the group's gradient, with the samples of all its processes.

        Raises:
            PsError: What the leader's step has raised, in all processes.
        """
        self._refuse_closed()
        self._declared.look()
        drawn = self._pending.take()
        if drawn.sample_count is not None:
            self._sample_count = drawn.sample_count
        total = self._channel.sum(self._sample_count if weight is None else weight)
        if spec.loss_is_sum:
            extras = replace(extras, averaged_over=self._channel.process_count)

        def push(leader: Steps, extras: PushExtras) -> PushResult:
            result = leader.step(
                spec,
                groups,
                weight=total,
                is_finite=is_finite,
                scale=scale,
                extras=extras,
            )
            assert result is not None, "a group's steps do not overlap"
            return result

        own = frozenset(spec.entry_indexes)
        try:
            return self._led(spec.name, push, extras)
        finally:  # as with the samples, also when the call has ended an earlier push
            self._spent.note(
                [
                    each.grad if index in own else None
                    for index, each in enumerate(self._tensors)
                ]
            )

    def note_zeroed(self) -> None:
        """What was behind gradients that are gone has no weight."""
        if self._pending.has_trained and not self.has_gradient:
            self._pending.throw_away()

    def push_nothing(
        self, spec: OptimizerSpec, groups: Groups, extras: PushExtras = NO_EXTRAS
    ) -> PushResult:
        """Takes part in the next clock with weight 0."""
        self._refuse_closed()
        self._declared.look()
        return self._led(
            spec.name,
            lambda leader, extras: leader.push_nothing(spec, groups, extras),
            extras,
        )

    def publish(
        self,
        spec: OptimizerSpec,
        groups: Groups,
        entry_indexes: Collection[int],
        extras: PushExtras = NO_EXTRAS,
    ) -> PushResult:
        """Not in a group: each process would need the values of all others.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "a group of processes that push as one can't publish values: set them "
            "before prepare(), or start the processes without DistributedDataParallel"
        )

    def declare(self, spec: OptimizerSpec) -> None:
        """Tells the job of other groups, or of another optimizer, in the leader.

        Raises:
            PsError: What the leader's call has raised, in all processes.
        """
        self._refuse_closed()

        def declare() -> None:
            assert self._leader is not None, "the leader has prepared its optimizers"
            self._leader.declare(spec)

        self._channel.led(declare)
        self._buffers.declare(spec)

    def settings_used(self, optimizer: str) -> OptimizerSettings:
        """What the newest update was made with, in the leader alone."""
        assert self._leader is not None, "the others' schedulers follow their script"
        return self._leader.settings_used(optimizer)

    def optimizer_state(self, optimizer: str, spec_digest: str) -> States:
        """The state of an optimizer, in the leader alone: no call to the others.

        Raises:
            UnsupportedError: This process is not the leader.
        """
        self._refuse_closed()
        if self._leader is None:
            raise UnsupportedError(
                "only rank 0 of a process group speaks to the shards, where the "
                "optimizer's state is: call state_dict() there, as for saving"
            )
        return self._leader.optimizer_state(optimizer, spec_digest)

    def close(self) -> None:
        """Refuses everything from now on."""
        self._is_closed = True

    def _refuse_closed(self) -> None:
        refuse_closed(is_closed=self._is_closed)

    def _led(
        self,
        optimizer: str,
        push: Callable[[Steps, PushExtras], PushResult],
        extras: PushExtras,
    ) -> PushResult:
        """Pushes in the leader, and does in all processes what comes of it."""
        self._step_count += 1
        number = self._step_count
        if extras.on_loaded is not None:
            self._loading[number] = extras.on_loaded
            extras = replace(extras, on_loaded=lambda: self._loaded.append(number))

        def push_and_look() -> tuple[PushResult, WorkerPlace, list[int]]:
            assert self._leader is not None, "the leader has prepared its optimizers"
            return push(self._leader, extras), self._look(), self._loaded

        result, self.place, loaded = self._channel.led(push_and_look)
        for each in loaded:
            if each in self._loading:  # else only the leader's script has loaded state
                self._loading[each]()
        self._loading.clear()  # no push is under way any more
        self._loaded.clear()
        self._spread(self._buffers.scope_of(optimizer).withheld)
        return result

    def _spread(self, withheld: frozenset[int]) -> None:
        given = [
            each for index, each in enumerate(self._tensors) if index not in withheld
        ]
        self._channel.spread(given, self._device_group)
