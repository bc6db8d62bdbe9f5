"""What workers call at the coordinator about their data, and readers about splits."""

from dataclasses import replace

from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.rpc.callers import Callers
from psserver.edge.decoding import check_protocol
from psserver.edge.guard import Context, Methods, answered
from pswire.leased_data import EpochShape
from pswire.membership_codec import (
    epoch_message,
    range_messages,
    read_report,
    read_split,
    split_message,
    split_messages,
)
from pswire.names import check_name
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import coordinator_service_pb2 as messages

BATCH_COUNT_MAX = 1024
"""Most batches that one call leases."""


class DataControl:
    def __init__(self, host: CoordinatorHost) -> None:
        self._host = host
        self._callers = Callers(host.core)

    def methods(self) -> Methods:
        return {
            "OpenEpoch": answered(self.open_epoch, messages.OpenEpochRequest),
            "LeaseData": answered(self.lease_data, messages.LeaseDataRequest),
            "RecordSplit": answered(self.record_split, messages.RecordSplitRequest),
            "ListSplits": answered(self.list_splits, messages.ListSplitsRequest),
        }

    async def open_epoch(
        self, request: messages.OpenEpochRequest, context: Context
    ) -> messages.OpenEpochResponse:
        entry = self._callers.member(request)
        check_name("loader", request.loader)
        if request.epoch < 0:
            raise Refusal(ErrorReason.MALFORMED_MESSAGE, "epoch is negative")
        origin = self._host.data.open_epoch(
            entry,
            request.loader,
            request.epoch,
            EpochShape(
                position_count=request.position_count,
                batch_size=request.batch_size,
                drop_last=request.drop_last,
            ),
            request.origin,
            read_report(request),
        )
        if isinstance(origin, int):
            return messages.OpenEpochResponse(seed=origin)
        return messages.OpenEpochResponse(origin=origin)

    async def lease_data(
        self, request: messages.LeaseDataRequest, context: Context
    ) -> messages.LeaseDataResponse:
        entry = self._callers.member(request)
        if not 1 <= request.batch_count_max <= BATCH_COUNT_MAX:
            raise Refusal(
                ErrorReason.MALFORMED_MESSAGE,
                f"batch_count_max {request.batch_count_max} is not in 1 to "
                f"{BATCH_COUNT_MAX}",
            )
        data = self._host.data
        ledger = data.take_report(
            entry,
            request.loader,
            request.epoch,
            request.order_digest,
            read_report(request),
        )
        leased = await data.lease(
            entry, ledger, count_max=request.batch_count_max, wait=request.wait
        )
        return messages.LeaseDataResponse(
            ranges=range_messages(leased),
            closed=ledger.is_closed,
            account=epoch_message(ledger.report) if ledger.is_closed else None,
        )

    async def record_split(
        self, request: messages.RecordSplitRequest, context: Context
    ) -> messages.RecordSplitResponse:
        """Records a split, or returns the one that has its name."""
        entry = self._callers.entry(request)
        self._host.core.check_present(entry)
        recorded = self._host.data.record_split(
            replace(read_split(request.split), recorder=entry.worker.worker_id)
        )
        return messages.RecordSplitResponse(recorded=split_message(recorded))

    async def list_splits(
        self, request: messages.ListSplitsRequest, context: Context
    ) -> messages.ListSplitsResponse:
        """Returns one split with its recipe, or all without."""
        check_protocol(request.protocol_version)
        if request.name:
            found = self._host.data.splits.named(request.name)
            splits = [] if found is None else [split_message(found)]
        else:
            splits = split_messages(self._host.data.splits.all())
        return messages.ListSplitsResponse(splits=splits)
