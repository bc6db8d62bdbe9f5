"""Whatever a field of a call has, and whatever a stream brings in which order.

Of each method, as the contract has them, an honest call is made with one field changed
at a time, and with its messages missing, twice, reversed and many times. A method that
is new is found by itself. Each call does what it says or is refused by a decided
status; what is refused changes nothing, none is a bug, and nothing is kept of all.
"""

import asyncio
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from psserver.coordinator.daemon import coordinator_handler
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.storage.job_store import JobStore
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.cut_report import CutReport
from psserver.edge.fence_report import FenceReport
from psserver.edge.monotonic import now_ms
from psserver.shard.core.shard_fence import Cut
from pswire.membership import FenceKind, StepAtomicity, WorkerState
from pswire.message_fields import varint
from pswire.v1 import coordinator_service_pb2, parameter_service_pb2
from tests.doubles.byte_calls import CallContext, called
from tests.doubles.core_values import TERMS, key
from tests.doubles.served_shard import ServedShard
from tests.property.test_hostile_messages import (
    coordinator_requests,
    of,
    patient,
    shard_requests,
)

__all__ = ["patient"]

Requests = list[bytes]
Change = Callable[[Message], bytes]

TIMEOUT_S: Final = 0.02
"""A call that waits for others is given up: nobody comes."""

DEPTH_MAX: Final = 4
"""Of fields within fields."""

REPEATED_COUNT: Final = 1_000_000
MESSAGE_COUNT: Final = 100
"""Messages of a stream, or of a list, that are too many."""

STRIDE: Final = 7
"""One in so many of all calls is made by `make test`; all are by `make test-all`."""

KEPT_COUNT_MAX: Final = 300
"""Objects that may be left of the hundreds of calls of a method. gRPC's, the event
loop's and Python's own caches go up and down by some."""

DECIDED: Final = frozenset(
    {
        None,  # it was answered, or given up while it waited
        *(
            grpc.StatusCode[name]
            for name in (
                *("ABORTED", "ALREADY_EXISTS", "DATA_LOSS", "DEADLINE_EXCEEDED"),
                *("FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND"),
                *("OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "UNAVAILABLE"),
                "UNIMPLEMENTED",
            )
        ),
    }
)

_INTS: Final = (-1, 0, 1, 64, 1 << 20, (1 << 31) - 1, -(1 << 31))
_LONGS: Final = (*_INTS, 1 << 62, (1 << 63) - 1, -(1 << 63))
_UINTS: Final = (0, 1, (1 << 32) - 1)
_FLOATS: Final = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e30)
_TEXTS: Final = ("", "x" * 5_000, "\0", "../../etc", "a/../b", "\u202ex", "e\u0301")
_BYTES: Final = (b"", b"\xff", b"\xff" * 70_000)

VALUES: Final[dict[int, Sequence[Any]]] = {
    FieldDescriptor.TYPE_INT32: _INTS,
    FieldDescriptor.TYPE_UINT32: _UINTS,
    FieldDescriptor.TYPE_FIXED32: _UINTS,
    FieldDescriptor.TYPE_INT64: _LONGS,
    FieldDescriptor.TYPE_UINT64: (*_UINTS, (1 << 64) - 1),
    FieldDescriptor.TYPE_FIXED64: (*_UINTS, (1 << 64) - 1),
    FieldDescriptor.TYPE_ENUM: (-1, 0, 1, 2, 99, (1 << 31) - 1),
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_FLOAT: _FLOATS,
    FieldDescriptor.TYPE_DOUBLE: (*_FLOATS, 1e308, 5e-324),
    FieldDescriptor.TYPE_STRING: _TEXTS,
    FieldDescriptor.TYPE_BYTES: _BYTES,
}
"""What a field of each type had better not have; protobuf's other types are not in the
contract."""

_OF_LENGTH: Final = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


# Calls that no honest caller makes


def methods_of(service: str) -> dict[str, MethodDescriptor]:
    """Its methods, as the contract has them."""
    files = (coordinator_service_pb2, parameter_service_pb2)
    (found,) = (
        file.DESCRIPTOR.services_by_name[service]
        for file in files
        if service in file.DESCRIPTOR.services_by_name
    )
    return {method.name: method for method in found.methods}


