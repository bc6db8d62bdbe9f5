"""Updates of chunks: the arithmetic, and the new values for those who wait for them."""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from psserver.shard.core.effects import ApplyChunk, MeasureClock, StagedContribution
from psserver.shard.core.push import PushId
from psserver.shard.host.history import ShardHistory, pushes_of
from psserver.shard.host.hosted_members import HostedMembers
from psserver.shard.host.push_session import Outgoing, PushSession
from psserver.shard.host.shard_model import ShardModel
from psserver.shard.tensors.aggregate import NormLimit
from psserver.shard.tensors.apply_engine import AppliedChunk, ApplyEngine
from psserver.shard.tensors.compressed_gradients import CompressedPayload
from psserver.shard.tensors.contribution import (
    Contribution,
    SparsePayload,
    byte_count_of,
)
from psserver.shard.tensors.sent_values import SentValues
from pswire import failpoints
from pswire.aggregation import sum_or_nan
from pswire.frames import RESPONSE_CHUNK_FIELD
from pswire.schema import ElementType
from pswire.span_log import Recording

if TYPE_CHECKING:
    from psserver.shard.host.recorder import Recorder
    from pswire.membership import WorkerKey


Failed = Callable[[int, BaseException], None]
Done = TypeVar("Done")

INLINE_BYTES_MAX = 64 << 10
"""Largest work that is done in the event loop: about 50 us of arithmetic, against
about 100 us for a thread's turn."""

REPORTED_COUNT = 4
"""Results that are reported together while there is more to do. A chunk of 1 MiB takes
a thread about 0.3 ms."""

REPORTED_BYTES_MIN = 7 << 19
"""A result of so much that it is reported by itself."""

LONG_BYTES_MIN = 4 << 20
"""Work, on more than a chunk, that no result waits behind."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Work:
    """Something to do, and what is called at its end."""

    do: Callable[[], Any]
    byte_count: int
    then: Callable[[Any], None]
    failed: Callable[[BaseException], None]


class Arithmetic:
    """Where arithmetic is done: at once in the event loop, or in a thread of a shard.

    Work on more than `INLINE_BYTES_MAX` goes to a thread that releases the GIL, so that
    other calls are answered meanwhile; less is done at once, since handing it over
    costs more than it does.

    What threads have done is reported to the loop several at a time. With a future for
    each, as `run_in_executor` makes one, a step of 64 chunks woke the loop 64 times,
    each time at the cost of a fifth of a chunk's update.
    """

    def __init__(self, thread_count: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._ended: deque[Callable[[], None]] = deque()
        self._threads = [
            threading.Thread(target=self._serve, name=f"apply_{number}", daemon=True)
            for number in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Waits for what is under way and ends the threads."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def run(
        self,
        work: Callable[[], Result],
        byte_count: int,
        *,
        then: Callable[[Result], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Does work and goes on in the loop, before this returns if it is small.

        Args:
            work: Touches nothing that belongs to the loop.
            byte_count: How much it is.
            then: Called with the result.
            failed: Called with the error of a thread; one in the loop is raised.
        """
        if byte_count <= INLINE_BYTES_MAX:
            then(work())
        else:
            self._work.put(_Work(work, byte_count, then, failed))

    async def result(self, work: Callable[[], Result], byte_count: int) -> Result:
        """Does work and returns its result."""
        if byte_count <= INLINE_BYTES_MAX:
            return work()
        future: asyncio.Future[Result] = self._loop.create_future()

        def succeed(result: Result) -> None:
            if not future.cancelled():
                future.set_result(result)

        def fail(error: BaseException) -> None:
            if not future.cancelled():
                future.set_exception(error)

        self._work.put(_Work(work, byte_count, succeed, fail))
        return await future

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            is_large = work.byte_count >= REPORTED_BYTES_MIN
            if work.byte_count > LONG_BYTES_MIN and self._ended:
                self._loop.call_soon_threadsafe(self._report)
            try:
                end = partial(work.then, work.do())
            except BaseException as error:
                end = partial(work.failed, error)
            del work  # holds gradients
            self._ended.append(end)
            del end
            if is_large or len(self._ended) >= REPORTED_COUNT or self._work.empty():
                self._loop.call_soon_threadsafe(self._report)

    def _report(self) -> None:
        while self._ended:
            # By itself, so that an error in one leaves the others alone.
            self._loop.call_soon(self._ended.popleft())


