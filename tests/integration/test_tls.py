"""TLS over real sockets: who is taken, what a refusal says, and new certificates."""

import asyncio
import shutil
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import pytest

import psworker
from psserver.config import ListenConfig
from psserver.edge.lifecycle import bind
from psserver.edge.limits import DEFAULT_LIMITS
from psserver.edge.memory_grant import MemoryGrant
from psserver.edge.open_calls import OpenCalls
from psserver.edge.server import ServerKind, make_server
from psserver.shard.rpc.coordinator_client import CoordinatorClient
from psserver.shard.rpc.coordinator_outage import Outage
from pswire.addresses import Address, parse_address
from pswire.channels import (
    ChannelKind,
    aio_channel,
    blocking_channel,
    channel_credentials,
)
from pswire.exit_codes import ExitCode
from pswire.membership import WorkerKey
from pswire.security import certificates as certificates_module
from pswire.security.certificates import certificates_of, read_pem
from pswire.security.credentials import Credentials, TlsFiles
from pswire.security.tls_problem import cause_of, handshake_problem
from psworker.launch import reachability
from psworker.member.membership import Membership
from psworker.member.shard_reach import ShardClients, ShardReach, report_nothing
from psworker.transport.ports import Traffic
from psworker.transport.values import ShardAddress, WorkerView
from tests.doubles.children import Nursery
from tests.doubles.made_certificates import SERVER, MadeCertificates
from tests.integration.job import Job
from tests.integration.processes import Processes

UNARY: Final = "/test.Echo/Unary"
STREAM: Final = "/test.Echo/Stream"
PROBE_TIMEOUT_S: Final = 20.0

Context = grpc.aio.ServicerContext[bytes, bytes]
UnaryCall = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
StreamCall = grpc.aio.StreamStreamMultiCallable[bytes, bytes]


@dataclass(frozen=True)
class Made:
    """Certificates of a job, of another one, and some that have ended."""

    job: MadeCertificates
    other: MadeCertificates


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("certificates")
    found = Made(MadeCertificates(folder / "job"), MadeCertificates(folder / "other"))
    for name, start in (("ended-server", SERVER), ("ended-worker", "worker-w0")):
        (found.job.folder / start).rename(found.job.folder / name)
        found.job.expire(name)
    MadeCertificates(found.job.folder)  # makes those again that are missing
    return found


@pytest.fixture
def own(made: Made, tmp_path: Path) -> MadeCertificates:
    """The job's, for a test that changes them."""
    shutil.copytree(made.job.folder, tmp_path / "own")
    return MadeCertificates(tmp_path / "own")


@pytest.fixture(autouse=True)
def looks_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates_module, "LOOK_INTERVAL_S", 0.0)


def use(monkeypatch: pytest.MonkeyPatch, credentials: Credentials) -> None:
    """Gives this process credentials."""
    files = credentials.tls or TlsFiles()
    for name, path in (
        ("PS_TLS_CA", files.ca),
        ("PS_TLS_CERT", files.certificate),
        ("PS_TLS_KEY", files.key),
    ):
        monkeypatch.setenv(name, str(path or ""))


async def echo(request: bytes, context: Context) -> bytes:
    return request


async def echo_all(
    requests: AsyncIterator[bytes], context: Context
) -> AsyncIterator[bytes]:
    async for each in requests:
        yield each


@asynccontextmanager
async def serving(
    credentials: Credentials, host: str = "127.0.0.1"
) -> AsyncIterator[Address]:
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Unary": grpc.unary_unary_rpc_method_handler(echo),
        "Stream": grpc.stream_stream_rpc_method_handler(echo_all),
    }
    server = make_server(
        ServerKind.SHARD,
        [grpc.method_handlers_generic_handler("test.Echo", methods)],
        OpenCalls(DEFAULT_LIMITS),
    )
    address = bind(
        server, ListenConfig(address=Address(host, 0), credentials=credentials)
    )
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def called(target: str) -> bytes:
    async with aio_channel(target, ChannelKind.DATA) as channel:
        call: UnaryCall = channel.unary_unary(UNARY)
        return await call(b"x", timeout=PROBE_TIMEOUT_S)


