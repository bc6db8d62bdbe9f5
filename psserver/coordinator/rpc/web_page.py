"""A job by HTTP: its documents, its page, and what a token of role admin does there.

The files of the page are in `psserver/coordinator/page`, as they are written, without a
build. They hold nothing of a job: the page asks for that, with a token where the job
has any.
"""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.rpc.public_control import PublicControl, checked_bound
from psserver.edge.shared_answer import SharedAnswer
from pswire.addresses import Address
from pswire.limits import NUMBER_MAX, QUORUM_DEFAULT, STALENESS_BOUND_DEFAULT
from pswire.membership import Mode, ModeTerms
from pswire.number_range import NumberRange
from pswire.status_document import (
    Document,
    events_document,
    history_document,
    status_document,
    terms_document,
)

ACTION_S: Final = 60.0
"""Longest wait of an action: its caller is a person in front of a page."""

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("connect", "img", "script", "style")),
        *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")),
        # No text becomes markup, whatever the page's own code does.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The Content-Security-Policy: nothing from another host, nothing inline."""

_HEADERS: Final = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

_MEDIA_TYPES: Final = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}


def page_routes() -> list[Route]:
    """The page's files, which are for everybody."""
    folder = files("psserver.coordinator") / "page"
    return [
        _file_route(each.name, _MEDIA_TYPES[kind], each.read_bytes())
        for each in folder.iterdir()
        if (kind := each.name.rpartition(".")[2]) in _MEDIA_TYPES
    ]


def document_routes(public: PublicControl, address: Address) -> list[Route]:
    """The documents that the page shows, which other programs may read as well.

    Args:
        public: Knows the job.
        address: Where the coordinator is called by gRPC.
    """

    def status() -> Callable[[], Document]:
        return partial(status_document, public.status(), str(address))

    def history() -> Callable[[], Document]:
        return partial(history_document, public.history())

    async def events(request: Request) -> Response:
        after = _read_after(request.query_params.get("after", "0"))
        return JSONResponse(events_document(public.events(after)))

    return [
        _shared_route("/status", status),
        _shared_route("/history", history),
        Route("/events", events),
    ]


def _shared_route(path: str, read: Callable[[], Callable[[], Document]]) -> Route:
    """A document that all who ask share for a second.

    Args:
        path: Of the document.
        read: Reads the job; returns what makes the document of that, in any thread.
    """

    async def make() -> bytes:
        document = read()
        return await asyncio.to_thread(lambda: bytes(JSONResponse(document()).body))

    shared = SharedAnswer(make)

    async def answer(_: Request) -> Response:
        return Response(await shared.get(), media_type=JSONResponse.media_type)

    return Route(path, answer)


def _read_after(text: str) -> int:
    """The number of an event.

    Raises:
        HTTPException: It is none.
    """
    try:
        return int(NumberRange(0, NUMBER_MAX).parsed(text))
    except ValueError as error:
        raise HTTPException(400, f"after={text[:64]!r}: {error}") from error


def action_routes(host: CoordinatorHost, *, has_tokens: bool) -> list[Route]:
    """What admins may do. `POST /actions` alone does nothing: it says who may.

    Args:
        host: Does it.
        has_tokens: Whether the job has tokens. Else nobody can be known for an admin,
            and a page that anybody opens only reads.
    """
    if not has_tokens:
        return [Route("/actions{action:path}", _refuse, methods=["POST"])]
    actions = _Actions(host)
    return [
        Route("/actions", actions.allowed, methods=["POST"]),
        Route("/actions/checkpoint", actions.save_checkpoint, methods=["POST"]),
        Route("/actions/mode", actions.set_mode, methods=["POST"]),
    ]


def _file_route(name: str, media_type: str, content: bytes) -> Route:
    async def answer(_: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Route("/" if name == "index.html" else f"/{name}", answer)


async def _refuse(_: Request) -> Response:
    raise HTTPException(
        403,
        "the job has no tokens that would tell who is an admin: change it by psctl, or "
        "give the daemons --tokens",
    )


class _Actions:
    def __init__(self, host: CoordinatorHost) -> None:
        self._host = host
        self._wait_s = min(ACTION_S, host.limits.wait_s)

    async def allowed(self, _: Request) -> Response:
        return JSONResponse({})

    async def save_checkpoint(self, _: Request) -> Response:
        """Makes a checkpoint; answers when it is complete."""
        await self._host.checkpoints.save(self._wait_s)
        newest = self._host.core.checkpoints.newest
        assert newest is not None, "else it is refused"
        return JSONResponse(
            {
                "name": newest.name,
                "version": newest.version,
                "clock": newest.clock,
                "byte_count": newest.byte_count,
            }
        )

    async def set_mode(self, request: Request) -> Response:
        """Changes the mode; answers when the record is written."""
        terms = _read_mode(await request.body())
        record = await self._host.set_mode(terms, self._wait_s)
        return JSONResponse(
            {
                **terms_document(terms),
                "generation": record.generation,
                "mode_clock": record.change_clock,
            }
        )


def _read_mode(body: bytes) -> ModeTerms:
    """A mode with its numbers.

    Raises:
        HTTPException: The body has none.
        Refusal: `MALFORMED_MESSAGE` for a bound that the mode can't have.
    """
    try:
        wanted: Any = json.loads(body)
        mode = Mode.labelled(wanted["mode"])
        bound = wanted.get("staleness_bound")
        if bound is None:
            bound = mode.rules.bound_of(STALENESS_BOUND_DEFAULT)
        elif type(bound) is not int:
            raise TypeError
        quorum, window_s = wanted.get("quorum"), wanted.get("grace_window_s", 0)
        if quorum is None:
            quorum = QUORUM_DEFAULT if mode.rules.has_quorum else 0
        if type(quorum) is not int or type(window_s) not in (int, float):
            raise TypeError
        window_ms = round(window_s * 1000)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise HTTPException(
            400,
            'the body is no mode: send JSON such as {"mode": "ssp", '
            f'"staleness_bound": 3}}, the mode one of {", ".join(Mode.labels())}',
        ) from error
    return ModeTerms(mode, checked_bound(mode, bound), quorum, window_ms)