class ChunkUpdates:
    """Carries out `ApplyChunk`.

    The update of a clock of BSP is the same for all of its pushes: one message goes to
    the calls of all. In SSP and ASP the values are for whoever pushed, when they may be
    sent already; if not, they go with the answer to the push, newer by then.

    Args:
        arithmetic: Where the work is done.
        members: Whose calls wait for values.
        pump: Called when a thread has ended one.

    Attributes:
        apply_s: Time that all threads have spent on updates.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        members: HostedMembers,
        pump: Callable[[], None],
    ) -> None:
        self.apply_s = 0.0
        self._arithmetic = arithmetic
        self._members = members
        self._pump = pump
        self._limits: dict[WorkerKey, tuple[int, NormLimit]] = {}

    def begin(
        self,
        model: ShardModel,
        effect: ApplyChunk,
        failed: Failed,
        history: ShardHistory,
        recording: Recording | None = None,
        recorder: "Recorder | None" = None,
    ) -> None:
        """Applies a chunk, reports to the core and hands on the new values.

        Args:
            model: What the shard holds.
            effect: The order.
            failed: Called with the chunk's index and the error of a thread.
            history: Writes down whose bytes the values have now.
            recording: Notes what a thread does for it, None for nothing.
            recorder: Keeps the update for a replay, None where nobody wants one.
        """
        is_kept = history.is_kept or recorder is not None
        pushes = pushes_of(model.core, effect) if is_kept else []
        push = self._push_of(model, effect)
        apply: Apply = apply_update
        if recorder is not None:
            apply = partial(recorder.apply, pushes)
        work = self._work(model, effect, push, apply)
        if recording is not None:
            work = _recorded(recording, work, effect.clock)

        def applied(done: tuple[AppliedChunk, Outgoing | None, float]) -> None:
            update, values, spent_s = done
            self.apply_s += spent_s
            history.applied(effect, pushes, update.torn_worker_ids)
            if failpoints.armed:
                failpoints.hit("shard.chunk_applied")
            model.core.chunk_applied(effect.chunk_index, update.torn_worker_ids)
            if values is not None:
                self._hand_out(model, effect, push, values)
            self._pump()

        self._arithmetic.run(
            work,
            byte_count(effect.contributions),
            then=applied,
            failed=lambda error: failed(effect.chunk_index, error),
        )

    @staticmethod
    def _push_of(model: ShardModel, effect: ApplyChunk) -> PushId | None:
        """The push of a member that is applied by itself.

        Asked for before the arithmetic: a record that comes meanwhile may number
        clocks anew.
        """
        if effect.pusher is None:
            return None
        member = model.core.clocks.member_of(effect.pusher)
        if member is None:
            return None
        return PushId(effect.pusher, member.sequence_of(effect.clock))

    def _limit_of(self, model: ShardModel, effect: ApplyChunk) -> NormLimit | None:
        """How much may be applied of a push by itself, in a job with a largest norm."""
        norm_max = model.core.state.rules.update.gradient_norm_max
        if effect.pusher is None or not norm_max:
            return None
        clock, limit = self._limits.get(effect.pusher, (0, None))
        if limit is None or clock != effect.clock:
            is_member = model.core.clocks.member_of
            known = self._limits.items()
            self._limits = {w: each for w, each in known if is_member(w)}
            is_exact = model.terms.compression.push is None
            limit = NormLimit(norm_max, is_exact=is_exact)
            self._limits[effect.pusher] = effect.clock, limit
        return limit

    def _wanting(self, pushes: Iterable[PushId | None]) -> list[PushSession]:
        """Calls that want the values; one that is not there yet has them made then."""
        sessions = (self._members.session_of(push) for push in pushes if push)
        return [each for each in sessions if each is not None and each.wants_values]

    def _sends_values(self, model: ShardModel, push: PushId) -> bool:
        session = self._members.session_of(push)
        is_wanted = session is not None and session.wants_values
        return is_wanted and model.core.admits_values(push)

    def _work(
        self,
        model: ShardModel,
        effect: ApplyChunk,
        push: PushId | None,
        apply: "Apply",
    ) -> Callable[[], tuple[AppliedChunk, Outgoing | None, float]]:
        chunk_index = effect.chunk_index
        is_clock = effect.pusher is None
        is_sent = push is not None and self._sends_values(model, push)
        pushes = model.core.pushes_of(effect.clock) if is_clock else (push,)
        wanting = self._wanting(pushes)
        sent = None if effect.pusher is None else self._members.sent_to(effect.pusher)
        limit = self._limit_of(model, effect)
        # In two phases a push that is applied by itself is answered with the values
        # right after it. Those in shared memory may be later, chunk by chunk.
        is_shared = (
            is_clock or not model.core.state.rules.has_two_phase_clocks
        ) and any(each.is_shared for each in wanting)

        def work() -> tuple[AppliedChunk, Outgoing | None, float]:
            began_s = time.perf_counter()
            applied = apply(model.engine, effect, sent, limit)
            spent_s = time.perf_counter() - began_s
            # Others may have changed slices that this push did not.
            presence = (
                applied.presence if is_clock else model.engine.updatable(chunk_index)
            )
            if not (any(presence) if is_clock else is_sent):
                return applied, None, spent_s
            engine, messages = model.engine, None
            if engine.sends_changes:
                # It depends on whose call it is for, and is made when that wants it.
                return applied, Outgoing(chunk_index, presence), spent_s
            reference = engine.reference(chunk_index, presence) if is_shared else None
            if any(
                each.has_room
                for each in wanting
                if reference is None or not each.is_shared
            ):
                messages = engine.encode(
                    chunk_index,
                    RESPONSE_CHUNK_FIELD,
                    presence=presence,
                    reader=sent,
                    sequence=0 if push is None else push.sequence,
                )
            values = Outgoing(chunk_index, presence, messages, reference)
            return applied, values, spent_s

        return work

    def _hand_out(
        self,
        model: ShardModel,
        effect: ApplyChunk,
        push: PushId | None,
        values: Outgoing,
    ) -> None:
        is_clock = effect.pusher is None
        pushes = model.core.pushes_of(effect.clock) if is_clock else (push,)
        for each in pushes:
            session = self._members.session_of(each) if each is not None else None
            if session is not None:
                session.put(values)


Apply = Callable[
    [ApplyEngine, ApplyChunk, SentValues | None, NormLimit | None], AppliedChunk
]
"""`apply_update`, or what does more around it."""


def apply_update(
    engine: ApplyEngine,
    effect: ApplyChunk,
    pulled: SentValues | None = None,
    limit: NormLimit | None = None,
) -> AppliedChunk:
    """The arithmetic of an order; see `ApplyEngine.apply`."""
    return engine.apply(
        effect.chunk_index,
        optimizer=effect.optimizer,
        contributions=with_bytes(effect.contributions),
        total_weight=effect.total_weight,
        hyperparameters=effect.hyperparameters,
        spec_digest=effect.spec_digest,
        pulled=pulled,
        staleness=None if effect.pusher is None else effect.staleness,
        average=effect.average,
        gradient_scale=effect.gradient_scale,
        limit=limit,
    )


def _recorded(
    recording: Recording, work: Callable[[], Done], clock: int
) -> Callable[[], Done]:
    """The same work, which notes by which thread it is done."""

    def recorded() -> Done:
        with recording.noting("apply", clock, threading.current_thread().name):
            return work()

    return recorded


def with_bytes(parts: Sequence[StagedContribution]) -> list[Contribution]:
    """What a core has kept of a chunk, for the arithmetic; decodes what is encoded."""
    return [_contribution(part) for part in parts]


def byte_count(parts: Sequence[StagedContribution]) -> int:
    """How much there is to do: a few rows may mean an update of the whole chunk."""
    return sum(
        part.payload.chunk_bytes
        if isinstance(part.payload, SparsePayload | CompressedPayload)
        else byte_count_of(part.payload)
        for part in parts
    )


def _contribution(part: StagedContribution) -> Contribution:
    payload = part.payload
    element_type = None
    if isinstance(payload, CompressedPayload):
        data = payload.decoded()
        payload = SparsePayload(data, (), len(data))
        element_type = ElementType.FLOAT32
    if not isinstance(payload, SparsePayload):
        assert isinstance(payload, memoryview)
        payload = SparsePayload(payload, (), len(payload))
    return Contribution(
        worker_id=part.worker_id,
        weight=part.weight,
        presence=part.presence,
        data=payload.data,
        loss_scale=part.loss_scale,
        factor=part.factor,
        rows=payload.rows,
        element_type=element_type,
        value_entries=part.value_entries,
        is_source=part.is_source,
    )


class ClockMeasures:
    """Carries out `MeasureClock`.

    The aggregate is worked out here and once more when it is applied: keeping it in
    between would cost a second gradient of memory.

    Args:
        arithmetic: Where the work is done, each chunk by itself.
        pump: Called when a thread has ended one.
    """

    def __init__(self, arithmetic: Arithmetic, pump: Callable[[], None]) -> None:
        self._arithmetic = arithmetic
        self._pump = pump

    def begin(self, model: ShardModel, effect: MeasureClock, failed: Failed) -> None:
        """Measures all chunks of a clock and reports to the core.

        Args:
            model: What the shard holds.
            effect: The order.
            failed: Called with a chunk's index and the error of a thread.
        """
        measures: dict[int, tuple[float, ...]] = {}
        workers = [each.worker_id for each in effect.choice.workers]

        def note(chunk_index: int, part: tuple[float, ...]) -> None:
            measures[chunk_index] = part
            if len(measures) == len(effect.chunks):
                report()

        def report() -> None:
            sums = tuple(map(sum_or_nan, zip(*measures.values(), strict=True)))
            if effect.measures_each:
                rules = model.core.state.rules.update
                none = (0.0,) * rules.product_count(len(workers))
                model.core.clock_measured(effect.choice, 0.0, sums or none)
            else:
                model.core.clock_measured(effect.choice, sums[0] if sums else 0.0)
            self._pump()

        def measure(
            chunk_index: int, parts: Sequence[StagedContribution]
        ) -> tuple[float, ...]:
            contributions = with_bytes(parts)
            if effect.measures_each:
                return model.engine.products(
                    chunk_index,
                    contributions,
                    workers,
                    optimizer=effect.optimizer,
                    spec_digest=effect.spec_digest,
                    has_pairs=effect.measures_pairs,
                )
            square = model.engine.sum_of_squares(
                chunk_index,
                contributions=contributions,
                total_weight=effect.total_weight,
                optimizer=effect.optimizer,
                spec_digest=effect.spec_digest,
            )
            return (square,)

        def begin(chunk_index: int, parts: Sequence[StagedContribution]) -> None:
            self._arithmetic.run(
                lambda: measure(chunk_index, parts),
                byte_count(parts),
                then=lambda part: note(chunk_index, part),
                failed=lambda error: failed(chunk_index, error),
            )

        if not effect.chunks:
            report()
        for each in effect.chunks:
            begin(*each)
