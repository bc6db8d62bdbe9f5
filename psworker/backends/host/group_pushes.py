"""The pushes of a host group as a member of the job, in its leader.

In the user's thread. A sealed step has everything that goes into a push, so that the
next leader's push of it is the same, byte by byte.
"""

from collections.abc import Sequence

import torch
from typing_extensions import override

from pswire.frames import bits_to_bytes
from pswire.membership import WorkerKey
from pswire.schema import OptimizerSpec
from psworker.backends.host.messages import GroupStatus, PushPlace, Seal
from psworker.errors import EvictedError
from psworker.member.exchange import PushExchange
from psworker.member.joining import LostStart
from psworker.optim import gradients
from psworker.optim.buffer_policies import BufferPolicy
from psworker.optim.buffers import leads
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import StateLoad, StepContents
from psworker.steps.pushes import MemberPushes
from psworker.tensors.value_store import Scope
from psworker.transport.values import PushHeader, PushTrailer


class GroupPushes(MemberPushes):
    """Pushes of a group.

    Attributes:
        is_behind: Whether it has rejoined since the last step, so that the processes
            compute with values that are not the job's any more.
    """

    is_behind = False

    @override
    def _scope_of(self, exchange: PushExchange) -> Scope | None:
        return None  # each process copies what it needs of the shared memory

    def resume(self, status: GroupStatus) -> None:
        """Goes on after another leader, as the same start of a worker or a new one."""
        self._session.core.acknowledge(status.sequence)
        self.rejoin_count = status.rejoin_count
        self.last_push = status.last_push
        self.first_epochs = status.first_epochs
        unreported = self.pending.unreported
        unreported.note(status.unreported.consumed, is_dropped=False)
        unreported.note(status.unreported.dropped, is_dropped=True)
        if self._session.worker != status.worker:
            self._lost = LostStart(status.worker, status.generation, status.clock)

    def arrive(self) -> PushPlace:
        """Where the next push goes; rejoins first if the group was evicted."""
        rejoin_count = self.rejoin_count
        before = self.sequence_acknowledged
        self._as_member(lambda _: None)
        sequence = self.sequence_acknowledged + 1
        worker = self._session.worker
        record = self._session.membership.record
        is_void = self.is_behind or self.rejoin_count > rejoin_count
        is_stale = is_void or self.sequence_acknowledged > before
        self.is_behind = False
        return PushPlace(
            worker=worker,
            sequence=sequence,
            clock=self._place.clock_of(sequence),
            is_first_worker=leads(record, worker, sequence),
            is_of_longest=record is not None and record.has_longest(worker),
            is_stale=is_stale,
            is_void=is_void,
        )

    def status(self, token: str) -> GroupStatus:
        """Where the group stands, for all of its processes."""
        record = self._session.membership.record
        members = record.members if record is not None else ()
        mode = record.mode if record is not None else self._session.settings.mode
        return GroupStatus(
            token=token,
            worker=self._session.worker,
            rank=self.member.rank,
            worker_count=len(members),
            sequence=self.sequence_acknowledged,
            clock=self.clock,
            generation=self.generation,
            mode=mode.label,
            rejoin_count=self.rejoin_count,
            last_push=self.last_push,
            unreported=self.pending.unreported.by_pushes,
            first_epochs=self.first_epochs,
        )

    def push(
        self,
        spec: OptimizerSpec,
        seal: Seal,
        mean: Sequence[torch.Tensor | None],
        load: StateLoad | None,
        *,
        is_repeat: bool,
    ) -> PushResult:
        """Pushes a sealed step, or goes on with it.

        Args:
            spec: The optimizer.
            seal: The step.
            mean: The gradient, one for each entry.
            load: State of this process's call.
            is_repeat: Whether another process may have sent some of it.

        Raises:
            StepTimeoutError: Some worker or shard did not come in time.
        """
        if self._unfinished is not None:  # an earlier call of this process
            if self._lost is not None:
                return self._lose(self._unfinished)
            return self._finish(self._unfinished, self._store)
        contents = self._sealed(spec, seal, mean, load)
        if is_repeat and self._is_other_start(seal.place.worker):
            return self._settle_lost(contents, seal.place)
        try:
            if load is not None:
                digest = seal.leading.spec_digest
                self._states.stage(spec.name, seal.place.sequence, load.states, digest)
            header = self._header_of(
                self._session.core.next_push(), spec.name, contents.value_entries
            )
            exchange = self._sending.begin(header, contents)
        except EvictedError:
            if not is_repeat:
                return self._lose(None)
            return self._settle_lost(contents, seal.place)
        exchange.asks_first = is_repeat
        result = self._finish(exchange, self._store)
        if is_repeat and exchange.replies:
            # The leader before may have sent it for a later clock than its own.
            closed = min(reply.closed_sequence for reply in exchange.replies)
            self._session.core.acknowledge(closed)
        self._session.work.note_step(contents.trailer.weight)
        return result

    def _is_other_start(self, worker: WorkerKey) -> bool:
        return self._session.worker != worker or self._lost is not None

    def _settle_lost(self, contents: StepContents, place: PushPlace) -> PushResult:
        """Rejoins; the record has decided whether the push counts."""
        header = PushHeader(
            job_id=self._session.settings.job_id,
            optimizer=contents.optimizer,
            worker=place.worker,
            generation=self.generation,
            sequence=place.sequence,
            sequence_unacknowledged_min=place.sequence,
            clock=place.clock,
        )
        exchange = PushExchange.begin(
            header,
            contents,
            placement=self._store.placement,
            incarnations=self._session.shards.incarnations,
            loop=self._loop,
        )
        self._lost = LostStart(
            place.worker, self.generation, place.clock - 1, exchange.pushes
        )
        return self._lose(exchange)

    def _sealed(
        self,
        spec: OptimizerSpec,
        seal: Seal,
        mean: Sequence[torch.Tensor | None],
        load: StateLoad | None,
    ) -> StepContents:
        """What the push of a sealed step carries."""
        norm = float(seal.square_sum**0.5) if seal.weight else 0.0
        is_finite = seal.is_finite and gradients.is_finite(norm)
        held = list(mean) if is_finite and seal.weight else [None] * len(mean)
        leading = seal.leading
        policies = sorted(self._buffers.policies.items())
        has_buffers = any(held[index] is not None for index, _ in policies)
        averaged = [each is BufferPolicy.MEAN for _, each in policies]
        return StepContents(
            optimizer=spec.name,
            tensors=held,
            value_entries=self._buffers.value_entries,
            trailer=PushTrailer(
                weight=seal.weight,
                groups=leading.groups,
                is_finite=is_finite,
                ranges=seal.ranges,
                gradient_norm=norm if is_finite else 0.0,
                optimizer_digest=leading.spec_digest,
                loads_state=leading.loads_state,
                is_of_longest=seal.place.is_of_longest,
                scheduler_steps=leading.scheduler_steps,
                averaged_buffers=bits_to_bytes(averaged) if has_buffers else b"",
                continues_batch=seal.continues_batch,
            ),
            ranges=seal.drawn,
            is_discarded=seal.place.is_stale,
            on_loaded=None if load is None else load.on_loaded,
        )
