"""What workers call at the coordinator about their data."""

from psserver.coordinator.core.data.epoch_ledger import EpochShape
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.rpc.account_codec import account_message
from psserver.coordinator.rpc.callers import Callers
from psserver.edge.guard import Context
from psserver.edge.identity_codec import read_ranges
from psserver.edge.methods import Methods, answered
from pswire.leased_data import DataReport
from pswire.names import check_name
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1 import push_pb2

BATCH_COUNT_MAX = 1024
"""Most batches that one call leases."""


class DataControl:
    """Handlers for data."""

    def __init__(self, host: CoordinatorHost) -> None:
        self._host = host
        self._callers = Callers(host.core)

    def methods(self) -> Methods:
        """Handlers by method name."""
        return {
            "OpenEpoch": answered(self.open_epoch, messages.OpenEpochRequest),
            "LeaseData": answered(self.lease_data, messages.LeaseDataRequest),
        }

    async def open_epoch(
        self, request: messages.OpenEpochRequest, context: Context
    ) -> messages.OpenEpochResponse:
        """Opens an epoch of a loader."""
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
            read_data_report(request),
        )
        if isinstance(origin, int):
            return messages.OpenEpochResponse(seed=origin)
        return messages.OpenEpochResponse(origin=origin)

    async def lease_data(
        self, request: messages.LeaseDataRequest, context: Context
    ) -> messages.LeaseDataResponse:
        """Leases ranges of an epoch."""
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
            read_data_report(request),
        )
        leased = await data.lease(
            entry, ledger, count_max=request.batch_count_max, wait=request.wait
        )
        return messages.LeaseDataResponse(
            ranges=[
                push_pb2.DataRange(
                    loader=piece.loader,
                    epoch=piece.epoch,
                    start=piece.start,
                    stop=piece.stop,
                )
                for piece in leased
            ],
            closed=ledger.is_closed,
            account=account_message(ledger.account) if ledger.is_closed else None,
        )


def read_data_report(
    request: messages.OpenEpochRequest
    | messages.LeaseDataRequest
    | messages.LeaveRequest,
) -> DataReport:
    """Reads what a worker tells of its data with any of its calls.

    Raises:
        Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED`.
    """
    return DataReport(
        consumed=read_ranges(request.consumed),
        dropped=read_ranges(request.dropped),
        skipped=read_ranges(request.skipped),
    )