def paths(kind: Descriptor, depth: int = 1) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Fields of a message, and of those within it."""
    for field in kind.fields:
        yield (field,)
        if field.message_type is not None and depth < DEPTH_MAX:
            for rest in paths(field.message_type, depth + 1):
                yield (field, *rest)


def changes(path: tuple[FieldDescriptor, ...]) -> Iterator[Change]:
    """What is done to one field of a message."""
    *outer, field = path

    def cleared(message: Message) -> tuple[Message, Any]:
        copy = type(message)()
        copy.CopyFrom(message)
        owner: Any = copy
        for each in outer:
            owner = _within(owner, each)
        owner.ClearField(field.name)
        return copy, owner

    def absent(message: Message) -> bytes:
        return cleared(message)[0].SerializeToString()

    yield absent
    for value in (None,) if field.message_type is not None else VALUES[field.type]:

        def with_value(message: Message, value: object = value) -> bytes:
            copy, owner = cleared(message)
            _put(owner, field, value)
            return copy.SerializeToString()

        yield with_value
    if outer:
        return
    for tail in _tails(field):
        yield lambda message, tail=tail: message.SerializeToString() + tail  # type: ignore[misc]


def _within(message: Any, field: FieldDescriptor) -> Any:  # noqa: ANN401
    held = getattr(message, field.name)
    if not field.is_repeated:
        return held
    return held[0] if len(held) else held.add()


def _put(message: Any, field: FieldDescriptor, value: object) -> None:  # noqa: ANN401
    held = getattr(message, field.name)
    if field.message_type is None:
        if field.is_repeated:
            held.extend([value] * 3)
        else:
            setattr(message, field.name, value)
    elif field.is_repeated:
        for _ in range(MESSAGE_COUNT):
            held.add()
    else:
        held.SetInParent()


def _tails(field: FieldDescriptor) -> Iterator[bytes]:
    """Bytes that come after a message: of a field's number, and not as it should be."""
    has_length = field.message_type is not None or field.type in _OF_LENGTH
    if has_length:
        yield varint(field.number << 3) + b"\1"
    yield _of_bytes(field, b"\xff\xfe")
    if field.is_repeated:
        packed = _of_bytes(field, bytes(REPEATED_COUNT))
        yield _of_bytes(field, b"") * REPEATED_COUNT if has_length else packed


def _of_bytes(field: FieldDescriptor, data: bytes) -> bytes:
    return varint(field.number << 3 | 2) + varint(len(data)) + data


def streams(requests: Requests) -> list[Requests]:
    """Messages that are missing, twice, out of order, and very many."""
    found = [
        *([], [b""], [b"", *requests], requests * 2, requests[::-1], requests[1:]),
        *(requests[:count] for count in range(1, len(requests))),
    ]
    for each in requests:
        found += [[each] * MESSAGE_COUNT, [requests[0], *[each] * MESSAGE_COUNT]]
    return found


# What is called


class Served:
    """A service whose calls are made one after the other."""

    service: str
    handler: grpc.GenericRpcHandler
    runner: asyncio.Runner

    def requests(self, method: str) -> Requests:
        """The messages of an honest call, as things stand."""
        raise NotImplementedError

    def state(self) -> object:
        """What a call that is refused must not change."""
        raise NotImplementedError

    def call(self, method: str, requests: Requests) -> CallContext:
        path = f"/pswire.v1.{self.service}/{method}"
        return self.runner.run(
            called(self.handler, path, requests, timeout_s=TIMEOUT_S)
        )

    def settle(self) -> None:
        """Puts things as they were before a call that did what it says."""


class Shard(Served):
    """A shard with one member, and a snapshot; or one that waits for its seed."""

    service = "ParameterService"

    def __init__(self, runner: asyncio.Runner, **settings: Any) -> None:  # noqa: ANN401
        self.runner = runner
        self._settings = settings
        self.is_seeded = True

    async def begin(self) -> None:
        self.shard = ServedShard(**self._settings)
        host = self.shard.host
        self.shard.start(["a"])
        host.prepare_fence(2, FenceKind.CUT, None)
        host.decide_cut(2, Cut(1, 0, {key("a"): 0}))
        while await host.outbox.get() != CutReport(1):
            pass
        self.handler = self.shard.service.handler()

    async def begin_unseeded(self) -> None:
        self.is_seeded = False
        self.shard = ServedShard(**self._settings)
        self.shard.host.adopt(self.shard.terms)
        self.shard.host.prepare_fence(1, FenceKind.START, key("a"))
        self.handler = self.shard.service.handler()

    def requests(self, method: str) -> Requests:
        return shard_requests(self.shard)[method]

    def state(self) -> object:
        host = self.shard.host
        core = host.model.core
        values = (
            ()
            if not self.is_seeded
            else (
                bytes(host.model.engine.vectors.read(each.index))
                for each in host.model.chunks
            )
        )
        return (
            hash(tuple(values)),
            core.clocks.applied_clock,
            core.clocks.record,
            host.end_reason,
            [member.worker for member in host.members],
        )


