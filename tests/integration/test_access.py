"""Who may call what: every method of both daemons, by gRPC."""

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import torch
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from torch import nn

import psworker
from psserver.config import ListenConfig, ShardConfig
from psserver.edge.access import OPEN_METHODS, ROLES, Access, check_speaks_for
from psserver.edge.guard import Context, unary
from psserver.edge.lifecycle import bind
from psserver.edge.limits import DEFAULT_LIMITS
from psserver.edge.open_calls import OpenCalls
from psserver.edge.server import ServerKind, make_server
from psserver.shard.daemon import run_shard
from pswire.addresses import Address, parse_address
from pswire.channels import ChannelKind, aio_channel
from pswire.exit_codes import ExitCode
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import WorkerState
from pswire.reasons import ErrorReason, Refusal
from pswire.security.roles import Role
from pswire.security.tokens import Metadata, metadata_of, new_token
from pswire.v1 import (
    coordinator_service_pb2,
    parameter_service_pb2,
    probe_service_pb2,
)
from tests.doubles.children import Nursery
from tests.doubles.job_tokens import JobTokens, write_private
from tests.doubles.made_certificates import SERVER, MadeCertificates
from tests.doubles.memory_network import MemoryServer
from tests.integration.forged_calls import TIMEOUT_S, refusal_of
from tests.integration.job import Daemon, Job, connect
from tests.integration.processes import Processes

