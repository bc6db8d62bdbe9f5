"""Calls about memory that a shard shares with workers on its machine."""

import secrets
from collections.abc import Iterable

from psserver.edge.decoding import worker_key
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc.push_codec import check_target
from psserver.shard.rpc.readiness import catch_up
from pswire.reasons import ErrorReason, Refusal
from pswire.shared_memory.handshake import TOKEN_BYTES
from pswire.shared_memory.segments import boot_id
from pswire.v1 import parameter_service_pb2 as messages


async def open_segments(
    host: ShardHost, request: messages.OpenSegmentsRequest
) -> messages.OpenSegmentsResponse:
    """Tells a member where to hand segments over, or why it shall not.

    Raises:
        Refusal: `WORKER_INCARNATION_STALE` for one that is no member; see
            `check_target` and `catch_up`.
    """
    check_target(host, request)
    worker = worker_key(request.worker)
    await catch_up(host, request.generation)
    if host.model.core.clocks.member_of(worker) is None:
        raise Refusal(
            ErrorReason.WORKER_INCARNATION_STALE,
            f"{worker} is no member, and shares no memory",
        )
    if declined := _declined(host, request.boot_id):
        return messages.OpenSegmentsResponse(declined=declined)
    token = secrets.token_bytes(TOKEN_BYTES)
    host.shared.expect(token, worker, host.model.placement, host.shard_index)
    return messages.OpenSegmentsResponse(
        socket_name=host.shared.socket_name, token=token
    )


def _declined(host: ShardHost, worker_boot_id: str) -> str:
    if not host.shared.is_wanted:
        return "it is switched off there, or its system lacks it"
    if not worker_boot_id or worker_boot_id != boot_id():
        return "it runs on another machine"
    if not host.model.terms.compression.is_none:
        return "the job compresses what is sent"
    if not host.shared.socket_name or host.model.engine.vectors.shared is None:
        return "its system lacks what it takes"
    return ""


def chunks_wanted(host: ShardHost, named: Iterable[int]) -> list[int]:
    """Chunks of this shard that a pull asks for, all if it names none.

    Raises:
        Refusal: `CHUNK_INVALID` for one of another shard.
    """
    own = [chunk.index for chunk in host.model.chunks]
    wanted = set(named)
    if others := wanted.difference(own):
        raise Refusal(
            ErrorReason.CHUNK_INVALID,
            f"chunk {min(others)} is not one of shard {host.shard_index}'s "
            f"{len(own)} chunks",
        )
    return [index for index in own if index in wanted] if wanted else own
