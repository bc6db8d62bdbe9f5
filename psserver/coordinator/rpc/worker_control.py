"""What workers call at the coordinator about their membership."""

import asyncio
import logging
from collections.abc import AsyncIterator

from psserver.coordinator.core.coordinator_effects import EndJob
from psserver.coordinator.core.roster import GONE, Brought, WorkerEntry
from psserver.coordinator.core.work import Logged, Work
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.rpc.callers import Callers
from psserver.coordinator.rpc.trace_reports import take_recorded
from psserver.coordinator.rpc.watch_codec import worker_event, worker_view
from psserver.edge.access import check_speaks_for, wanted_worker_id
from psserver.edge.decoding import check_protocol, decoded
from psserver.edge.guard import (
    Context,
    Methods,
    address_of,
    answered,
    discard,
    gathered,
    streamed,
)
from psserver.edge.monotonic import now_ms
from psserver.edge.staging_calls import StagingCall, StagingCalls, StagingPlaces
from psserver.logs import RefusalLog
from pswire.activity import Activity
from pswire.compression import ENCODING_NAMES
from pswire.limits import (
    ENCODING_COUNT_MAX,
    METRIC_COUNT_MAX,
    NUMBER_MAX,
    STATE_BYTES_MAX,
    WAITING_INTERVAL_MS,
)
from pswire.membership import WorkerState
from pswire.membership_codec import identity_message, read_report, settings_message
from pswire.names import check_metric_name, check_name
from pswire.reasons import CATALOGUE, ErrorReason, Refusal
from pswire.schema_codec import MergedModel, optimizer_from_message, read_terms
from pswire.span_log import clock_us
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1 import push_pb2

log = logging.getLogger("psserver.coordinator")

SIGNAL_LENGTH_MAX = 16

LOADER_COUNT_MAX = 256
"""Most loaders that one worker names."""

_COUNTERS = (
    "step_count",
    "sample_count",
    "compute_s",
    "load_s",
    "send_s",
    "wait_s",
    "idle_s",
    "activity_ms",
    "resident_bytes",
    "round_step_count",
    "steps_since_push",
    "fragment_under_way",
)
"""Fields of a report of work that are numbers from 0 on."""