def credentials_of(made: Made, name: str) -> Credentials:
    """By the name of a folder, `other/` before it for one of the other authority."""
    if name == "none":
        return Credentials()
    if name == "authority":
        return Credentials(tls=TlsFiles(ca=made.job.files("reader").ca))
    if name.startswith("swapped/"):
        theirs = made.other.files(name.removeprefix("swapped/"))
        return Credentials(
            tls=TlsFiles(
                ca=made.job.files("reader").ca,
                certificate=theirs.certificate,
                key=theirs.key,
            )
        )
    if name.startswith("other/"):
        return made.other.credentials(name.removeprefix("other/"))
    return made.job.credentials(name)


@pytest.mark.parametrize(
    ("server", "client", "host", "words"),
    [
        (SERVER, "other/reader", "127.0.0.1", "is not of the authority in --tls-ca"),
        ("ended-server", "reader", "127.0.0.1", "certificate of the server there has"),
        (SERVER, "reader", "127.0.0.2", "and not for 127.0.0.2: call it by one of its"),
        (SERVER, "none", "127.0.0.1", "speaks TLS, and this process does not: give"),
        ("none", "reader", "127.0.0.1", "does not speak TLS, and this process does"),
        (SERVER, "authority", "127.0.0.1", "show a certificate, and this one has none"),
        (SERVER, "swapped/reader", "127.0.0.1", "does not take the certificate in"),
        (SERVER, "ended-worker", "127.0.0.1", "has ended on 20"),
        ("worker-w0", "reader", "127.0.0.1", "the server there is a client's"),
    ],
)
async def test_who_does_not_belong_is_refused_and_told_why(
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    server: str,
    client: str,
    host: str,
    words: str,
) -> None:
    credentials = credentials_of(made, client)
    use(monkeypatch, credentials)
    async with serving(credentials_of(made, server), host) as address:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await called(str(address))
        problem = await asyncio.to_thread(
            handshake_problem, address, certificates_of(credentials), PROBE_TIMEOUT_S
        )
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert words in problem
    # What a server thinks of a client's certificate it does not tell.
    is_told = cause_of(str(caught.value.details()))
    assert bool(is_told) == (server != SERVER or client in ("other/reader", "reader"))


@pytest.mark.parametrize(
    ("client", "words"),
    [
        ("other/reader", "is not of the authority in --tls-ca"),
        (f"swapped/{SERVER}", "does not take the certificate in"),
        ("none", "speaks TLS, and this process does not: give"),
    ],
)
async def test_a_shard_logs_why_its_coordinator_refuses_it(
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    client: str,
    words: str,
) -> None:
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def note(_: Outage, why: str) -> None:
        if not said.done():
            said.set_result(why)

    monkeypatch.setattr(Outage, "note", note)
    use(monkeypatch, credentials_of(made, client))
    async with serving(made.job.credentials(SERVER)) as address:
        channel = aio_channel(str(address), ChannelKind.CONTROL)
        shard = CoordinatorClient(channel, str(address))
        waiting = asyncio.create_task(
            shard.register(
                process_id="p", address="127.0.0.1:1", memory=MemoryGrant(0, "")
            )
        )
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            text = await said
        waiting.cancel()
        await asyncio.wait([waiting])
        await channel.close()
    assert words in text


