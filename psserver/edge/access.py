"""Who may call what: the one interceptor of the servers, and its one table.

A call shows a token, or where the job has none its connection a certificate; either
names a role, and maybe the one worker that it speaks for. The role is checked here,
once for each call. Whom a message speaks for is asked of `check_speaks_for` by the one
place on each side that finds the state of a caller. Calls whose token is revoked, or
expires, are ended.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from typing_extensions import override

from psserver.config import ListenConfig
from psserver.edge.guard import (
    REFUSED_REST_TIMEOUT_S,
    Context,
    abort,
    behavior_of,
    discard,
    machine_of,
)
from psserver.logs import PeerLog
from pswire.reasons import ErrorReason, Refusal
from pswire.security.credentials import CredentialsError, version_of
from pswire.security.roles import Identity, Role
from pswire.security.token_store import TokenEntry, TokenStore
from pswire.security.tokens import Metadata, shown_token

LOOK_INTERVAL_S: Final = 1.0
"""Between looks at the file of tokens: so long a revoked one goes on at most."""

END_NOTICE: Final = timedelta(days=7)
"""Before the end of a token with which calls are open, from when on the log warns."""

_SHARDS: Final = frozenset({Role.SHARD})
_WORKERS: Final = frozenset({Role.WORKER})
_ADMINS: Final = frozenset({Role.ADMIN})
_READERS: Final = frozenset({Role.READER, Role.WORKER, Role.ADMIN})
_ALL: Final = frozenset(Role)

ROLES: Final[Mapping[str, frozenset[Role]]] = {
    f"/{service}/{method}": roles
    for service, methods in {
        "pswire.v1.CoordinatorService": {
            "RegisterShard": _SHARDS,
            "WatchShard": _SHARDS,
            "ReportFence": _SHARDS,
            "ReportCut": _SHARDS,
            "ReportCheckpoint": _SHARDS,
            "ReportProgress": _SHARDS,
            "DrainShard": _SHARDS,
            "RegisterWorker": _WORKERS,
            "WatchWorker": _WORKERS,
            "Join": _WORKERS,
            "DeclareOptimizer": _WORKERS,
            "ReportSilence": _WORKERS,
            "ReportWork": _WORKERS,
            "Leave": _WORKERS,
            "OpenEpoch": _WORKERS,
            "LeaseData": _WORKERS,
            "RecordSplit": _WORKERS,
            "ListSplits": _READERS,
            "SaveState": _WORKERS,
            "LoadState": _WORKERS,
            "RequestSnapshot": _READERS,
            "ReleaseSnapshot": _READERS,
            "SaveCheckpoint": _ADMINS,
            "RestoreCheckpoint": _ADMINS,
            "SetMode": _ADMINS,
            "GetStatus": _READERS,
            "GetHistory": _READERS,
            "WatchEvents": _READERS,
            "RecordTrace": _ADMINS,
        },
        "pswire.v1.ParameterService": {
            "PushPull": _WORKERS,
            "Push": _WORKERS,
            "PushPullOnce": _WORKERS,
            "Pull": _WORKERS,
            "Seed": _WORKERS,
            "GetSession": _WORKERS,
            "AwaitContribution": _WORKERS,
            "Commit": _WORKERS,
            "Ready": _WORKERS,
            "PullOptimizerState": _WORKERS,
            "StageOptimizerState": _WORKERS,
            "OpenSegments": _WORKERS,
            "PullSnapshot": _READERS,
        },
        "pswire.v1.ProbeService": {"Probe": _ALL},
        "grpc.health.v1.Health": {"Watch": _ALL, "List": _ALL},
        "grpc.reflection.v1alpha.ServerReflection": {
            "ServerReflectionInfo": frozenset({Role.READER, Role.ADMIN})
        },
    }.items()
    for method, roles in methods.items()
}
"""Who may call each method. One that is not here is refused to everybody."""

OPEN_METHODS: Final = frozenset({"/grpc.health.v1.Health/Check"})
"""What may be called without a credential: the probes of a platform have none."""

log = logging.getLogger("psserver")

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


@dataclass(frozen=True, slots=True)
class _Caller:
    """Who makes the call that is being handled.

    Attributes:
        identity: As its credential says.
        context: The call.
        refusals: Where what it may not do is logged.
    """

    identity: Identity
    context: Context
    refusals: PeerLog

    def refusal(self, what: str) -> Refusal:
        """Why it may not do something, which goes to the log as well."""
        self.refusals.warning(machine_of(self.context), f"{self.identity}: {what}")
        return Refusal(ErrorReason.PERMISSION_DENIED, what)


_caller: ContextVar[_Caller | None] = ContextVar("caller", default=None)


def check_speaks_for(worker_id: str) -> None:
    """Refuses a call in the name of another worker than its credential's.

    Everybody may speak for everybody where no credentials are asked for, and those
    without the name of a worker for any.

    Raises:
        Refusal: `PERMISSION_DENIED`.
    """
    caller = _caller.get()
    if caller is not None and caller.identity.name not in ("", worker_id):
        raise caller.refusal(
            f"a credential of worker {caller.identity.name!r} may not speak for "
            f"worker {worker_id[:64]!r}"
        )


def wanted_worker_id(worker_id: str) -> str:
    """The id that a process registers under: its own wish, or its credential's.

    Raises:
        Refusal: `PERMISSION_DENIED`: it wishes for another one.
    """
    caller = _caller.get()
    wanted = worker_id or (caller.identity.name if caller is not None else "")
    check_speaks_for(wanted)
    return wanted


class KnownTokens:
    """The tokens of a job, read again when their file changes."""

    def __init__(
        self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """Reads the file.

        Raises:
            CredentialsError: It can't be used; the text says why.
        """
        self._path = path
        self._now = now
        self._version = version_of(path)
        self._store = TokenStore.read(path)

    def find(self, token: str) -> TokenEntry | None:
        """The entry of a token, None for one that does not count."""
        found = self._store.find(token, self._now())
        if found is None and self.look():
            return self._store.find(token, self._now())
        return found

    def counts(self, entry: TokenEntry) -> bool:
        """Whether a token that was found still counts."""
        return self._store.counts(entry, self._now())

    def ends_soon(self, entry: TokenEntry) -> bool:
        """Whether a token is about to expire."""
        return entry.expires is not None and entry.expires - self._now() < END_NOTICE

    def look(self) -> bool:
        """Reads the file if it has changed; whether other tokens are known now."""
        version = version_of(self._path)
        if version == self._version:
            return False
        self._version = version
        try:
            store = TokenStore.read(self._path)
        except CredentialsError as error:
            log.error("%s; the tokens that were read before stay in force", error)
            return False
        log.info("%d tokens are known now", len(store.entries))
        self._store = store
        return True


class Access(grpc.aio.ServerInterceptor):
    """Lets in who may call. In the event loop.

    Attributes:
        refused: Calls that were not let in, by the reason.
    """

    def __init__(self, tokens: KnownTokens | None = None) -> None:
        """Knows nobody but by these tokens, and by certificates.

        Certificates are those that the server has checked by the job's authority.
        """
        self._tokens = tokens
        self.refused: Counter[ErrorReason] = Counter()
        self._refusals = PeerLog(log)
        self._checked: dict[str, tuple[Handler, Handler]] = {}
        self._calls: dict[asyncio.Task[Any], TokenEntry] = {}
        self._ended: set[asyncio.Task[Any]] = set()
        self._noticed: set[TokenEntry] = set()

    @classmethod
    def of(cls, listen: ListenConfig) -> "Access | None":
        """What a daemon asks its callers for, None for nothing.

        Raises:
            CredentialsError: The file of tokens can't be used.
        """
        if listen.tokens is None and not listen.demands_certificates:
            return None
        return cls(None if listen.tokens is None else KnownTokens(listen.tokens))

    @override
    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        roles = ROLES.get(method)
        if handler is None or method in OPEN_METHODS:
            return handler
        known = self._checked.get(method)
        if known is not None and known[0] is handler:
            return known[1]
        checked = self._with_check(handler, method.rpartition("/")[2], roles)
        if roles is not None:  # of others a stranger may make up any number
            self._checked[method] = handler, checked
        return checked

    def identity_of(self, token: str) -> Identity | None:
        """Whom a token stands for, None for one that does not count."""
        entry = None if self._tokens is None else self._tokens.find(token)
        return None if entry is None else entry.identity

    def knows(self, context: Context) -> bool:
        """Whether a call shows a credential that counts, for whatever that is."""
        return self._shown(context)[0] is not None

    def look(self) -> None:
        """Looks whether tokens have changed, and ends calls of those that are gone."""
        if self._tokens is None:
            return
        self._tokens.look()
        gone: Counter[Identity] = Counter()
        for task, entry in self._calls.items():
            if task not in self._ended and not self._tokens.counts(entry):
                self._ended.add(task)
                task.cancel()
                gone[entry.identity] += 1
        for identity, count in gone.items():
            log.warning("%s counts no more: calls that are ended: %d", identity, count)
        ending = {each for each in self._calls.values() if self._tokens.ends_soon(each)}
        for entry in ending - self._noticed:
            log.warning(
                "%s ends at %s, and has calls open: replace it before, or they end "
                "with it",
                *(entry.identity, entry.expires),
            )
        known = self._noticed | ending
        self._noticed = {each for each in known if self._tokens.counts(each)}

    def _with_check(
        self, handler: "Handler", method: str, roles: frozenset[Role] | None
    ) -> "Handler":
        """A handler that checks the caller first."""
        inner = behavior_of(handler)

        async def entered(
            request: Any,  # noqa: ANN401
            context: Context,
        ) -> "asyncio.Task[Any] | None":
            try:
                return self._enter(context, method, roles)
            except Refusal as refusal:
                self.refused[refusal.reason] += 1
                if handler.request_streaming:
                    await discard(request, REFUSED_REST_TIMEOUT_S)
                await abort(context, refusal)

        async def answer(request: Any, context: Context) -> Any:  # noqa: ANN401
            task = await entered(request, context)
            try:
                return await inner(request, context)
            except asyncio.CancelledError:
                await self._end(task, context)
                raise
            finally:
                self._leave(task)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401
            task = await entered(request, context)
            try:
                answers = inner(request, context)
                if not hasattr(answers, "__aiter__"):
                    await answers  # it writes by the context
                    return
                async with aclosing(answers):
                    async for each in answers:
                        yield each
            except asyncio.CancelledError:
                await self._end(task, context)
                raise
            finally:
                self._leave(task)

        return _like(handler, stream if handler.response_streaming else answer)

    def _enter(
        self, context: Context, method: str, roles: frozenset[Role] | None
    ) -> "asyncio.Task[Any] | None":
        """Lets a call in; its task, if the call has to be ended with its token.

        Raises:
            Refusal: `UNAUTHENTICATED` or `PERMISSION_DENIED`.
        """
        identity, entry = self._shown(context)
        if identity is None:
            text = "missing or invalid credential"
            self._refusals.warning(machine_of(context), text)
            raise Refusal(ErrorReason.UNAUTHENTICATED, text)
        caller = _Caller(identity, context, self._refusals)
        if roles is None or identity.role not in roles:
            raise caller.refusal(f"role {identity.role} may not call {method[:64]}")
        _caller.set(caller)
        if entry is None:
            return None
        task = asyncio.current_task()
        assert task is not None, "a handler is called by a task"
        self._calls[task] = entry
        return task

    def _shown(self, context: Context) -> tuple[Identity | None, TokenEntry | None]:
        """Who calls, None for a stranger, and by which token, if it is by one."""
        metadata: Metadata = context.invocation_metadata()  # type: ignore[assignment]
        token = None if self._tokens is None else shown_token(metadata)
        if token is None or self._tokens is None:
            return _certified(context), None
        entry = self._tokens.find(token)
        return (None if entry is None else entry.identity), entry

    async def _end(self, task: "asyncio.Task[Any] | None", context: Context) -> None:
        """Ends a cancelled call by a status, if it was cancelled for its token.

        Without one its client would wait until its deadline (grpc/grpc#29248).
        """
        if task in self._ended:
            task.uncancel()
            text = "the token of this call was revoked or has expired"
            await abort(context, Refusal(ErrorReason.CREDENTIAL_ENDED, text))

    def _leave(self, task: "asyncio.Task[Any] | None") -> None:
        if task is not None:
            self._calls.pop(task, None)
            self._ended.discard(task)


async def watch_tokens(access: Access | None) -> None:
    """Ends calls whose token does not count any more, as long as the daemon serves."""
    while access is not None:
        await asyncio.sleep(LOOK_INTERVAL_S)
        access.look()
    await asyncio.Event().wait()


def _certified(context: Context) -> Identity | None:
    """Who calls by the certificate of the connection, None without one of ours."""
    for each in context.auth_context().get("x509_subject_alternative_name", ()):
        identity = Identity.from_uri(each.decode(errors="replace"), "certificate")
        if identity is not None:
            return identity
    return None


def _like(handler: "Handler", behavior: Callable[[Any, Context], Any]) -> "Handler":
    """A handler of the same kind with another behavior."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behavior, handler.request_deserializer, handler.response_serializer)