SERVICES: Final = (
    coordinator_service_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
    parameter_service_pb2.DESCRIPTOR.services_by_name["ParameterService"],
    probe_service_pb2.DESCRIPTOR.services_by_name["ProbeService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
METHODS: Final = {
    f"/{service.full_name}/{method.name}": method
    for service in SERVICES
    for method in service.methods
}
SCRIPT: Final = """
import torch, psworker
model = torch.nn.ParameterList([torch.zeros(4096)])
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with psworker.connect(step_timeout_s=30, start_timeout_s=40) as ps:
    model, optimizer = ps.prepare(model, optimizer)
    for step in range(3):
        model[0].grad = torch.ones(4096)
        optimizer.step()
    print("value", float(model[0].detach()[0]), flush=True)
"""
DENIED: Final = grpc.StatusCode.PERMISSION_DENIED
UNKNOWN: Final = grpc.StatusCode.UNAUTHENTICATED


class Guarded:
    """A job that asks its callers for tokens, and channels to it."""

    def __init__(self, job: Job, tokens: JobTokens) -> None:
        self.job = job
        self.tokens = tokens
        self._coordinator = grpc.insecure_channel(job.address)
        self._shard = grpc.insecure_channel(job.shard_addresses()[0])

    def close(self) -> None:
        self._coordinator.close()
        self._shard.close()

    def call(
        self, method: str, metadata: Metadata | None, *messages: bytes
    ) -> Iterator[bytes]:
        """A call with raw bytes, whatever the method's kind."""
        is_control = "Coordinator" in method
        channel = self._coordinator if is_control else self._shard
        make: Any = channel.stream_stream(method, None, None)
        call: Iterator[bytes] = make(
            iter(messages or (b"",)), metadata=metadata, timeout=TIMEOUT_S
        )
        return call


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("access")
    tokens = JobTokens(folder)
    with Job(folder, shard_count=1, sockets=True, tokens=tokens) as job:
        made = Guarded(job, tokens)
        yield made
        made.close()


def test_every_method_has_its_roles() -> None:
    """A method that is added needs a line in the table, or nobody may call it."""
    assert {*ROLES, *OPEN_METHODS} == set(METHODS)


def test_the_servers_have_no_other_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other service came in by an import."""
    found: set[str] = set()
    add = MemoryServer.add_generic_rpc_handlers

    def note(server: MemoryServer, handlers: Any) -> None:  # noqa: ANN401
        handlers = list(handlers)
        for each in handlers:
            found.update(getattr(each, "_method_handlers", ()))
        add(server, handlers)

    monkeypatch.setattr(MemoryServer, "add_generic_rpc_handlers", note)
    with Job(tmp_path, shard_count=1) as job:
        service = "/pswire.v1.ParameterService/"
        late = job.shards[0]
        assert late.shard_index == 0
        found.update(m for m in METHODS if m.startswith(service))

    assert found == set(METHODS)


@pytest.mark.parametrize("role", Role)
def test_a_role_may_call_what_the_table_says_and_nothing_else(
    guarded: Guarded, role: Role
) -> None:
    metadata = guarded.tokens.metadata(role.value)
    for method, roles in ROLES.items():
        name = method.rpartition("/")[2]
        call: Any = guarded.call(method, metadata)
        if role in roles:
            code = first_code(call)
            assert code not in (DENIED, UNKNOWN), method
            continue
        code, text, reason = refusal_of(call)
        assert (code, reason) == (DENIED, ErrorReason.PERMISSION_DENIED), method
        assert f"role {role} may not call {name}" in text
    assert guarded.job.ask(lambda: guarded.job.coordinator.core.record) is None


def first_code(call: Any) -> grpc.StatusCode:  # noqa: ANN401, as gRPC's
    """How a call ends, or that it does not."""
    try:
        for _ in call:
            call.cancel()
            return grpc.StatusCode.OK
    except grpc.RpcError:
        code: grpc.StatusCode = call.code()
        return code
    return grpc.StatusCode.OK


def invalid(tokens: JobTokens) -> dict[str, Metadata | None]:
    past = datetime.now(UTC) - timedelta(seconds=1)
    tokens.create("expired", Role.ADMIN, expires=past)
    tokens.create("revoked", Role.ADMIN)
    tokens.revoke("revoked")
    (_, value), *_ = tokens.metadata("admin")
    return {
        "none": None,
        "unknown": metadata_of(new_token()),
        "expired": tokens.metadata("expired"),
        "revoked": tokens.metadata("revoked"),
        "no token at all": (("authorization", "x"),),
        "another scheme": (("authorization", value.replace("Bearer", "Basic")),),
        "its digest": (("authorization", "Bearer " + "0" * 64),),
        "under another key": (("token", value),),
    }


def test_whoever_shows_no_valid_token_hears_the_same(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "psserver")
    heard = set()
    for metadata in invalid(guarded.tokens).values():
        for method in ROLES:
            heard.add(refusal_of(guarded.call(method, metadata)))

    ((code, text, reason),) = heard
    assert (code, reason) == (UNKNOWN, ErrorReason.UNAUTHENTICATED)
    assert text.startswith("missing or invalid credential; name a file")
    assert "PS_TOKEN_FILE" in text
    lines = [each for each in caplog.records if "is refused" in each.getMessage()]
    assert len(lines) <= 2, "one a minute of each daemon"
    # A probe of the platform shows nothing, and learns nothing but that it serves.
    (probe,) = OPEN_METHODS
    assert first_code(guarded.call(probe, None)) is grpc.StatusCode.OK


def test_an_unknown_method_is_refused_to_everybody(guarded: Guarded) -> None:
    call = guarded.call("/pswire.v1.CoordinatorService/Shutdown", None)
    assert refusal_of(call)[0] is grpc.StatusCode.UNIMPLEMENTED
    call = guarded.call("/grpc.channelz.v1.Channelz/GetServers", None)
    assert refusal_of(call)[0] is grpc.StatusCode.UNIMPLEMENTED


def claims(method: Any, worker_id: str) -> bytes:  # noqa: ANN401
    """The first message of a call that speaks for a worker."""
    message = GetMessageClass(method.input_type)()
    _claim(message, method.input_type, worker_id)
    return message.SerializeToString()


def _claim(message: Any, kind: Any, worker_id: str) -> None:  # noqa: ANN401
    if "protocol_version" in kind.fields_by_name:
        message.protocol_version = PROTOCOL_VERSION
    if "worker_id" in kind.fields_by_name:
        message.worker_id = worker_id
    elif "worker" in kind.fields_by_name:
        message.worker.worker_id = worker_id
        message.worker.incarnation = 1
    else:
        header = kind.fields_by_name["header"].message_type
        _claim(message.header, header, worker_id)
    if "trailer" in kind.fields_by_name:
        message.trailer.SetInParent()  # a whole push is one message


def test_a_token_of_a_worker_speaks_for_no_other_one(guarded: Guarded) -> None:
    """In every call of both planes, whatever else the call says."""
    guarded.tokens.create("of w1", Role.WORKER, "w1")
    metadata = guarded.tokens.metadata("of w1")
    for method, roles in ROLES.items():
        if roles != {Role.WORKER}:
            continue
        message = claims(METHODS[method], "w0")
        code, text, reason = refusal_of(guarded.call(method, metadata, message))
        assert (code, reason) == (DENIED, ErrorReason.PERMISSION_DENIED), method
        assert "of worker 'w1' may not speak for worker 'w0'" in text
        own = claims(METHODS[method], "w1")
        assert first_code(guarded.call(method, metadata, own)) is not DENIED, method
    roster = guarded.job.coordinator.core.roster
    assert guarded.job.ask(lambda: roster.in_state(*WorkerState)) == []


def test_a_damaged_file_of_tokens_leaves_the_former_one_in_force(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    before = guarded.tokens.store.read_bytes()
    for content, mode in ((b"{", 0o600), (before, 0o644)):
        write_private(guarded.tokens.store, content).chmod(mode)
        call = guarded.call(
            "/pswire.v1.CoordinatorService/SetMode", metadata_of(new_token())
        )
        assert refusal_of(call)[0] is UNKNOWN  # it has looked at the file
        admin = guarded.tokens.metadata("admin")
        call = guarded.call("/pswire.v1.CoordinatorService/ReleaseSnapshot", admin)
        assert first_code(call) is grpc.StatusCode.OK
    write_private(guarded.tokens.store, before)
    texts = [each.getMessage() for each in caplog.records]
    assert any("is no file of tokens" in text for text in texts)
    assert any("chmod 600" in text for text in texts)


def test_a_shard_that_is_none_by_its_token_ends(
    guarded: Guarded, tmp_path: Path
) -> None:
    """And says what it may not do; in service it would wait for another token."""
    config = ShardConfig(
        listen=ListenConfig(
            address=Address("127.0.0.1", 0),
            credentials=guarded.tokens.credentials(Role.WORKER),
        ),
        coordinator=parse_address(guarded.job.address),
        advertise=None,
        state_dir=tmp_path,
    )

    async def serve() -> None:
        daemon = Daemon()
        await daemon.start(run_shard(config))
        assert daemon.task is not None
        await daemon.task

    with pytest.raises(Refusal, match="role worker may not call RegisterShard"):
        guarded.job.run(serve())


@pytest.mark.parametrize(
    "sockets",
    [
        pytest.param(False, id="memory", marks=pytest.mark.repeat),
        pytest.param(True, id="sockets"),
    ],
)
def test_tokens_are_rotated_and_revoked_while_a_job_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sockets: bool
) -> None:
    """No step is lost, and the worker whose token was revoked is out within a lease."""
    tokens = JobTokens(tmp_path)
    for name in ("w0", "w1"):
        tokens.create(name, Role.WORKER, name)
    with Job(tmp_path, shard_count=2, sockets=sockets, tokens=tokens) as job:

        def worker(name: str) -> tuple[psworker.Connection, Callable[[], float]]:
            monkeypatch.setenv("PS_TOKEN_FILE", str(tokens.path(name)))
            ps = connect(job, name)
            model = nn.ParameterList([torch.ones(4096), torch.ones(4)])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
            model, optimizer = ps.prepare(model, optimizer)

            def step() -> float:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                return float(model[0][0].detach())

            return ps, step

        first, step = worker("w0")
        values = [step()]
        monkeypatch.setenv("PS_TOKEN_FILE", "")
        with pytest.raises(psworker.AuthenticationError, match="--token-file"):
            connect(job, "w1")
        second, step_of_revoked = worker("w1")
        job.wait_workers(2, WorkerState.MEMBER)

        tokens.create("w0", Role.WORKER, "w0")
        tokens.create("shard", Role.SHARD)
        tokens.revoke("former shard")
        tokens.revoke("former w0")
        tokens.revoke("w1")
        job.wait_record(lambda record: len(record.members) == 1)

        values += [step() for _ in range(3)]
        with pytest.raises(psworker.AuthenticationError, match="PS_TOKEN_FILE"):
            step_of_revoked()
        second.close()
        first.close()
    assert values == [1 - 0.125 * count for count in range(1, 5)]


def test_a_job_of_processes_runs_with_tokens(tmp_path: Path, nursery: Nursery) -> None:
    """Daemons, a host group, and one that may not train."""
    tokens = JobTokens(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Processes(tmp_path, nursery, launches=True) as processes:
        asked = f"--tokens={tokens.store}"
        processes.start_daemon(
            *("coordinator", "coordinator", "--listen=127.0.0.1:0", "--shards=1"), asked
        )
        coordinator = processes.address("coordinator")
        processes.start_daemon(
            *("shard", "shard", f"--coordinator={coordinator}", asked),
            f"--token-file={tokens.path('shard')}",
        )
        for name, file_name in (("reader", "reader"), ("group", "worker")):
            processes.start(
                name,
                *("-m", "psworker", "run", f"--coordinator={coordinator}"),
                *("--nproc=2", "--one-push-per-host"),
                f"--token-file={tokens.path(file_name)}",
                *("--", str(script)),
            )
        assert processes.code("reader") == ExitCode.BAD_CONFIGURATION
        assert "role reader may not call RegisterWorker" in processes.log("reader")
        assert processes.code("group") == ExitCode.DONE
        shown = sorted(processes.rest("group"))
        assert shown == [f"[p{index}] value -3.0" for index in range(2)]


async def test_a_certificate_is_of_a_role_and_of_a_worker(tmp_path: Path) -> None:
    """As gRPC hands it over: no token is asked for."""
    made = MadeCertificates(tmp_path / "certificates")

    async def answer(request: bytes, context: Context) -> bytes:
        check_speaks_for(request.decode())
        return request

    service = "pswire.v1.CoordinatorService"
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        name: grpc.unary_unary_rpc_method_handler(unary(answer))
        for name in ("Leave", "GetStatus", "SetMode")
    }
    listen = ListenConfig(
        address=Address("127.0.0.1", 0), credentials=made.credentials(SERVER)
    )
    server = make_server(
        ServerKind.COORDINATOR,
        [grpc.method_handlers_generic_handler(service, methods)],
        OpenCalls(DEFAULT_LIMITS, Access.of(listen)),
    )
    address = str(bind(server, listen))
    await server.start()

    async def code(who: str, method: str, worker_id: str = "") -> str:
        credentials = made.credentials(who)
        async with aio_channel(address, ChannelKind.CONTROL, credentials) as channel:
            call: Any = channel.unary_unary(f"/{service}/{method}")
            try:
                await call(worker_id.encode(), timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

    try:
        assert await code("worker-w0", "Leave", "w0") == "OK"
        assert await code("worker-w0", "Leave", "w1") == "PERMISSION_DENIED"
        assert await code("worker-w0", "SetMode") == "PERMISSION_DENIED"
        assert await code("reader", "GetStatus") == "OK"
        assert await code("reader", "Leave") == "PERMISSION_DENIED"
        assert await code("admin", "SetMode") == "OK"
        assert await code(SERVER, "SetMode") == "PERMISSION_DENIED"
    finally:
        await server.stop(None)