@pytest.mark.parametrize(
    ("client", "words"),
    [
        ("other/worker-w0", "is not of the authority in --tls-ca"),
        ("swapped/worker-w0", "does not take the certificate in"),
    ],
)
async def test_a_worker_says_why_a_shard_refuses_it(
    made: Made, monkeypatch: pytest.MonkeyPatch, client: str, words: str
) -> None:
    use(monkeypatch, credentials_of(made, client))
    membership = Membership(WorkerKey("w0", 1))
    async with serving(made.job.credentials(SERVER)) as address:
        membership.take(WorkerView(None, (ShardAddress(0, str(address), 1),)))
        clients = ShardClients("job", membership, Traffic())
        reach = ShardReach(clients, report_nothing, lease_s=10.0)
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            while words not in (waits_for := await reach.unreached(0.0)):
                assert str(address) in waits_for
        await reach.close()
        await clients.close()


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]", "[0:0:0:0:0:0:0:1]"]
)
async def test_every_way_to_write_a_name_of_the_certificate_is_taken(
    made: Made, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    credentials = made.job.credentials("worker-w0")
    use(monkeypatch, credentials)
    listen = "::1" if host.startswith("[") else "127.0.0.1"
    async with serving(made.job.credentials(SERVER), listen) as address:
        target = f"{host}:{address.port}"
        assert await called(target) == b"x"
        assert await asyncio.to_thread(_called_blocking, target) == b"x"
        problem = await asyncio.to_thread(
            handshake_problem,
            parse_address(target),
            certificates_of(credentials),
            PROBE_TIMEOUT_S,
        )
        assert problem == ""


def _called_blocking(target: str) -> bytes:
    with blocking_channel(target, ChannelKind.DATA) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(UNARY)
        return call(b"x", timeout=PROBE_TIMEOUT_S)


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        ("ps-shard-0.ps.team.svc.cluster.local", True),
        ("ps-coordinator.ps.team.svc", True),
        ("a.b.ps.team.svc.cluster.local", False),
        ("ps-shard-0.ps.other.svc.cluster.local", False),
    ],
)
async def test_names_of_services_in_kubernetes_are_taken(
    tmp_path: Path, name: str, is_taken: bool
) -> None:
    made = MadeCertificates(
        tmp_path / "c",
        hosts="*.ps.team.svc.cluster.local,ps-coordinator.ps.team.svc",
    )
    (folder,) = made.folder.glob("server-*")
    async with serving(made.credentials(folder.name)) as address:
        channel = grpc.aio.secure_channel(
            str(address),
            channel_credentials(read_pem(made.files("reader"))),
            # As if the address were this name's.
            options=[("grpc.ssl_target_name_override", name)],
        )
        async with channel:
            call: UnaryCall = channel.unary_unary(UNARY)
            refused = pytest.raises(grpc.aio.AioRpcError, match="Verification")
            with nullcontext() if is_taken else refused:
                assert await call(b"x", timeout=PROBE_TIMEOUT_S) == b"x"


