"""What a forger needs to speak for a member of a running job."""

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import grpc
import pytest
from typing_extensions import override

from psserver.shard.host.shard_host import ShardHost
from pswire.error_details import refusal_from_rpc_error
from pswire.frames import (
    REQUEST_CHUNK_FIELD,
    REQUEST_HEADER_FIELD,
    REQUEST_TRAILER_FIELD,
    encode_chunk,
    join_fields,
    split_fields,
)
from pswire.limits import PROTOCOL_VERSION
from pswire.placement import Chunk
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import OptimizerSpec
from pswire.v1 import (
    membership_pb2,
    push_pb2,
    schema_pb2,
)
from tests.doubles.http2_client import Http2Client
from tests.integration.job import Job, key

DATA: Final = "/pswire.v1.ParameterService/"
CONTROL: Final = "/pswire.v1.CoordinatorService/"
WATCH: Final = "/grpc.health.v1.Health/Watch"
"""A call that stays: no connection that has one is idle."""

TIMEOUT_S: Final = 30.0
Messages = list[bytes]
RawCall = Callable[..., Iterable[bytes]]


class Forger(ABC):
    """What a forger needs to speak for the first member of a running job.

    Attributes:
        channel: To the first shard.
        coordinator: To the coordinator.
        step: Has the members step once, and checks what comes of it.
        own: A chunk of the first shard.
        other: One of the second.
    """

    channel: grpc.Channel
    coordinator: grpc.Channel
    step: Callable[[], None]
    own: Chunk
    other: Chunk

    @property
    @abstractmethod
    def job_id(self) -> str:
        """Of the job."""

    @property
    @abstractmethod
    def shard_incarnation(self) -> int:
        """Of the first shard."""

    @property
    @abstractmethod
    def done(self) -> int:
        """Newest clock that is applied, which is also the member's last push."""

    @property
    @abstractmethod
    def optimizer(self) -> OptimizerSpec:
        """The job's one optimizer."""

    @property
    @abstractmethod
    def coordinator_address(self) -> str:
        """`HOST:PORT`."""

    @property
    @abstractmethod
    def shard_address(self) -> str:
        """`HOST:PORT` of the first shard."""

    @property
    @abstractmethod
    def admin_url(self) -> str:
        """Of the coordinator's admin port."""

    @abstractmethod
    def state(self) -> object:
        """All that must not change, to be compared."""

    def opened(self, address: str) -> grpc.Channel:
        """A channel with a connection of its own."""
        return grpc.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def http2(self, address: str, *, speaks: bool = True) -> Http2Client:
        """A connection that is spoken to in frames, or as a caller likes."""
        return Http2Client(address, speaks=speaks)

    def admin(self) -> socket.socket:
        """A connection to the admin port that has said nothing yet."""
        return self.http2(self.admin_url.split("/")[2], speaks=False).socket

    def header(self, **changes: Any) -> bytes:  # noqa: ANN401, fields of a message
        """A header that is right but for the changes."""
        done = self.done
        values: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "job_id": self.job_id,
            "optimizer": "optimizer",
            "worker": membership_pb2.WorkerIdentity(worker_id="w0", incarnation=1),
            "shard_incarnation": self.shard_incarnation,
            "generation": 1,
            "sequence": done + 1,
            "sequence_unacknowledged_min": done + 1,
            "clock": done + 1,
        }
        values.update(changes)
        header = push_pb2.PushHeader(**values).SerializeToString()
        return join_fields((REQUEST_HEADER_FIELD, header))

    def later(self, count: int) -> bytes:
        """The header of a push that is `count` pushes too far on."""
        done = self.done
        return self.header(sequence=done + count, clock=done + count)

    def trailer(self, **changes: Any) -> bytes:  # noqa: ANN401, fields of a message
        """A trailer of a push without chunks, right but for the changes."""
        values: dict[str, Any] = {
            "weight": 1.0,
            "groups": [schema_pb2.GroupHyperparameters(values=self.hyperparameters())],
            "finite": True,
            "chunk_bitmap": b"\0",
        }
        values.update(changes)
        trailer = push_pb2.PushTrailer(**values).SerializeToString()
        return join_fields((REQUEST_TRAILER_FIELD, trailer))

    def hyperparameters(self, **changes: float) -> list[float]:
        """Those of the job's one group, but for the changes."""
        spec = self.optimizer
        pairs = zip(
            spec.hyperparameter_names, spec.groups[0].hyperparameters, strict=True
        )
        return list({**dict(pairs), **changes}.values())

    def group(self, **changes: float) -> list[schema_pb2.GroupHyperparameters]:
        values = self.hyperparameters(**changes)
        return [schema_pb2.GroupHyperparameters(values=values)]

    def chunk(self, chunk: Chunk, **changes: Any) -> bytes:  # noqa: ANN401
        """A whole chunk of zeros, right but for the changes."""
        values: dict[str, Any] = {
            "index": chunk.index,
            "presence": b"\x01",
            "data": bytes(chunk.byte_count),
        }
        values.update(changes)
        return encode_chunk(REQUEST_CHUNK_FIELD, **values)