class WorkerControl:
    def __init__(self, host: CoordinatorHost) -> None:
        self._host = host
        self._callers = Callers(host.core)
        self._refusals = RefusalLog(log)
        self._joining = StagingCalls()
        self._places = StagingPlaces(
            count_max=host.limits.joins,
            bytes_max=host.limits.join_bytes,
            what="a request to join",
        )

    def methods(self) -> Methods:
        return {
            "RegisterWorker": answered(
                self.register_worker, messages.RegisterWorkerRequest
            ),
            "WatchWorker": streamed(self.watch_worker, messages.WatchWorkerRequest),
            "Join": gathered(self.join),
            "DeclareOptimizer": answered(
                self.declare_optimizer, messages.DeclareOptimizerRequest
            ),
            "ReportSilence": answered(
                self.report_silence, messages.ReportSilenceRequest
            ),
            "ReportWork": answered(self.report_work, messages.ReportWorkRequest),
            "SaveState": answered(self.save_state, messages.SaveStateRequest),
            "LoadState": answered(self.load_state, messages.LoadStateRequest),
            "Leave": answered(self.leave, messages.LeaveRequest),
        }

    async def register_worker(
        self, request: messages.RegisterWorkerRequest, context: Context
    ) -> messages.RegisterWorkerResponse:
        check_protocol(request.protocol_version)
        entry = self._host.register_worker(
            process_id=request.process_id,
            worker_id=wanted_worker_id(request.worker_id),
            address=address_of(context),
        )
        # Of a process that asks again: whoever knows its id could be another one.
        check_speaks_for(entry.worker.worker_id)
        return messages.RegisterWorkerResponse(
            worker=identity_message(entry.worker),
            settings=settings_message(self._host.core.settings),
        )

    async def watch_worker(
        self, request: messages.WatchWorkerRequest, context: Context
    ) -> AsyncIterator[messages.WatchWorkerResponse]:
        """Follows the job as a worker; the stream is its sign of life.

        It ends here once the worker has received its end: a stream that its client
        cancels leaves memory behind on both sides (grpc/grpc#43360).
        """
        host = self._host
        entry = self._callers.own_entry(request)
        # Opened first: what happens while the view is on its way is in the queue.
        queue = host.open_worker_watch(entry)
        try:
            yield messages.WatchWorkerResponse(view=worker_view(host.core))
            while True:
                if await host.next_event(entry, queue, WAITING_INTERVAL_MS / 1000):
                    event = queue.get_nowait()
                    response = worker_event(host.core, event, entry.worker)
                    if response is not None:
                        yield response
                    if isinstance(event, EndJob):
                        return
                elif entry.state in GONE:
                    return
                elif entry.state is WorkerState.JOINING:
                    text, waited_ms = host.waits.for_worker(now_ms())
                    waiting = push_pb2.Waiting(
                        waited_ms=waited_ms,
                        reason=text or "the coordinator to take this worker in",
                    )
                    yield messages.WatchWorkerResponse(waiting=waiting)
                elif wait := host.data.waiting.get(entry.worker):
                    holders = host.waits.holders(wait.ledger, entry.worker, now_ms())
                    waiting = push_pb2.Waiting(reason=holders)
                    yield messages.WatchWorkerResponse(waiting=waiting)
        finally:
            host.close_worker_watch(entry, queue)

    async def join(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> messages.JoinResponse:
        entry, request = await self._read_join(requests)
        terms = read_terms(request)
        self._host.limits.check_model(terms.schema)
        if len(request.loaders) > LOADER_COUNT_MAX:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"{len(request.loaders)} loaders, the limit is {LOADER_COUNT_MAX}",
            )
        for loader in request.loaders:
            check_name("loader", loader)
        note = self._host.core.joining_note()
        try:
            self._host.core.join(
                entry,
                terms=terms,
                loaders=tuple(request.loaders),
                now_ms=now_ms(),
                brought=Brought(request.values_digest, request.state_digest),
            )
        except Refusal as refusal:
            # The worker gets it; those that wait for it look here.
            first_line = refusal.message.partition("\n")[0].rstrip(":")
            self._refusals.warning(
                "%s was not taken into the job: %s", entry.worker, first_line
            )
            raise
        self._host.pump_for_caller()
        model, ledger = self._host.core.model, self._host.core.ledger
        start = self._host.core.progress.start_point
        return messages.JoinResponse(
            order=model.order_of(terms.schema),
            notes=[*([note] if note else ()), *model.doubts(terms.schema)],
            epochs=[ledger.first_open(loader) for loader in request.loaders],
            checkpoint=self._host.core.checkpoint_with_state,
            start_checkpoint=start.place.name if start else "",
            generation_before=start.generation if start else 0,
            are_new=[ledger.is_new(loader) for loader in request.loaders],
        )

    async def _read_join(
        self, requests: AsyncIterator[bytes]
    ) -> tuple[WorkerEntry, messages.JoinRequest]:
        """Who asks, and the whole request, of which large models take several parts."""
        join_s = self._host.limits.join_s
        call = StagingCall(requests, self._host.limits.message_s)
        try:
            async with self._places.taken(call), asyncio.timeout(join_s):
                return await self._merged_join(call)
        except TimeoutError:
            raise Refusal(
                ErrorReason.WAIT_TIMEOUT,
                f"a request to join was not whole after {join_s:g} s",
            ) from None
        except Refusal as refusal:
            if not CATALOGUE[refusal.reason].retryable:
                # A client that still writes when its call ends gets INTERNAL from its
                # own gRPC in place of the reason (grpc/grpc#36066), and asks again.
                await discard(requests, join_s)
            raise

    async def _merged_join(
        self, call: StagingCall[bytes]
    ) -> tuple[WorkerEntry, messages.JoinRequest]:
        data = await call.next()
        if data is None:
            raise Refusal(ErrorReason.MALFORMED_MESSAGE, "the request to join is empty")
        first = await decoded(messages.JoinRequest, data)
        entry = self._callers.entry(first)
        merged = MergedModel(first)
        with self._joining.admitted(entry.worker, call):
            async for data in call.rest():
                self._places.add(call, len(data))
                merged.add(await decoded(messages.JoinRequest, data))
        return entry, merged.message

    async def declare_optimizer(
        self, request: messages.DeclareOptimizerRequest, context: Context
    ) -> messages.DeclareOptimizerResponse:
        entry = self._callers.entry(request)
        schema = self._host.core.model.schema
        if schema is None:
            raise Refusal(
                ErrorReason.NOT_STARTED,
                "no worker has declared yet what the job trains",
            )
        spec = optimizer_from_message(request.optimizer, schema)
        self._host.core.declare_optimizer(entry, spec, now_ms())
        self._host.pump_for_caller()
        return messages.DeclareOptimizerResponse()

    async def report_silence(
        self, request: messages.ReportSilenceRequest, context: Context
    ) -> messages.ReportSilenceResponse:
        entry = self._callers.own_entry(request)
        silent_ms = {each.shard_index: each.silent_ms for each in request.shards}
        if min(silent_ms.values(), default=0) < 0:
            raise Refusal(ErrorReason.MALFORMED_MESSAGE, "silent_ms is negative")
        self._host.core.report_silence(entry, silent_ms, now_ms())
        self._host.pump()
        return messages.ReportSilenceResponse()

    async def report_work(
        self, request: messages.ReportWorkRequest, context: Context
    ) -> messages.ReportWorkResponse:
        entry = self._callers.own_entry(request)
        self._host.core.report_work(entry, _work(request), now_ms())
        name = f"worker {entry.worker.worker_id}"
        return messages.ReportWorkResponse(
            trace=take_recorded(self._host, name, request.recorded),
            coordinator_us=clock_us(),
        )

    async def save_state(
        self, request: messages.SaveStateRequest, context: Context
    ) -> messages.SaveStateResponse:
        entry = self._callers.own_entry(request)
        if len(request.state) > STATE_BYTES_MAX:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"registered state has {len(request.state)} bytes, the limit is "
                f"{STATE_BYTES_MAX}",
            )
        self._host.core.take_state(entry, request.snapshot_id, request.state, now_ms())
        self._host.pump()
        return messages.SaveStateResponse()

    async def load_state(
        self, request: messages.LoadStateRequest, context: Context
    ) -> messages.LoadStateResponse:
        self._callers.entry(request)
        state = await self._host.checkpoints.load_state(request.checkpoint)
        return messages.LoadStateResponse(state=state)

    async def leave(
        self, request: messages.LeaveRequest, context: Context
    ) -> messages.LeaveResponse:
        entry = self._callers.own_entry(request)
        if request.sequence < 0:
            raise Refusal(ErrorReason.MALFORMED_MESSAGE, "sequence is negative")
        name = request.signal
        if name and not (len(name) <= SIGNAL_LENGTH_MAX and name.isidentifier()):
            raise Refusal(ErrorReason.MALFORMED_MESSAGE, "signal is no signal's name")
        await self._host.leave(
            entry, request.sequence, read_report(request), signal_name=name
        )
        return messages.LeaveResponse()


