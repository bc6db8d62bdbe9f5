"""What workers and readers call at the coordinator about splits of data."""

from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.rpc.callers import Callers
from psserver.coordinator.rpc.split_codec import split_message
from psserver.edge.guard import Context
from psserver.edge.identity_codec import check_protocol
from psserver.edge.methods import Methods, answered
from pswire.recorded_split import RecordedSplit
from pswire.v1 import coordinator_service_pb2 as messages


class SplitControl:
    """Handlers for splits."""

    def __init__(self, host: CoordinatorHost) -> None:
        self._host = host
        self._callers = Callers(host.core)

    def methods(self) -> Methods:
        """Handlers by method name."""
        return {
            "RecordSplit": answered(self.record_split, messages.RecordSplitRequest),
            "ListSplits": answered(self.list_splits, messages.ListSplitsRequest),
        }

    async def record_split(
        self, request: messages.RecordSplitRequest, context: Context
    ) -> messages.RecordSplitResponse:
        """Records a split, or tells the one that has its name."""
        entry = self._callers.entry(request)
        self._host.core.check_present(entry)
        recorded = self._host.splits.record(
            RecordedSplit(
                name=request.split.name,
                recipe=request.split.recipe,
                digest=request.split.digest,
                item_count=request.split.item_count,
                recorder=entry.worker.worker_id,
            )
        )
        return messages.RecordSplitResponse(recorded=split_message(recorded))

    async def list_splits(
        self, request: messages.ListSplitsRequest, context: Context
    ) -> messages.ListSplitsResponse:
        """Tells one split with its recipe, or all without."""
        check_protocol(request.protocol_version)
        if request.name:
            found = self._host.splits.named(request.name)
            splits = [] if found is None else [split_message(found)]
        else:
            splits = [
                split_message(each, with_recipe=False)
                for each in self._host.splits.all()
            ]
        return messages.ListSplitsResponse(splits=splits)
