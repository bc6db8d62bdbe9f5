"""What every daemon answers to `psctl doctor`: what it is, and bytes to be timed."""

import platform
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from importlib import metadata
from typing import Final

import grpc

from psserver.edge.access import Access
from psserver.edge.answer_slots import AnswerSlots
from psserver.edge.guard import Context, address_of, machine_of, streamed
from pswire.limits import MESSAGE_BYTES_MAX, PROBE_BYTES_MAX, PROTOCOL_VERSION
from pswire.reasons import ErrorReason, Refusal
from pswire.shared_memory.machine import Machine
from pswire.v1 import probe_service_pb2 as messages

SERVICE: Final = "pswire.v1.ProbeService"

_SLOTS_EACH: Final = 1
_SLOTS: Final = 2
"""Calls under way that ask for bytes, of one machine and of all: training goes on
beside them, and bytes that nobody reads take memory."""

_PACKAGES: Final = ("torch", "grpcio", "protobuf")

_PIECE: Final = bytes(1 << 20)


def probe_handler(
    access: Access | None, *, shares_memory: bool = False
) -> grpc.GenericRpcHandler:
    """The service, for one server.

    Args:
        access: Knows the server's callers, None where they are not asked who they are.
        shares_memory: Whether the daemon would share memory with a worker.
    """
    slots = AnswerSlots(each_max=_SLOTS_EACH, all_max=_SLOTS)
    here = Machine.here()
    versions = {name: metadata.version(name) for name in _PACKAGES}
    versions["python"] = platform.python_version()
    release = metadata.version("paramserver")

    def answer(
        request: messages.ProbeRequest, context: Context
    ) -> messages.ProbeResponse:
        caller = request.machine
        obstacle = here.obstacle(
            Machine(caller.boot_id, caller.network_namespace, caller.user_id)
        )
        if not shares_memory:
            obstacle = "it is switched off there, or is not for this daemon"
        return messages.ProbeResponse(
            protocol_version=PROTOCOL_VERSION,
            release=release,
            versions=versions,
            unix_us=time.time_ns() // 1000,
            message_bytes_max=MESSAGE_BYTES_MAX,
            caller_address=address_of(context),
            knows_callers=access is not None,
            sharing_obstacle=obstacle,
        )

    async def probe(
        request: messages.ProbeRequest, context: Context
    ) -> AsyncIterator[messages.ProbeResponse]:
        wanted = request.wanted_byte_count
        if not 0 <= wanted <= PROBE_BYTES_MAX >= len(request.payload):
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"a probe takes and returns at most {PROBE_BYTES_MAX} bytes",
            )
        caller = machine_of(context)
        if wanted and not slots.has_one(caller):
            raise Refusal(
                ErrorReason.BUSY, "other callers measure how fast the link is just now"
            )
        with slots.taken(caller) if wanted else nullcontext():
            yield answer(request, context)
            for start in range(0, wanted, len(_PIECE)):
                yield messages.ProbeResponse(payload=_PIECE[: wanted - start])

    return grpc.method_handlers_generic_handler(
        SERVICE, {"Probe": streamed(probe, messages.ProbeRequest)}
    )
