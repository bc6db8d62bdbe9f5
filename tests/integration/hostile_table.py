"""A table of hostile and malformed input: what is done, and how it has to end.

Whoever attacks has a `Forger` of its job, be that one of this process or of others. A
client of bytes sends what gRPC's own would not.
"""

import gzip
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

import grpc

from psserver.edge.limits import Limits
from pswire.error_details import refusal_from_rpc_error
from pswire.limits import MESSAGE_BYTES_MAX, PROTOCOL_VERSION
from pswire.v1 import coordinator_service_pb2 as control
from pswire.v1 import membership_pb2
from pswire.v1 import parameter_service_pb2 as messages
from tests.doubles.http2_client import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    Http2Client,
    frame,
    literal,
    message,
)
from tests.doubles.resident_memory import MIB
from tests.integration.forged_calls import CONTROL, Forger, streamed
from tests.integration.forged_calls import DATA as SHARD
from tests.integration.test_hostile_control import entry, forged_join, optimizer

# Members of the same job, and whoever attacks, have to keep the times, too, while a
# busy machine lets neither of them go on for a second.
LIMITS: Final = Limits(
    machine_calls=96,
    registrations=32,
    handshake_s=3.0,
    idle_s=0.5,
    first_message_s=3.0,
    message_s=3.0,
    join_s=5.0,
    admin_connections=8,
    tensors=20_000,
    model_bytes=1 << 40,
)

TIMEOUT_S: Final = 10.0
CLOSED: Final = "closed"
REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
BOMB: Final = gzip.compress(bytes(12 * MIB), 9)

Outcome = tuple[str, str]
"""Name of a status, or what else has happened; and the text that came."""


# How a call ends