async def test_new_certificates_are_in_force_for_new_calls_and_end_no_open_one(
    made: Made, own: MadeCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even of another authority, of which each side gets to know by its files alone."""
    use(monkeypatch, own.credentials("worker-w0"))
    former = made.job.credentials("worker-w0")
    async with (
        serving(own.credentials(SERVER)) as address,
        aio_channel(str(address), ChannelKind.DATA) as channel,
    ):
        unary: UnaryCall = channel.unary_unary(UNARY)
        stream: StreamCall = channel.stream_stream(STREAM)
        assert await unary(b"before", timeout=PROBE_TIMEOUT_S) == b"before"
        open_call = stream(timeout=60)
        await open_call.write(b"1")
        assert await open_call.read() == b"1"

        own.take_over(made.other)

        assert await unary(b"after", timeout=PROBE_TIMEOUT_S) == b"after"
        await open_call.write(b"2")
        assert await open_call.read() == b"2"
        await open_call.done_writing()
        assert await open_call.code() is grpc.StatusCode.OK
        problem = await asyncio.to_thread(
            handshake_problem, address, certificates_of(former), PROBE_TIMEOUT_S
        )
        assert "is not of the authority in --tls-ca" in problem


async def test_a_channel_keeps_no_connection_of_before_that_nobody_uses(
    made: Made, own: MadeCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, own.credentials("worker-w0"))
    opened: list[grpc.aio.Channel] = []
    secure_channel = grpc.aio.secure_channel

    def noted(*arguments: object, **named: object) -> grpc.aio.Channel:
        opened.append(secure_channel(*arguments, **named))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(grpc.aio, "secure_channel", noted)
    async with serving(own.credentials(SERVER)) as address:
        channel = aio_channel(str(address), ChannelKind.DATA)
        unary: UnaryCall = channel.unary_unary(UNARY)
        stream: StreamCall = channel.stream_stream(STREAM)
        open_call = stream(timeout=60)
        for number in range(3):
            own.take_over(made.other if number % 2 else made.job)
            assert await unary(b"x", timeout=PROBE_TIMEOUT_S) == b"x"
        assert len(opened) == 4
        first, *_, last = opened
        counts = channel._open_counts  # type: ignore[attr-defined]
        assert set(counts) == {first, last}
        open_call.cancel()
        assert await open_call.code() is grpc.StatusCode.CANCELLED
        await channel.close()
        assert set(counts) == {last}
        with pytest.raises(grpc.aio.UsageError):
            await unary(b"x")


async def test_a_damaged_certificate_disturbs_nobody(
    own: MadeCertificates,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use(monkeypatch, own.credentials("worker-w0"))
    async with serving(own.credentials(SERVER)) as address:
        assert await called(str(address)) == b"x"
        for name in (SERVER, "worker-w0"):
            own.replace(name, {"cert.pem": b"damaged"})
        assert await called(str(address)) == b"x"
    assert sum("can't be used" in each for each in caplog.messages) == 2


async def test_a_stranger_who_never_shakes_hands_holds_up_nobody(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, made.job.credentials("worker-w0"))
    async with serving(made.job.credentials(SERVER)) as address:
        held = [
            socket.create_connection((address.host, address.port)) for _ in range(20)
        ]
        try:
            held[0].sendall(b"\x16\x03\x01")  # the first bytes of a handshake
            assert await called(str(address)) == b"x"
        finally:
            for each in held:
                each.close()


def test_an_error_of_connect_names_address_cause_and_cure(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, made.job.credentials(SERVER))
    with Job(tmp_path, sockets=True, credentials=made.job.credentials(SERVER)) as job:
        use(monkeypatch, made.other.credentials("worker-w0"))
        # The wait runs out; why is found out after it, in the time that it takes.
        monkeypatch.setattr(reachability, "_AGAIN_TIMEOUT_S", PROBE_TIMEOUT_S)
        with pytest.raises(psworker.ConnectError) as caught:
            psworker.connect(job.address, connect_timeout_s=1.0)
        text = str(caught.value)
        assert text.startswith(f"cannot reach the coordinator at {job.address} within")
        assert "is not of the authority in --tls-ca" in text
        with (
            psworker.SnapshotReader(job.address) as reader,
            pytest.raises(psworker.ConnectError, match="not of the authority"),
        ):
            reader.latest(timeout=1.0)
        # The job's own processes, which the variables name, go on.
        use(monkeypatch, made.job.credentials(SERVER))


def test_files_that_cannot_be_used_are_refused_before_anything_is_called(
    own: MadeCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = own.files("worker-w0")
    assert files.key is not None
    files.key.chmod(0o640)
    use(monkeypatch, own.credentials("worker-w0"))
    for attempt in (psworker.connect, psworker.SnapshotReader):
        with pytest.raises(psworker.ConfigurationError, match="run `chmod 600"):
            attempt("127.0.0.1:1")
    use(monkeypatch, Credentials(tls=TlsFiles(certificate=files.ca, key=files.key)))
    files.key.chmod(0o600)
    with pytest.raises(psworker.ConfigurationError, match="is not the key of"):
        psworker.connect("127.0.0.1:1")


WORKER: Final = """
import hashlib, pathlib, sys, torch, psworker
go = pathlib.Path(sys.argv[1])
torch.manual_seed(1)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with psworker.connect(
    connect_timeout_s=60, step_timeout_s=60, start_timeout_s=60
) as ps:
    model, optimizer = ps.prepare(model, optimizer)
    for step in range(20):
        if step == 10:
            print("half", flush=True)
            while not go.exists():
                pass
        optimizer.zero_grad()
        inputs = torch.ones(4, 3) * step / 20
        model(inputs).square().sum().backward()
        optimizer.step()
    assert ps.last_push.version == 20, ps.last_push
    values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(hashlib.sha256(values).hexdigest(), flush=True)
"""


def test_a_job_lives_through_a_change_of_its_authority_and_loses_no_step(
    made: Made, own: MadeCertificates, tmp_path: Path, nursery: Nursery
) -> None:
    """Processes that have files alone: daemons, a worker, and a reader."""
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(WORKER)
    server = [
        *(f"--tls-ca={own.files(SERVER).ca}", f"--tls-key={own.files(SERVER).key}"),
        f"--tls-cert={own.files(SERVER).certificate}",
    ]
    reader = own.environment("reader")
    with Processes(tmp_path, nursery) as processes:

        def start_coordinator(port: int) -> str:
            processes.start_daemon(
                *("coordinator", "coordinator", f"--listen=127.0.0.1:{port}"),
                *("--shards=2", *server),
            )
            return processes.address("coordinator")

        address = start_coordinator(0)
        for index in range(2):
            processes.start_daemon(
                f"shard-{index}", "shard", f"--coordinator={address}", *server
            )
            processes.address(f"shard-{index}")
        processes.start(
            *("w0", str(script), str(go)),
            PS_COORDINATOR=address,
            PS_WORKER_ID="w0",
            **own.environment("worker-w0"),
        )
        assert processes.line("w0") == "half"
        assert negotiated(address, made.job.files("reader")) == "TLSv1.3"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            negotiated(address, made.job.files("reader"), ssl.TLSVersion.TLSv1_2)

        processes.send("coordinator", signal.SIGTERM)
        assert processes.code("coordinator") == ExitCode.DONE
        own.take_over(made.other)
        assert start_coordinator(parse_address(address).port) == address
        go.touch()

        changed = processes.last_line("w0")
        assert processes.code("w0") == ExitCode.DONE
        # Shards that were not started again show the new certificates to new readers.
        out = tmp_path / "model.safetensors"
        for name, environment, code in (
            ("reader", reader, ExitCode.DONE),
            ("former", made.job.environment("reader"), ExitCode.PEER_UNAVAILABLE),
        ):
            processes.start(
                *(name, "-m", "psctl", "snapshot", "get", f"--out={out}"),
                PS_COORDINATOR=address,
                **environment,
            )
            assert processes.code(name) == code, processes.log(name)
        assert "is not of the authority in --tls-ca" in processes.log("former")
        assert "Traceback" not in processes.logs()
    with (
        Job(tmp_path / "undisturbed", sockets=True) as job,
        Processes(tmp_path, nursery) as processes,
    ):
        processes.start(
            *("alone", str(script), str(go)),
            PS_COORDINATOR=job.address,
            PS_WORKER_ID="w0",
        )
        assert processes.last_line("alone") == changed


def negotiated(
    address: str,
    files: TlsFiles,
    newest: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED,
) -> str | None:
    """The version of TLS that a daemon and a client of this version agree on."""
    assert files.certificate is not None
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.maximum_version = newest
    context.set_alpn_protocols(["h2"])
    place = parse_address(address)
    with (
        socket.create_connection((place.host, place.port), PROBE_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=place.host) as secure,
    ):
        return secure.version()
