"""Somebody who reaches a job's ports and sends what no worker sends, drawn by a seed.

Run as `python -m tests.soak.stranger COORDINATOR SEED SECONDS PAUSE_MS PID...`, with
the process ids of the shards, by which it finds their Unix sockets. Prints `seed N`,
and at the end how each attack ended how often, in JSON.
"""

import json
import random
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import grpc

from pswire.error_details import refusal_from_rpc_error
from pswire.frames import REQUEST_HEADER_FIELD, SEED_CHUNK_FIELD, join_fields
from pswire.limits import MESSAGE_BYTES_MAX, PROTOCOL_VERSION
from pswire.v1 import coordinator_service_pb2 as control
from pswire.v1 import membership_pb2, push_pb2, schema_pb2
from pswire.v1 import parameter_service_pb2 as messages
from tests.doubles.garbled_messages import CHANGE_KINDS, Change, mutated

CALL_TIMEOUT_S: Final = 2.0
SOCKET_TIMEOUT_S: Final = 0.5
HELD_MAX: Final = 6
"""Calls or connections of one attack that are open at a time."""

UNREAD_S: Final = 2.0
"""How long an answer is not read."""

BUGS: Final = frozenset({"INTERNAL", "UNKNOWN"})
"""How no call may end, whatever it sends."""

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"
CLOSED: Final = "closed by the server"

Counts = dict[str, dict[str, int]]


@dataclass(slots=True)
class Held:
    """What is left open.

    Attributes:
        since_s: Since when.
        outcome: How it has ended, None while it is open.
        close: Ends it.
    """

    since_s: float
    outcome: Callable[[], str | None]
    close: Callable[[], None]