def _work(request: messages.ReportWorkRequest) -> Work:
    """A worker's report.

    Raises:
        Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED`.
    """
    counters = {name: getattr(request, name) for name in _COUNTERS}
    traffic = request.traffic
    sizes = [traffic.sent_bytes, traffic.received_bytes]
    sizes += [n for e in traffic.encodings for n in (e.sent_bytes, e.received_bytes)]
    if not all(0 <= n <= NUMBER_MAX for n in (*counters.values(), *sizes)):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"a counter is negative, above {NUMBER_MAX}, or no number",
        )
    if (
        len(request.metrics) > METRIC_COUNT_MAX
        or len(traffic.encodings) > ENCODING_COUNT_MAX
    ):
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"{len(request.metrics)} metrics and {len(traffic.encodings)} encodings, "
            f"the limits are {METRIC_COUNT_MAX} and {ENCODING_COUNT_MAX}",
        )
    for metric in request.metrics:
        check_metric_name(metric.name)
    for encoded in traffic.encodings:
        # They are labels of metrics, of which there are few.
        if encoded.encoding not in ENCODING_NAMES:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"the encoding {encoded.encoding[:64]!r} is none of "
                f"{', '.join(sorted(ENCODING_NAMES))}",
            )
    known = {each.value for each in Activity}
    activity = int(request.activity)
    return Work(
        **counters,
        activity=Activity(activity) if activity in known else Activity.UNKNOWN,
        sent_bytes=traffic.sent_bytes,
        received_bytes=traffic.received_bytes,
        encodings={
            each.encoding: (each.sent_bytes, each.received_bytes)
            for each in traffic.encodings
        },
        metrics={each.name: Logged(each.value, each.step) for each in request.metrics},
    )