def outcome_of(call: Any) -> Outcome:  # noqa: ANN401, gRPC's
    """How a call of gRPC's own client ends."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return ended(error)
    return "OK", ""


def ended(error: Any) -> Outcome:  # noqa: ANN401, gRPC's
    """How a call has ended."""
    refusal = refusal_from_rpc_error(error)
    name = error.code().name
    return (f"{name} {refusal.reason.name}" if refusal else name), error.details()


def pushed(t: Forger, *parts: bytes, method: str = "PushPull") -> Outcome:
    call = streamed(t.channel, method)
    return outcome_of(call(iter(parts), timeout=TIMEOUT_S))


def called(
    t: Forger,
    method: str,
    *parts: Any,  # noqa: ANN401, messages or bytes
    timeout: float = TIMEOUT_S,
    **options: Any,  # noqa: ANN401, as gRPC has them
) -> Outcome:
    """A call of the coordinator or the shard, whichever has the method."""
    call = stub_of(t, method)
    sent = [
        part if isinstance(part, bytes) else part.SerializeToString() for part in parts
    ]
    return outcome_of(call(iter(sent), timeout=timeout, **options))


def stub_of(t: Forger, method: str) -> Any:  # noqa: ANN401, gRPC's
    service = control.DESCRIPTOR.services_by_name["CoordinatorService"]
    is_control = method in service.methods_by_name
    channel, path = (t.coordinator, CONTROL) if is_control else (t.channel, SHARD)
    return channel.stream_stream(path + method)


def of(t: Forger, kind: Any, **changes: Any) -> Any:  # noqa: ANN401, a message
    """A message with those fields of an honest one that it has, but for the changes."""
    values = {
        "protocol_version": PROTOCOL_VERSION,
        "job_id": t.job_id,
        "worker": identity("w0"),
        "shard_incarnation": t.shard_incarnation,
        "generation": 1,
    }
    known = kind.DESCRIPTOR.fields_by_name
    return kind(**{**{n: v for n, v in values.items() if n in known}, **changes})


def identity(name: str, incarnation: int = 1) -> membership_pb2.WorkerIdentity:
    return membership_pb2.WorkerIdentity(worker_id=name, incarnation=incarnation)


def joined(t: Forger, entries: list[Any], *optimizers: Any) -> Outcome:  # noqa: ANN401
    """A stranger that registers and wants to join with this model."""
    try:
        code, text = forged_join(t.coordinator, entries, list(optimizers))
    except grpc.RpcError as error:  # it could not register
        return ended(error)
    return code.name, text


def raw(t: Forger, do: Callable[[Http2Client], Outcome | None]) -> Outcome:
    """What comes of frames that are sent to the shard."""
    try:
        client = t.http2(t.shard_address)
    except (ConnectionError, ssl.SSLError) as error:
        return CLOSED, str(error)
    with client:
        with suppress(ConnectionError, ssl.SSLError):
            found = do(client)
            if found is not None:
                return found
        return (CLOSED if client.is_ended() else "open"), ""


def status_of(client: Http2Client) -> Outcome:
    number, text = client.status()
    if text == "the connection has ended":
        return CLOSED, text
    (code,) = (each for each in grpc.StatusCode if each.value[0] == number)
    return code.name, text


# Rows that need more than a line


def announced(client: Http2Client) -> Outcome:
    """Says that a message of 1 GiB follows, and sends none."""
    client.begin(SHARD + "PushPull")
    client.send(b"\0" + (1 << 30).to_bytes(4))
    return status_of(client)


def compressed(client: Http2Client) -> Outcome:
    client.begin(SHARD + "PushPull", **{"grpc-encoding": "gzip"})
    client.send(message(BOMB, compressed=1))
    return status_of(client)


def large_headers(client: Http2Client) -> Outcome:
    fields = client.fields(SHARD + "PushPull") + literal("x-large", "x" * 15_000) * 2
    client.follow(1)
    client.raw(frame(HEADERS, 0, 1, fields[:16_000]))
    client.raw(frame(CONTINUATION, END_HEADERS, 1, fields[16_000:]))
    client.send(message(b""), ends=True)
    return status_of(client)


def endless_headers(client: Http2Client) -> None:
    client.raw(frame(HEADERS, 0, 1, client.fields(SHARD + "PushPull")))
    for _ in range(2_000):
        client.raw(frame(CONTINUATION, 0, 1, literal("x", "y" * 100) * 20))


def empty_frames(client: Http2Client) -> None:
    client.begin(SHARD + "PushPull")
    client.raw(frame(DATA, 0, 1) * 2_000)


def slow_message(client: Http2Client) -> Outcome:
    """A byte at a time, each before any time between bytes could be over."""
    client.begin(SHARD + "PushPull")
    client.socket.settimeout(0.05)
    for byte in message(bytes(1_000)):
        client.send(bytes((byte,)))
        try:
            return status_of(client)
        except TimeoutError:
            continue
    return "open", ""


def rapid_reset(client: Http2Client) -> None:
    for number in range(500):
        stream = client.begin(SHARD + "PushPull")
        client.raw(frame(RST_STREAM, 0, stream, (8).to_bytes(4)))
        if number % 50 == 0:
            client.raw(frame(PING, 0, 0, bytes(8)))
    client.begin(SHARD + "GetSession")
    client.send(message(b"\xff"), ends=True)


def connects(t: Forger) -> Outcome:
    """Many sockets that never say a word."""
    host, _, port = t.shard_address.rpartition(":")
    held = [socket.create_connection((host, int(port)), TIMEOUT_S) for _ in range(64)]
    try:
        for each in held:
            with suppress(ConnectionError):
                while each.recv(1 << 16):
                    pass
    finally:
        for each in held:
            each.close()
    return CLOSED, ""


def silent(t: Forger, method: str, *parts: bytes) -> Outcome:
    """Sends so much, and then nothing."""
    return left_open(stub_of(t, method), *parts)


def left_open(call: Any, *parts: bytes) -> Outcome:  # noqa: ANN401, gRPC's
    is_over = threading.Event()

    def sent() -> Iterator[bytes]:
        yield from parts
        is_over.wait(TIMEOUT_S)

    try:
        return outcome_of(call(sent(), timeout=TIMEOUT_S))
    finally:
        is_over.set()


def many_calls(t: Forger) -> Outcome:
    """More than a machine may have; those beyond are refused at once."""
    request = of(
        t, control.RequestSnapshotRequest, newer_than=1 << 60, timeout_ms=5_000
    )
    channels = [t.opened(t.coordinator_address) for _ in range(2)]
    try:
        calls: list[Any] = [
            each.stream_stream(CONTROL + "RequestSnapshot")(
                iter([request.SerializeToString()])
            )
            for each in channels
            for _ in range(60)
        ]
        found: list[Outcome] = []
        ended_count = count(1)
        ready = threading.Event()

        def note(call: Any) -> None:  # noqa: ANN401
            is_refused = call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            if is_refused:
                found.insert(0, (call.code().name, call.details()))
            else:
                found.append((call.code().name, call.details()))
            if next(ended_count) == len(calls) or is_refused:
                ready.set()

        for each in calls:
            if not each.add_callback(partial(note, each)):  # it has ended already
                note(each)
        ready.wait(TIMEOUT_S)
        for each in calls:
            each.cancel()
    finally:
        for each in channels:
            each.close()
    return found[0] if found else ("OK", "")


def many_registrations(t: Forger) -> Outcome:
    """Strangers who register and do no more, until one more is refused."""
    job_id = t.job_id
    names = [f"stranger {number}" for number in range(LIMITS.registrations + 1)]
    outcomes = [
        called(
            t,
            "RegisterWorker",
            control.RegisterWorkerRequest(
                protocol_version=PROTOCOL_VERSION, process_id=name, worker_id=name
            ),
        )
        for name in names
    ]
    for name in names:
        leave = control.LeaveRequest(
            job_id=job_id, worker=identity(name), process_id=name
        )
        called(t, "Leave", leave)
    return outcomes[-1]


def opened_and_cancelled(t: Forger) -> Outcome:
    call = streamed(t.channel, "PushPull")
    for _ in range(300):
        each: Any = call(iter([b"\x0a\x00"]), timeout=TIMEOUT_S)
        each.cancel()
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        outcome, text = pushed(t, b"\xff")
        # Refused by gRPC, while it counts more than it has heard to be cancelled.
        is_counted = "Received RST_STREAM with error code 7" in text
        if not is_counted or time.monotonic() > deadline_s:
            return outcome, text


def reflected(t: Forger, *parts: bytes) -> Outcome:
    """Asks what the server serves, and leaves the call open."""
    return left_open(t.channel.stream_stream(REFLECTION), *parts)


def again(t: Forger) -> Outcome:
    """The push that a member has just made, once more."""
    done = t.done
    header = t.header(sequence=done, sequence_unacknowledged_min=done, clock=done)
    return pushed(t, header + t.trailer())


def _at_sequence(number: int, t: Forger) -> Outcome:
    return pushed(t, t.header(sequence=number, clock=number))


def _with_quorum(quorum: int, grace_window_ms: int, t: Forger) -> Outcome:
    request = of(
        t,
        control.SetModeRequest,
        mode=membership_pb2.MODE_QUORUM,
        quorum=quorum,
        grace_window_ms=grace_window_ms,
        timeout_ms=100,
    )
    return called(t, "SetMode", request)


def _with_rate(rate: float, t: Forger) -> Outcome:
    return pushed(t, t.header(), t.trailer(groups=t.group(lr=rate)))


def restored(name: str, t: Forger) -> Outcome:
    request = of(t, control.RestoreCheckpointRequest, name=name, timeout_ms=9_000)
    return called(t, "RestoreCheckpoint", request)


def snapshot(t: Forger, **changes: Any) -> Outcome:  # noqa: ANN401
    return called(
        t, "RequestSnapshot", of(t, control.RequestSnapshotRequest, **changes)
    )


# Rows that speak HTTP, to the admin port of the coordinator


def asked(t: Forger, *parts: bytes) -> Outcome:
    """What comes of some bytes."""
    with suppress(*_ENDED), t.admin() as connection:
        for part in parts:
            connection.sendall(part)
        answer = connection.recv(1 << 16)
        while b"\r\n\r\n" in answer and (part := connection.recv(1 << 16)):
            answer += part
        if answer:
            head, _, body = answer.decode().partition("\r\n\r\n")
            return head.split()[1], body
    return CLOSED, ""


def asks_slowly(t: Forger) -> Outcome:
    """A byte of the headers at a time."""
    with suppress(*_ENDED), t.admin() as connection:
        connection.settimeout(0.05)
        for byte in b"GET /status HTTP/1.1\r\n" + b"X: y\r\n" * 1_000:
            connection.sendall(bytes((byte,)))
            with suppress(TimeoutError):
                return (CLOSED if not connection.recv(1) else "answered"), ""
    return CLOSED, ""


def asks_for_many(t: Forger) -> Outcome:
    """More connections than there is room for; the next caller is answered."""
    with ExitStack() as stack:
        for _ in range(2 * LIMITS.admin_connections):
            stack.enter_context(t.admin())
        return asked(t, request_of("/healthz"))


def request_of(
    path: str, *headers: str, method: str = "GET", alive: bool = False
) -> bytes:
    after = "keep-alive" if alive else "close"
    lines = (f"{method} {path} HTTP/1.1", f"Connection: {after}", *headers)
    host = () if any("Host" in each for each in headers) else ("Host: localhost",)
    return "\r\n".join([*lines, *host, "", ""]).encode()


def reads_nothing(t: Forger) -> Outcome:
    """Asks for the page many times, on all connections; the next caller is answered."""
    deadline_s = time.monotonic() + TIMEOUT_S
    with ExitStack() as stack:
        for _ in range(LIMITS.admin_connections):
            connection = stack.enter_context(t.admin())
            connection.settimeout(0.05)
            with suppress(TimeoutError, *_ENDED):
                connection.sendall(request_of("/page.js", alive=True) * 1_000)
        while (found := asked(t, request_of("/healthz")))[0] == CLOSED:
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.05)
        return found


_ENDED: Final = (ConnectionError, ssl.SSLError)


@dataclass(frozen=True, slots=True)
class Row:
    """A case.

    Attributes:
        attack: Does it; how it ended.
        outcome: How it has to end, a regular expression.
        words: What the text has to have.
        is_slow: Whether it takes ten seconds where nothing shortens times.
    """

    attack: Callable[[Forger], Outcome]
    outcome: str
    words: str = ""
    is_slow: bool = False


row = Row


MODEL: Final = [entry(), entry(name="1")]

IA, FP, RE = "INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"

ROWS: Final[dict[str, Row]] = {
    "1 no message": row(lambda t: pushed(t, b"\xff" * 64), f"{IA} MALFORMED", "byte 0"),
    "2 unknown method": row(
        lambda t: pushed(t, b"", method="Overwrite"), "UNIMPLEMENTED"
    ),
    "3 message too large": row(
        lambda t: pushed(t, t.header(), bytes(MESSAGE_BYTES_MAX + 1)),
        RE,
        "larger than max",
    ),
    "4 message announced": row(lambda t: raw(t, announced), f"{RE}|{CLOSED}|CANCELLED"),
    "4 message drips": row(
        lambda t: raw(t, slow_message), "DEADLINE_EXCEEDED", "silent"
    ),
    "6 compressed bomb": row(
        lambda t: raw(t, compressed), "UNIMPLEMENTED", "'gzip' is disabled"
    ),
    "7 large metadata": row(
        lambda t: called(t, "GetStatus", b"", metadata=[("x", "y" * 20_000)]),
        RE,
        "metadata",
    ),
    "7 large headers, raw": row(
        lambda t: raw(t, large_headers), RE, r"headers of the call have 3\d{4} bytes"
    ),
    "7 headers without end": row(lambda t: raw(t, endless_headers), CLOSED),
    "11 another job": row(
        lambda t: pushed(t, t.header(job_id="x\n<b>")), "NOT_FOUND", r"job 'x\\n<b>'"
    ),
    "12 another protocol": row(
        lambda t: pushed(t, t.header(protocol_version=7)),
        FP,
        "speaks protocol 7.*speaks 1",
    ),
    "13 unknown feature": row(
        lambda t: pushed(t, t.header(), t.chunk(t.own, encoding=77)), IA, "encoding 77"
    ),
    "16 closed start of a worker": row(
        lambda t: pushed(t, t.header(worker=identity("w0", 7))), "ABORTED", "w0/7"
    ),
    **{
        f"17 sequence {number}": row(partial(_at_sequence, number), IA, "sequence")
        for number in (0, -1, (1 << 62) + 1)
    },
    "18 sequence gap": row(
        lambda t: pushed(t, t.later(200)), "OUT_OF_RANGE SEQUENCE_GAP"
    ),
    "18 window": row(
        lambda t: pushed(t, t.header(sequence_unacknowledged_min=-64)),
        RE,
        "unacknowledged",
    ),
    "19 push again with other bytes": row(again, f"{IA} PUSH_CONFLICT", "before"),
    "21 chunk of another shard": row(
        lambda t: pushed(t, t.header(), t.chunk(t.other)), f"{IA} CHUNK_INVALID"
    ),
    "22 unknown chunk": row(
        lambda t: pushed(t, t.header(), t.chunk(t.own, index=(1 << 32) - 1)),
        IA,
        "4294967295",
    ),
    "23 another model": row(
        lambda t: joined(t, [entry(shape=[7])]), FP, r"\[7\].*|1024"
    ),
    "24 product beyond 64 bits": row(
        lambda t: joined(t, [entry(shape=[4194305, 4194305, 211106198978564])]), RE
    ),
    "24 more bytes than the job may have": row(
        lambda t: joined(t, [entry(shape=[1 << 39])]),
        RE,
        "declares 2199023255552 bytes",
    ),
    "26 a million tensors": row(
        lambda t: joined(t, [entry(name=str(n), shape=[]) for n in range(20_001)]),
        RE,
        "20001 tensors",
    ),
    "26 a million fields": row(
        lambda t: called(t, "Join", b"\x12\x00" * 1_000_000), RE, "fields"
    ),
    "27 empty name": row(lambda t: joined(t, [entry(name="")]), IA, "empty"),
    "27 long name": row(
        lambda t: joined(t, [entry(name="x" * 1025)]), RE, "1025 bytes"
    ),
    "27 worker's id that steers": row(
        lambda t: called(
            t,
            "RegisterWorker",
            control.RegisterWorkerRequest(
                protocol_version=PROTOCOL_VERSION, process_id="p", worker_id="a\x1b[2J"
            ),
        ),
        IA,
        "control character",
    ),
    "27 name that is no UTF-8": row(
        lambda t: called(t, "RegisterWorker", b"\x08\x01\x12\x01p\x1a\x02\xff\xfe"), IA
    ),
    "28 unknown type": row(lambda t: joined(t, [entry(element_type=77)]), IA),
    "28 unknown optimizer": row(
        lambda t: joined(t, MODEL, optimizer("os.system", 0)), FP, "os.system"
    ),
    "29 too few bytes": row(
        lambda t: pushed(t, t.header(), t.chunk(t.own, data=bytes(8))),
        IA,
        "take 4096 bytes",
    ),
    "29 too many bytes": row(
        lambda t: pushed(t, t.header(), t.chunk(t.own, data=bytes(8192))),
        IA,
        "8192 came",
    ),
    "29 unaligned": row(
        lambda t: pushed(t, t.header(), t.chunk(t.own, data=bytes(4095))),
        IA,
        "4095 came",
    ),
    "29 second part": row(
        lambda t: pushed(t, t.header(), t.chunk(t.own, part=1)), "UNIMPLEMENTED"
    ),
    "30 no trailer": row(lambda t: pushed(t, t.header()), IA, "without its trailer"),
    "30 nothing": row(lambda t: pushed(t), IA, "empty"),
    "30 no header": row(lambda t: pushed(t, t.trailer()), IA, "header"),
    "32 another digest": row(
        lambda t: pushed(t, t.header(), t.chunk(t.own, digest=12345)), "DATA_LOSS"
    ),
    "34 norm not finite": row(
        lambda t: pushed(t, t.header(), t.trailer(gradient_norm=math.nan)), IA, "norm"
    ),
    "34 norm above the most": row(
        lambda t: pushed(t, t.header(), t.trailer(gradient_norm=1e19)),
        IA,
        "norm 1e\\+19",
    ),
    **{
        f"37 lr {value}": row(
            partial(_with_rate, value),
            f"{IA} HYPERPARAMETER_INVALID",
            "lr",
        )
        for value in (math.nan, -1.0, math.inf)
    },
    "37 weight not finite": row(
        lambda t: pushed(t, t.header(), t.trailer(weight=math.inf)), IA, "weight inf"
    ),
    "38 staleness bound": row(
        lambda t: called(
            t,
            "SetMode",
            of(t, control.SetModeRequest, mode=2, staleness_bound=-1, timeout_ms=100),
        ),
        IA,
        "staleness bound of -1",
    ),
    **{
        f"38 mode quorum, {words}": row(partial(_with_quorum, *terms), IA, words)
        for words, terms in {
            "quorum of 0": (0, 0),
            f"quorum of {1 << 62}": (1 << 62, 0),
            "grace window of -1 ms": (1, -1),
            f"grace window of {1 << 62} ms": (1, 1 << 62),
        }.items()
    },
    "38 slack below none": row(
        lambda t: pushed(t, t.header(), t.trailer(slack_ms=-1)), IA, "slack of -1 ms"
    ),
    "38 unknown mode": row(
        lambda t: called(t, "SetMode", of(t, control.SetModeRequest, mode=77)), IA
    ),
    "40 version in the future": row(
        lambda t: snapshot(t, newer_than=1 << 62, timeout_ms=100),
        "DEADLINE_EXCEEDED WAIT",
    ),
    "40 clock in the future": row(
        lambda t: called(
            t, "Pull", of(t, messages.PullRequest, clock=1 << 61), timeout=0.3
        ),
        "DEADLINE_EXCEEDED$",
    ),
    "40 generation in the future": row(
        lambda t: called(
            t, "Pull", of(t, messages.PullRequest, generation=1 << 61), timeout=0.3
        ),
        "DEADLINE_EXCEEDED$|UNAVAILABLE",
    ),
    "42 connects": row(connects, CLOSED),
    "42 handshake that drips": row(
        lambda t: raw(t, lambda c: c.raw(frame(SETTINGS, 0, 0)[:5])), CLOSED
    ),
    "42 garbage": row(lambda t: raw(t, lambda c: c.raw(b"\xff" * 4096)), CLOSED),
    "43 ping flood": row(
        lambda t: raw(t, lambda c: c.raw(frame(PING, 0, 0, bytes(8)) * 2_000)), CLOSED
    ),
    "43 settings flood": row(
        lambda t: raw(t, lambda c: c.raw(frame(SETTINGS, 0, 0) * 2_000)), CLOSED
    ),
    "43 empty frames": row(
        lambda t: raw(t, empty_frames),
        CLOSED,
    ),
    "44 live name": row(
        lambda t: called(
            t,
            "RegisterWorker",
            control.RegisterWorkerRequest(
                protocol_version=PROTOCOL_VERSION, process_id="thief", worker_id="w0"
            ),
        ),
        "ALREADY_EXISTS WORKER_ID_TAKEN",
        "w0",
    ),
    "44 registrations": row(many_registrations, f"{RE} BUSY", "registrations"),
    "48 open and cancel": row(opened_and_cancelled, f"{IA} MALFORMED"),
    "48 rapid reset": row(lambda t: raw(t, rapid_reset), CLOSED),
    "48 calls of a machine": row(many_calls, RE, "machine-calls"),
    "49 reflection, no message": row(
        lambda t: reflected(t, b"\xff"), f"{IA} MALFORMED", "parsed"
    ),
    "49 reflection, a long name": row(
        lambda t: reflected(t, b"\x22\x80\x20" + b"x" * 4_096), RE, "4099 bytes"
    ),
    "49 reflection that says nothing more": row(
        lambda t: reflected(t, b"\x3a\x00"), "DEADLINE_EXCEEDED WAIT", "no question"
    ),
    "a call that sends nothing": row(
        lambda t: silent(t, "GetSession"),
        "DEADLINE_EXCEEDED WAIT",
        "GetSession was silent",
    ),
    "a stream that sends nothing": row(
        lambda t: silent(t, "PushPullOnce"),
        "DEADLINE_EXCEEDED WAIT",
        "silent for 3 s",
    ),
    "a push that stops": row(
        lambda t: silent(t, "Seed"), "DEADLINE_EXCEEDED WAIT", "silent"
    ),
    "a join that is never whole": row(
        lambda t: silent(t, "Join", of(t, control.JoinRequest).SerializeToString()),
        "DEADLINE_EXCEEDED WAIT",
    ),
    **{
        f"50 checkpoint {name[:24]!r}": row(
            partial(restored, name), "UNAVAILABLE|NOT_FOUND|INVALID"
        )
        for name in (
            *("../../x", "/etc/passwd", "a/../b", "CON", "x" * 300, "%2e%2e%2fx"),
            *("step-1\0", "step\u2044x"),
        )
    },
    "51 checkpoint without a manifest": row(
        partial(restored, "step-000000000001"), "UNAVAILABLE|NOT_FOUND", "step-0*1"
    ),
    "51 state of no checkpoint": row(
        lambda t: called(
            t, "LoadState", of(t, control.LoadStateRequest, checkpoint="../../x")
        ),
        "UNAVAILABLE CHECKPOINT_FAILED",
    ),
    "HTTP, no HTTP": row(lambda t: asked(t, b"\x16\x03\x01\x00\r\n\r\n"), "400"),
    "HTTP, slow headers": row(asks_slowly, CLOSED, is_slow=True),
    "HTTP, endless headers": row(
        lambda t: asked(t, b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000),
        f"400|{CLOSED}",
    ),
    # Who still sends when the connection ends may not see the answer.
    "HTTP, endless body": row(
        lambda t: asked(
            t,
            request_of("/status", "Content-Length: 10000000000", method="POST"),
            *([b"x" * 4096] * 20),
        ),
        f"413|{CLOSED}",
    ),
    "HTTP, body in chunks": row(
        lambda t: asked(
            t,
            request_of("/status", "Transfer-Encoding: chunked", method="POST"),
            *([b"1000\r\n" + b"x" * 4096 + b"\r\n"] * 20),
        ),
        f"411|{CLOSED}",
    ),
    "HTTP, many connections": row(asks_for_many, "200", "ok"),
    "HTTP, another host": row(
        lambda t: asked(t, request_of("/status", "Host: a.example")),
        "421|401",
        "a.example|token",
    ),
    "HTTP, a host that steers": row(
        lambda t: asked(t, request_of("/status", "Host: a\x1b[2J.example")),
        "400|421|401",
    ),
    "HTTP, out of the folder": row(
        lambda t: asked(t, request_of("/../../../../etc/passwd")),
        "404|401",
    ),
    "HTTP, out of the folder, encoded": row(
        lambda t: asked(t, request_of("/%2e%2e/%2e%2e/%2e%2e/etc/passwd")),
        "404|401",
    ),
    "HTTP, an unknown method": row(
        lambda t: asked(t, request_of("/healthz", method="BREW")),
        "401|403|404|405",
    ),
    "HTTP, a number that is none": row(
        lambda t: asked(t, request_of("/events?after=" + "9" * 5_000)),
        "400|401",
        "after|token",
    ),
    "HTTP, answers that nobody reads": row(reads_nothing, "200", "ok"),
}