class Stranger:
    """Knows of the job what anybody is told.

    Args:
        address: Of the coordinator.
        seed: Of what is drawn.
        shard_pids: Process ids of the shards.
    """

    def __init__(self, address: str, seed: int, shard_pids: list[int]) -> None:
        self.drawn = random.Random(seed)
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._pids = shard_pids
        self._held: defaultdict[str, deque[Held]] = defaultdict(deque)
        self._coordinator = address
        self._channels: dict[str, grpc.Channel] = {}
        self.status = control.GetStatusResponse.FromString(
            self.answers(
                address,
                "CoordinatorService/GetStatus",
                control.GetStatusRequest(
                    protocol_version=PROTOCOL_VERSION
                ).SerializeToString(),
            )[0]
        )
        (self.snapshot,) = self.answers(
            address,
            "CoordinatorService/RequestSnapshot",
            control.RequestSnapshotRequest(
                protocol_version=PROTOCOL_VERSION, newer_than=-1, timeout_ms=20_000
            ).SerializeToString(),
            timeout_s=30.0,
        )[-1:]

    # Whom it calls, and as whom

    @property
    def coordinator(self) -> str:
        return self._coordinator

    @property
    def shard(self) -> str:
        """One of them."""
        return str(self.drawn.choice(self.status.shards).shard.address)

    @property
    def anybody(self) -> str:
        """A coordinator or a shard."""
        return self.drawn.choice([self.coordinator, self.shard])

    @property
    def member(self) -> membership_pb2.WorkerIdentity:
        """One of the workers."""
        return self.drawn.choice(self.status.workers).worker

    def of(self, kind: Any, **fields: Any) -> bytes:  # noqa: ANN401, of a message
        """A message as a stranger sends it who knows all that is public."""
        values = {
            "protocol_version": PROTOCOL_VERSION,
            "job_id": self.status.settings.job_id,
            "worker": membership_pb2.WorkerIdentity(worker_id="mallory", incarnation=1),
            "shard_incarnation": 1,
            "incarnation": 99,
            "generation": self.status.generation,
            "process_id": "mallory",
            **fields,
        }
        known = kind.DESCRIPTOR.fields_by_name
        own = {name: value for name, value in values.items() if name in known}
        return cast("bytes", kind(**own).SerializeToString())

    def header(self, **fields: Any) -> bytes:  # noqa: ANN401, of a message
        """The header of a push."""
        values = {"sequence": 1, "sequence_unacknowledged_min": 1, "clock": 1, **fields}
        header = self.of(push_pb2.PushHeader, optimizer="optimizer", **values)
        return join_fields((REQUEST_HEADER_FIELD, header))

    def noise(self, size_max: int) -> bytes:
        return self.drawn.randbytes(self.drawn.randint(1, size_max))

    # Calls

    def channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(
                address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
        return self._channels[address]

    def begin(
        self,
        address: str,
        method: str,
        requests: Iterator[bytes],
        *,
        timeout_s: float | None = CALL_TIMEOUT_S,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:  # noqa: ANN401, a call
        """Begins a call; on the wire each kind is streams of messages."""
        call: Any = self.channel(address).stream_stream(f"/pswire.v1.{method}")
        return call(requests, timeout=timeout_s, metadata=metadata)

    def answers(
        self, address: str, method: str, *requests: bytes, timeout_s: float = 10.0
    ) -> list[bytes]:
        return list(self.begin(address, method, iter(requests), timeout_s=timeout_s))

    def ended(self, address: str, method: str, *requests: bytes, **others: Any) -> str:  # noqa: ANN401
        """Calls a method; how that ends."""
        call = self.begin(address, method, iter(requests), **others)
        try:
            for count, _ in enumerate(call):
                if count == 2:
                    call.cancel()
                    return "answered"
        except grpc.RpcError as error:
            return reason_of(error)
        return "answered"

    def hold(self, attack: str, begin: Callable[[], Held]) -> str:
        """Leaves one more of a kind open, unless there are many."""
        self.look(attack)
        if len(self._held[attack]) < HELD_MAX:
            self._held[attack].append(begin())
        return ""

    def look(self, attack: str, *, is_over: bool = False) -> None:
        """Counts those that have ended."""
        for held in list(self._held[attack]):
            outcome = held.outcome()
            if outcome is not None or is_over:
                held.close()
                self._held[attack].remove(held)
            if outcome is not None:
                self.counts[attack][outcome] += 1

    def attack(self) -> None:
        """Does one thing."""
        name = self.drawn.choice(list(ATTACKS))
        outcome = ATTACKS[name].do(self)
        if outcome:
            self.counts[name][outcome] += 1

    def end(self) -> None:
        """Closes what is open."""
        for name in ATTACKS:
            self.look(name, is_over=True)
        for channel in self._channels.values():
            channel.close()

    # Sockets

    def connected(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), SOCKET_TIMEOUT_S)

    def unix_sockets(self) -> list[str]:
        """Names of the shards' sockets, which any process of the machine can see."""
        found = []
        for pid in self._pids:
            own = {
                link
                for entry in Path(f"/proc/{pid}/fd").iterdir()
                if (link := _target_of(entry)).startswith("socket:")
            }
            for line in Path("/proc/net/unix").read_text().splitlines():
                match = re.search(r" (\d+) @(paramserver-\S+)$", line)
                if match and f"socket:[{match[1]}]" in own:
                    found.append(match[2])
        return sorted(set(found))


def _target_of(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def reason_of(error: Any) -> str:  # noqa: ANN401, of a call
    """Our reason, or gRPC's code."""
    refusal = refusal_from_rpc_error(error)
    return refusal.reason.name if refusal else str(error.code().name)


def methods_of(service: str) -> list[str]:
    descriptors: Any = (control.DESCRIPTOR, messages.DESCRIPTOR)
    (found,) = (
        each.services_by_name[service]
        for each in descriptors
        if service in each.services_by_name
    )
    return [method.name for method in found.methods]


# Attacks


def garbage(s: Stranger) -> str:
    service = s.drawn.choice(["ParameterService", "CoordinatorService"])
    address = s.shard if service == "ParameterService" else s.coordinator
    method = s.drawn.choice(methods_of(service))
    return s.ended(address, f"{service}/{method}", b"\xff" * s.drawn.randint(1, 4096))


def garbled_header(s: Stranger) -> str:
    method = s.drawn.choice(["PushPull", "Push", "PushPullOnce", "Seed"])
    message = join_fields((REQUEST_HEADER_FIELD, b"\xff" * 4)) + join_fields((2, b""))
    return s.ended(s.shard, f"ParameterService/{method}", message)


def mutated_push(s: Stranger) -> str:
    """Of somebody who is no member, so that what survives is refused too."""
    message = s.header() + join_fields((2, s.noise(64)), (3, s.noise(64)))
    method = s.drawn.choice(["PushPull", "Push", "PushPullOnce"])
    return s.ended(s.shard, f"ParameterService/{method}", mutated(message, changes(s)))


def mutated_control(s: Stranger) -> str:
    """Of what is left of a worker's calls when nobody has registered it."""
    kinds: dict[str, Any] = {
        "Join": control.JoinRequest,
        "Leave": control.LeaveRequest,
        "OpenEpoch": control.OpenEpochRequest,
        "LeaseData": control.LeaseDataRequest,
        "RecordSplit": control.RecordSplitRequest,
        "ReportCut": control.ReportCutRequest,
        "ReportCheckpoint": control.ReportCheckpointRequest,
        "ReportFence": control.ReportFenceRequest,
        "ReportProgress": control.ReportProgressRequest,
        "GetStatus": control.GetStatusRequest,
        "ListSplits": control.ListSplitsRequest,
    }
    method = s.drawn.choice(list(kinds))
    message = mutated(s.of(kinds[method]), changes(s))
    return s.ended(s.coordinator, f"CoordinatorService/{method}", message)


def changes(s: Stranger) -> list[Change]:
    return [
        (
            s.drawn.choice(CHANGE_KINDS),
            s.drawn.randint(0, 256),
            s.drawn.randint(0, 5),
            s.noise(16),
        )
        for _ in range(s.drawn.randint(1, 4))
    ]


def forged_member(s: Stranger) -> str:
    """In the name of a worker, but not as it is now; and what no member sends."""
    worker, job = s.member, "another job"
    stale = membership_pb2.WorkerIdentity(
        worker_id=worker.worker_id, incarnation=worker.incarnation + 7
    )
    header = s.drawn.choice(
        [
            s.header(worker=stale),
            s.header(worker=worker, job_id=job),
            s.header(worker=worker, protocol_version=99),
            s.header(worker=worker, shard_incarnation=99),
            s.header(worker=worker, sequence=-1, clock=-1),
            s.header(worker=worker, sequence=1 << 61, clock=1 << 61),
            s.header(worker=worker, sequence=0, clock=0),
        ]
    )
    return s.ended(s.shard, "ParameterService/PushPull", header)


def forged_seed(s: Stranger) -> str:
    header = join_fields((REQUEST_HEADER_FIELD, s.of(messages.SeedHeader)))
    chunk = join_fields((SEED_CHUNK_FIELD, s.noise(1 << 16)))
    return s.ended(s.shard, "ParameterService/Seed", header, chunk)


def taken_id(s: Stranger) -> str:
    request = s.of(control.RegisterWorkerRequest, worker_id=s.member.worker_id)
    return s.ended(s.coordinator, "CoordinatorService/RegisterWorker", request)


def other_model(s: Stranger) -> str:
    """Registers as a worker, each time another one, and brings another model."""
    request = s.of(control.RegisterWorkerRequest, process_id=s.noise(8).hex())
    answer = s.answers(s.coordinator, "CoordinatorService/RegisterWorker", request)[0]
    registered = control.RegisterWorkerResponse.FromString(answer)
    entry = schema_pb2.SchemaEntry(
        model="model",
        name="stranger",
        shape=[s.drawn.randint(1, 1000)],
        element_type=schema_pb2.ELEMENT_TYPE_FLOAT32,
        kind=schema_pb2.ENTRY_KIND_PARAMETER,
        trainable=True,
    )
    schema = schema_pb2.ModelSchema(entries=[entry])
    join = s.of(control.JoinRequest, worker=registered.worker, schema=schema)
    return s.ended(s.coordinator, "CoordinatorService/Join", join)


def wrong_mode(s: Stranger) -> str:
    request = s.of(control.SetModeRequest, mode=77, timeout_ms=1)
    return s.ended(s.coordinator, "CoordinatorService/SetMode", request)


def many_fields(s: Stranger) -> str:
    fields = b"\xf2\x3f\x00" * 700_000
    if s.drawn.random() < 0.5:
        return s.ended(s.shard, "ParameterService/GetSession", fields)
    return s.ended(s.coordinator, "CoordinatorService/GetStatus", fields)


def large_message(s: Stranger) -> str:
    return s.ended(s.shard, "ParameterService/Push", bytes(MESSAGE_BYTES_MAX + 1))


def large_metadata(s: Stranger) -> str:
    metadata = (("x-noise", "y" * (64 << 10)),)
    return s.ended(
        s.coordinator, "CoordinatorService/GetStatus", b"", metadata=metadata
    )


def unknown_method(s: Stranger) -> str:
    return s.ended(s.anybody, f"ParameterService/{s.noise(8).hex()}", b"")


def cancelled_call(s: Stranger) -> str:
    """Begins, is there, and hangs up."""
    request = s.of(control.WatchWorkerRequest, worker=s.member, job_id="another job")
    call = s.begin(s.coordinator, "CoordinatorService/WatchWorker", iter([request]))
    time.sleep(s.drawn.uniform(0, 0.01))  # to be at any moment of it
    call.cancel()
    try:
        list(call)
    except grpc.RpcError as error:
        return reason_of(error)
    except grpc.FutureCancelledError:
        return "CANCELLED"
    return "answered"


def silent_call(s: Stranger) -> str:
    """A push that never comes."""

    def begin() -> Held:
        requests = Silence()
        call = s.begin(s.shard, "ParameterService/PushPull", requests, timeout_s=None)

        def outcome() -> str | None:
            if call.is_active():
                return None
            try:
                list(call)
            except grpc.RpcError as error:
                return reason_of(error)
            return "answered"

        def close() -> None:
            requests.end()
            call.cancel()

        return Held(time.monotonic(), outcome, close)

    return s.hold("silent call", begin)


class Silence:
    """Messages that do not come, until it is ended."""

    def __init__(self) -> None:
        self._is_over = threading.Event()

    def end(self) -> None:
        self._is_over.set()

    def __iter__(self) -> "Silence":
        return self

    def __next__(self) -> bytes:
        self._is_over.wait()
        raise StopIteration


def unread_snapshot(s: Stranger) -> str:
    """Asks for values, reads one message, and no more for a while."""
    found = control.RequestSnapshotResponse.FromString(s.snapshot)

    def begin() -> Held:
        shard = s.drawn.choice(found.shards)
        request = s.of(
            messages.PullSnapshotRequest,
            snapshot_id=found.snapshot_id,
            shard_incarnation=shard.incarnation,
        )
        # On a connection of its own, so that it holds up nothing else.
        channel = grpc.insecure_channel(
            shard.address,
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ],
        )
        method: Any = channel.stream_stream("/pswire.v1.ParameterService/PullSnapshot")
        call = method(iter([request]), timeout=60.0)
        since_s = time.monotonic()

        def outcome() -> str | None:
            if time.monotonic() - since_s < UNREAD_S:
                return None
            try:
                next(call)
            except grpc.RpcError as error:
                return reason_of(error)
            return "a part of it"

        return Held(since_s, outcome, channel.close)

    return s.hold("unread snapshot", begin)


def random_bytes(s: Stranger) -> str:
    with s.connected(s.anybody) as connection:
        connection.sendall(s.noise(4096))
        return _read_to_end(connection)


def http2_garbage(s: Stranger) -> str:
    with s.connected(s.anybody) as connection:
        connection.sendall(PREFACE + SETTINGS + s.noise(512))
        connection.shutdown(socket.SHUT_WR)
        return _read_to_end(connection)


def ping_flood(s: Stranger) -> str:
    """As many pings as a connection takes."""
    ping = b"\0\0\x08\6\0\0\0\0\0" + bytes(8)
    with s.connected(s.anybody) as connection:
        try:
            connection.sendall(PREFACE + SETTINGS + ping * 1000)
        except ConnectionError:
            return CLOSED
        return _read_to_end(connection)


def half_closed(s: Stranger) -> str:
    """Says that it sends no more, and goes on listening."""
    with s.connected(s.anybody) as connection:
        connection.sendall(PREFACE + SETTINGS)
        connection.shutdown(socket.SHUT_WR)
        return _read_to_end(connection)


def reset_connection(s: Stranger) -> str:
    """Within a frame, after the server has spoken."""
    with s.connected(s.anybody) as connection:
        connection.sendall(PREFACE + SETTINGS + b"\0\0\x40\x04")
        has_answer = bool(connection.recv(9))
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    return "reset" if has_answer else CLOSED


def idle_connection(s: Stranger) -> str:
    """A socket that is opened and left."""

    def begin() -> Held:
        connection = s.connected(s.anybody)
        connection.setblocking(False)

        def outcome() -> str | None:
            try:
                while connection.recv(4096):
                    pass
            except BlockingIOError:
                return None
            except ConnectionResetError:
                pass
            return CLOSED

        return Held(time.monotonic(), outcome, connection.close)

    return s.hold("idle connection", begin)


def _read_to_end(connection: socket.socket) -> str:
    """Reads until the server has closed it, or says nothing more."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return "left open"
    return CLOSED


def _unix(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(SOCKET_TIMEOUT_S)
    connection.connect(b"\0" + name.encode())
    return connection


def unix_packet(s: Stranger) -> str:
    """Bytes that are no offer of shared memory, with a descriptor or without."""
    with _unix(s.drawn.choice(s.unix_sockets())) as connection:
        packet = s.drawn.choice([s.noise(1024), s.drawn.randbytes(32)])
        if s.drawn.random() < 0.5:
            with Path("/dev/null").open("rb") as file:
                socket.send_fds(connection, [packet], [file.fileno()])
        else:
            connection.send(packet)
        answer = connection.recv(2048)
    return "refused" if answer[:1] == b"\0" else CLOSED


def idle_unix(s: Stranger) -> str:
    """A Unix socket that is opened and left."""

    def begin() -> Held:
        connection = _unix(s.drawn.choice(s.unix_sockets()))
        connection.setblocking(False)

        def outcome() -> str | None:
            try:
                connection.recv(2048)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                pass
            return CLOSED

        return Held(time.monotonic(), outcome, connection.close)

    return s.hold("idle Unix socket", begin)


@dataclass(frozen=True, slots=True)
class Attack:
    """One way.

    Attributes:
        do: Does it once; how that ended, or nothing while it goes on.
        reached: Outcomes that only a server can have given.
    """

    do: Callable[[Stranger], str]
    reached: frozenset[str]


def _attack(do: Callable[[Stranger], str], *reached: str) -> Attack:
    return Attack(do, frozenset(reached))


ATTACKS: Final[dict[str, Attack]] = {
    "garbage": _attack(garbage, "MALFORMED_MESSAGE"),
    "garbled header": _attack(garbled_header, "MALFORMED_MESSAGE"),
    "mutated push": _attack(mutated_push, "MALFORMED_MESSAGE"),
    "mutated control": _attack(mutated_control, "MALFORMED_MESSAGE"),
    "forged member": _attack(
        forged_member, "WORKER_INCARNATION_STALE", "JOB_UNKNOWN", "PROTOCOL_VERSION"
    ),
    "forged seed": _attack(forged_seed, "WORKER_INCARNATION_STALE"),
    "taken id": _attack(taken_id, "WORKER_ID_TAKEN"),
    "other model": _attack(other_model, "SCHEMA_MISMATCH"),
    "wrong mode": _attack(wrong_mode, "MALFORMED_MESSAGE"),
    "many fields": _attack(many_fields, "LIMIT_EXCEEDED"),
    "large message": _attack(large_message, "RESOURCE_EXHAUSTED"),
    "large metadata": _attack(large_metadata, "RESOURCE_EXHAUSTED"),
    "unknown method": _attack(unknown_method, "UNIMPLEMENTED"),
    "cancelled call": _attack(cancelled_call, "CANCELLED", "JOB_UNKNOWN"),
    "silent call": _attack(silent_call, "WAIT_TIMEOUT"),
    "unread snapshot": _attack(unread_snapshot, "a part of it"),
    "random bytes": _attack(random_bytes, CLOSED),
    "HTTP/2 garbage": _attack(http2_garbage, CLOSED),
    "ping flood": _attack(ping_flood, CLOSED),
    "half-closed": _attack(half_closed, CLOSED),
    "reset": _attack(reset_connection, "reset"),
    "idle connection": _attack(idle_connection, CLOSED),
    "Unix packet": _attack(unix_packet, "refused"),
    "idle Unix socket": _attack(idle_unix, CLOSED),
}


def main(address: str, seed: int, seconds: float, pause_s: float, *pids: int) -> None:
    print(f"seed {seed}", flush=True)
    stranger = Stranger(address, seed, list(pids))
    print("begins", flush=True)
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        stranger.attack()
        time.sleep(pause_s)  # its pace: the job has the same two cores
    stranger.end()
    print(json.dumps(stranger.counts), flush=True)


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        float(sys.argv[3]),
        float(sys.argv[4]) / 1000,
        *map(int, sys.argv[5:]),
    )