class Coordinator(Served):
    """A coordinator whose job has started; a new one after each change."""

    service = "CoordinatorService"

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self.runner = runner
        self._folder = folder
        self._count = 0
        self._stack = ExitStack()
        self._begun: object = None
        self.settle()

    def requests(self, method: str) -> Requests:
        known = coordinator_requests()
        kind = GetMessageClass(methods_of(self.service)[method].input_type)
        return known.get(method) or [of(kind)]

    def state(self) -> object:
        core = self.host.core
        return (
            core.record,
            core.phase,
            core.fence and core.fence.number,
            core.model.terms,
            core.roster.incarnations,
            [(each.worker, each.state) for each in core.roster.in_state(*WorkerState)],
            [(slot.incarnation, slot.address) for slot in core.shards.slots],
            core.snapshots.finished_cut_count,
            self.host.data.splits.all(),
        )

    def settle(self) -> None:
        if self._begun is None or self.state() != self._begun:
            self.close()
            self.runner.run(self._begin())
            self._begun = self.state()

    def close(self) -> None:
        self._stack.close()

    async def _begin(self) -> None:
        self._count += 1
        store = JobStore(self._folder / str(self._count))
        self._stack.enter_context(store)
        settings = CoordinatorSettings(job_id="job", shard_count=1)
        host = self.host = CoordinatorHost(settings, store)
        slot = host.register_shard(process_id="process", address="host:1")
        host.open_shard_watch(slot)
        entry = host.register_worker(process_id="process", worker_id="a", address="h:2")
        host.open_worker_watch(entry)
        host.core.join(entry, terms=TERMS, loaders=("loader",), now_ms=now_ms())
        host.pump()
        fence = host.core.fence
        assert fence is not None
        found = FenceReport(
            fence_number=fence.number,
            holdings=(),
            trailer_clock_max=0,
            touched_clock_max=0,
            applied_clock=0,
        )
        host.take_report(slot, found)
        assert host.core.record is not None
        self.handler = coordinator_handler(host)


# The calls


def check_method(served: Served, name: str, stride: int) -> None:
    """Makes calls of a method twice; nothing is kept of the second time.

    Args:
        served: Its service.
        name: The method.
        stride: One in so many of all calls is made.
    """
    kept = []
    for _ in range(2):
        for make in islice(calls_of(served, name), None, None, stride):
            check_call(served, name, make())
        gc.collect()
        kept.append(len(gc.get_objects()))
    assert kept[1] - kept[0] < KEPT_COUNT_MAX, kept


def calls_of(served: Served, name: str) -> Iterator[Callable[[], Requests]]:
    """What makes the messages of each call that no honest caller makes."""
    method = methods_of(served.service)[name]
    kind = GetMessageClass(method.input_type)
    for place, honest in enumerate(map(kind.FromString, served.requests(name))):
        for path in paths(method.input_type):
            if place and not _has(honest, path[0]):
                continue  # the first message has had it
            for change in changes(path):

                def changed(place: int = place, change: Change = change) -> Requests:
                    requests = served.requests(name)
                    requests[place] = change(kind.FromString(requests[place]))
                    return requests

                yield changed
    if method.client_streaming:
        for number in range(len(streams(served.requests(name)))):
            yield lambda n=number: streams(served.requests(name))[n]  # type: ignore[misc]


def _has(message: Message, field: FieldDescriptor) -> bool:
    return any(each is field for each, _ in message.ListFields())


def check_call(served: Served, name: str, requests: Requests) -> None:
    before = served.state()
    found = served.call(name, requests)
    shown = (name, found.code, found.details, b"|".join(requests)[:200])
    assert found.code in DECIDED, shown
    assert "Traceback" not in found.details, shown
    if found.code is not None:
        assert 0 < len(found.details) < 2_000, shown
    if found.code in (None, grpc.StatusCode.DEADLINE_EXCEEDED):
        served.settle()  # it has begun what it says
    else:
        assert served.state() == before, shown


@pytest.fixture(autouse=True)
def no_bugs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a caller sends is a bug, whose traceback would be in the log."""
    yield
    found = [each.getMessage() for each in caplog.get_records("call") if each.exc_info]
    assert found == []


@contextmanager
def shard_of(*, is_seeded: bool = True, **settings: Any) -> Iterator[Shard]:  # noqa: ANN401
    with asyncio.Runner() as runner:
        served = Shard(runner, **settings)
        runner.run(served.begin() if is_seeded else served.begin_unseeded())
        yield served
        served.shard.host.close()


TWO_PHASES: Final[dict[str, Any]] = {
    "step_atomicity": StepAtomicity.CLOCK,
    "backup_worker_count": 1,
}


one_in = pytest.mark.parametrize(
    "stride", [STRIDE, pytest.param(1, marks=pytest.mark.repeat)]
)


@one_in
@pytest.mark.parametrize("name", methods_of("ParameterService"))
def test_a_shard_decides_whatever_a_field_has(name: str, stride: int) -> None:
    with shard_of(is_seeded=name != "Seed") as served:
        check_method(served, name, stride)


@one_in
@pytest.mark.parametrize("name", ["Commit", "Ready"])
def test_a_shard_of_two_phases_decides_whatever_a_field_has(
    name: str, stride: int
) -> None:
    with shard_of(**TWO_PHASES) as served:
        check_method(served, name, stride)


@one_in
@pytest.mark.parametrize("name", methods_of("CoordinatorService"))
def test_a_coordinator_decides_whatever_a_field_has(
    name: str, stride: int, tmp_path: Path
) -> None:
    with asyncio.Runner() as runner:
        served = Coordinator(runner, tmp_path)
        try:
            check_method(served, name, stride)
        finally:
            served.close()
