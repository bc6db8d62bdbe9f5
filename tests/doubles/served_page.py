"""The page of a job that nobody runs, on a real admin port; and a browser for it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

from playwright.sync_api import Browser, sync_playwright
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from psserver.config import ListenConfig
from psserver.coordinator.rpc.web_page import page_routes
from psserver.edge.admin import AdminPort
from psserver.edge.limits import DEFAULT_LIMITS
from pswire.addresses import Address
from tests.debian import require
from tests.doubles.made_documents import Document, MadeJob

START_TIMEOUT_S: Final = 30.0

FLAGS: Final = (
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium of Debian."""
    path = require("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class ServedPage:
    """Serves the page of a made job. A context manager.

    Attributes:
        job: What its documents are made of; a test may change it.
        url: Of the page.
        paths: What was asked for, in order.
    """

    def __init__(self, job: MadeJob) -> None:
        self.job = job
        self.url = ""
        self.paths: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="page")
        self._is_over = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(
            START_TIMEOUT_S
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(
                START_TIMEOUT_S
            )
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _start(self) -> None:
        started: asyncio.Future[str] = self._loop.create_future()
        self._serving = asyncio.create_task(self._serve(started))
        first: set[asyncio.Future[Any]] = {started, self._serving}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()
        self.url = await started

    async def _stop(self) -> None:
        self._is_over.set()
        if self._serving is not None:
            await self._serving

    async def _serve(self, started: "asyncio.Future[str]") -> None:
        documents: dict[str, Callable[[int], Document]] = {
            "/status": lambda _: self.job.status(),
            "/history": lambda _: self.job.history(),
            "/events": lambda after: self.job.events_after(after),
        }

        async def answer(request: Request) -> Response:
            path = request.url.path
            self.paths.append(path)
            after = int(request.query_params.get("after", 0))
            return JSONResponse(documents[path](after))

        async with AdminPort(
            ListenConfig(address=Address("127.0.0.1", 0)),
            None,
            DEFAULT_LIMITS,
            unready_reason=lambda: "",
            routes=[Route(path, answer) for path in documents],
            open_routes=page_routes(),
        ) as port:
            started.set_result(port.url)
            await self._is_over.wait()
