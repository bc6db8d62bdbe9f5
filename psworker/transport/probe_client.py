"""Asks daemons what they are, and times what they take and return. Without torch."""

import time
from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from pswire.channels import ChannelKind, aio_channel
from pswire.limits import PROBE_BYTES_MAX
from pswire.shared_memory.machine import Machine
from pswire.v1 import probe_service_pb2 as pb
from pswire.v1.probe_service_pb2_grpc import ProbeServiceStub
from psworker.transport.calls import calling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pswire.v1.probe_service_pb2_grpc import ProbeServiceAsyncStub

_FIRST_BYTES: Final = 64 << 10
_GROWTH: Final = 4
_ENOUGH_S: Final = 0.05
"""A transfer that takes as long says how fast the link is."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a daemon says of itself.

    Attributes:
        protocol_version: That it speaks.
        release: Of the package.
        versions: Of what it runs with, by package, and of `python`.
        unix_s: Its wall clock.
        message_bytes_max: Its largest message.
        caller_host: Where this process calls from, as it sees it.
        knows_callers: Whether it asks who calls.
        sharing_obstacle: Why it can't share memory with this process; else empty.
        taken_s: How long the call took.
        halfway_unix_s: The wall clock of this process in the middle of the call.
    """

    protocol_version: int
    release: str
    versions: Mapping[str, str]
    unix_s: float
    message_bytes_max: int
    caller_host: str
    knows_callers: bool
    sharing_obstacle: str
    taken_s: float
    halfway_unix_s: float


class ProbeClient:
    """One daemon. Made and used on the event loop."""

    def __init__(self, stub: "ProbeServiceAsyncStub", peer: str) -> None:
        self._stub = stub
        self._peer = peer

    async def ask(self, timeout_s: float) -> Probed:
        """What the daemon says of itself.

        Raises:
            CallError: It gave no answer, or is of a release that has none.
        """
        here = Machine.here()
        machine = pb.Machine(
            boot_id=here.boot_id,
            network_namespace=here.network_namespace,
            user_id=here.user_id,
        )
        began_unix_s, began_s = time.time(), time.monotonic()
        first = await self._call(pb.ProbeRequest(machine=machine), timeout_s)
        taken_s = time.monotonic() - began_s
        return Probed(
            protocol_version=first.protocol_version,
            release=first.release,
            versions=dict(first.versions),
            unix_s=first.unix_us / 1e6,
            message_bytes_max=first.message_bytes_max,
            caller_host=first.caller_address.rpartition(":")[0].strip("[]"),
            knows_callers=first.knows_callers,
            sharing_obstacle=first.sharing_obstacle,
            taken_s=taken_s,
            halfway_unix_s=began_unix_s + taken_s / 2,
        )

    async def sent_bytes_per_s(self, timeout_s: float) -> float:
        """How fast it takes bytes.

        Raises:
            CallError: It gave no answer in time, or too many measure it.
        """
        return await self._measured(
            lambda count: pb.ProbeRequest(payload=bytes(count)), timeout_s
        )

    async def received_bytes_per_s(self, timeout_s: float) -> float:
        """How fast it returns bytes; errors are as of `sent_bytes_per_s`."""
        return await self._measured(
            lambda count: pb.ProbeRequest(wanted_byte_count=count), timeout_s
        )

    async def _measured(
        self, request_of: Callable[[int], pb.ProbeRequest], timeout_s: float
    ) -> float:
        """The rate of the last of some transfers, each larger than the one before."""
        deadline = time.monotonic() + timeout_s
        count = _FIRST_BYTES
        while True:
            began_s = time.monotonic()
            await self._call(request_of(count), deadline - began_s)
            taken_s = time.monotonic() - began_s
            if taken_s >= _ENOUGH_S or count >= PROBE_BYTES_MAX:
                return count / taken_s
            count = min(PROBE_BYTES_MAX, count * _GROWTH)

    async def _call(
        self, request: pb.ProbeRequest, timeout_s: float
    ) -> pb.ProbeResponse:
        """The first message of an answer, when all of it has come."""
        first = None
        async with calling(
            self._peer, lambda: self._stub.Probe(request, timeout=timeout_s)
        ) as call:
            async for message in call:
                first = first or message
        return first or pb.ProbeResponse()


@asynccontextmanager
async def probing(address: str, peer: str) -> "AsyncIterator[ProbeClient]":
    """A connection of its own to a daemon, named in errors as `peer`."""
    async with aio_channel(address, ChannelKind.SNAPSHOT) as channel:
        yield ProbeClient(
            cast("ProbeServiceAsyncStub", ProbeServiceStub(channel)), peer
        )