@dataclass
class Target(Forger):
    """A job in this process, as its forger sees it."""

    job: Job
    channel: grpc.Channel
    coordinator: grpc.Channel
    step: Callable[[], None]
    own: Chunk = field(init=False)
    other: Chunk = field(init=False)

    def __post_init__(self) -> None:
        self.own, self.other = (host.model.chunks[0] for host in self.job.shards[:2])

    @property
    @override
    def job_id(self) -> str:
        return self.job.shards[0].job_id

    @property
    @override
    def shard_incarnation(self) -> int:
        return self.job.shards[0].incarnation

    @property
    @override
    def done(self) -> int:
        clocks = self.job.shards[0].model.core.clocks
        return self.job.ask(lambda: clocks.applied_clock)

    @property
    @override
    def optimizer(self) -> OptimizerSpec:
        return self.job.terms.optimizers[0]

    @property
    @override
    def coordinator_address(self) -> str:
        return self.job.address

    @property
    @override
    def shard_address(self) -> str:
        return self.job.shard_addresses()[0]

    @property
    @override
    def admin_url(self) -> str:
        return self.job.coordinator.admin_url

    @override
    def state(self) -> tuple[object, ...]:
        """Values, clocks, and what is kept of pushes."""
        kept = [self.job.ask(partial(_kept, host)) for host in self.job.shards]
        return (self.job.values_digest(), *kept)


def _kept(host: ShardHost) -> tuple[object, ...]:
    core = host.model.core
    window = core.on_shard.window_of(key("w0"))
    # What the next push acknowledges is forgotten, by an honest one and a forged one.
    open_pushes = [
        (sequence, entry.trailer, dict(entry.digests))
        for sequence, entry in window.entries.items()
        if sequence > window.done_sequence and (entry.trailer or entry.digests)
    ]
    return core.clocks.applied_clock, core.clocks.record, open_pushes


def streamed(channel: grpc.Channel, method: str) -> RawCall:
    """A method with a stream of raw bytes each way, whatever the method's own kind."""
    return cast("RawCall", channel.stream_stream(DATA + method, None, None))


def asked(channel: grpc.Channel, method: str) -> RawCall:
    """A method that takes raw bytes."""
    return cast("RawCall", channel.unary_stream(CONTROL + method, None, None))


def refusal_of(call: Iterable[object]) -> tuple[grpc.StatusCode, str, object]:
    """How a call ends: status, text and our reason."""
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    error: Any = caught.value
    refusal = refusal_from_rpc_error(error)
    return error.code(), error.details(), refusal and refusal.reason


def assert_readable(text: str) -> None:
    assert "Traceback" not in text
    assert 'File "' not in text
    assert "object at 0x" not in text
    assert 0 < len(text) < 2000


Case = tuple[ErrorReason, str, Callable[[Target], Messages]]
"""Why a push is refused, words of the text, and its messages."""


def check_refused(target: Target, method: str, case: Case) -> None:
    """A forged push is refused in words, and nothing changes."""
    reason, fragment, make = case
    before = target.state()
    call = streamed(target.channel, method)

    code, text, found = refusal_of(call(iter(make(target)), timeout=TIMEOUT_S))

    assert found == reason, (code, text)
    assert fragment in text
    assert_readable(text)
    assert target.state() == before


def check_refused_at_once(target: Target, case: Case) -> None:
    """As `check_refused`, of a push that is one message."""
    reason, fragment, make = case
    message = b"".join(make(target))
    if not _has_trailer(message):
        message += target.trailer()
    before = target.state()
    call = streamed(target.channel, "PushPullOnce")

    code, text, found = refusal_of(call(iter([message]), timeout=TIMEOUT_S))

    assert found == reason, (code, text)
    assert fragment in text
    assert_readable(text)
    assert target.state() == before


def _has_trailer(message: bytes) -> bool:
    """Whether it has one, or is garbage before that can be told."""
    try:
        return any(field == REQUEST_TRAILER_FIELD for field, _ in split_fields(message))
    except Refusal:
        return True


def check_goes_on(target: Target, cases: Iterable[Case]) -> None:
    """Training goes on after each forged push."""
    call = streamed(target.channel, "PushPull")
    for _, _, make in cases:
        refusal_of(call(iter(make(target)), timeout=TIMEOUT_S))
        target.step()
