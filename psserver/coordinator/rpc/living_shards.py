"""Shards that call a coordinator which is not there, and what they say of themselves.

A shard whose coordinator is away calls again and again, and keeps its values. It is
answered as if it had to wait, so that it goes on doing so.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from psserver.edge.changes import Changes
from psserver.edge.decoding import decoded
from psserver.edge.guard import Context, unary
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import coordinator_service_pb2 as messages

_WAIT: Final = "the coordinator's state is looked at; it will be started again"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LivingShard:
    """A shard that has called.

    Attributes:
        shard_index: Its position.
        incarnation: Count of its starts.
        job_id: Its job.
        clock: Smallest clock over the members; None until it has said so, which one
            without values does not.
        version: Version of its values; None as for the clock.
    """

    shard_index: int
    incarnation: int
    job_id: str
    clock: int | None = None
    version: int | None = None


class LivingShards(grpc.GenericRpcHandler):
    """Answers every call by a refusal that has its caller wait.

    Attributes:
        found: Shards that have called, by job and index.
        changes: Notified when one has.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], LivingShard] = {}
        self.changes = Changes()

    @property
    def known_count(self) -> int:
        """Shards that have said where they stand."""
        return sum(each.clock is not None for each in self.found.values())

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """What answers a call, of whichever method."""
        method = str(handler_call_details.method).rpartition("/")[2]

        async def refuse(requests: AsyncIterator[bytes], context: Context) -> NoReturn:
            async for data in requests:
                await self._note(method, data)
                self.changes.notify()
                break
            raise Refusal(ErrorReason.RECOVERING, _WAIT)

        # Of whichever kind the call is: none comes to an answer.
        return grpc.stream_stream_rpc_method_handler(unary(refuse))

    async def _note(self, method: str, data: bytes) -> None:
        match method:
            case "WatchShard":
                watch = await decoded(messages.WatchShardRequest, data)
                key = watch.job_id, watch.shard_index
                self.found.setdefault(
                    key,
                    LivingShard(
                        shard_index=watch.shard_index,
                        incarnation=watch.incarnation,
                        job_id=watch.job_id,
                    ),
                )
            case "ReportProgress":
                report = await decoded(messages.ReportProgressRequest, data)
                self.found[report.job_id, report.shard_index] = LivingShard(
                    shard_index=report.shard_index,
                    incarnation=report.incarnation,
                    job_id=report.job_id,
                    clock=report.frontier,
                    version=report.version,
                )
