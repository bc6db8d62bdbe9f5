"""The metrics of a worker by HTTP, where they are asked for, and whether it lives.

By Prometheus' own server, in threads of its own. It has neither TLS nor tokens, and
tells nothing but what is in the table.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from typing_extensions import override

from pswire.addresses import Address
from pswire.metric_rows import Metric, Rows
from psworker.backends.backend import Backend
from psworker.work_log import KINDS

logger: Final = logging.getLogger("psworker")

CONNECTION_COUNT_MAX: Final = 16
"""Requests at a time; further ones are turned away."""

REQUEST_S: Final = 10.0
"""Until a request is whole, and for which an answer may be unread."""

WORKER: Final[tuple[Metric[Backend], ...]] = (
    Metric(
        "ps_worker_info",
        "Always 1; its label is the worker's id.",
        lambda b: [((b.place.worker_id,), 1)],
        ("worker",),
    ),
    Metric(
        "ps_worker_clocks", "Clocks that it has completed.", lambda b: b.place.clock
    ),
    Metric(
        "ps_worker_steps_total",
        "Steps of its optimizers.",
        lambda b: b.work.step_count,
    ),
    Metric(
        "ps_worker_samples_total",
        "Samples behind these, as far as they are counted.",
        lambda b: b.work.sample_count,
    ),
    Metric(
        "ps_worker_seconds_total",
        "What its script has done for how long: `compute`, `load` data, `send`, `wait` "
        "for answers, or `idle` while it waits for others to compute, or for the "
        "coordinator to give it data.",
        lambda b: [
            ((kind,), b.work.seconds[activity]) for activity, kind in KINDS.items()
        ],
        ("activity",),
    ),
    Metric(
        "ps_worker_sent_bytes_total",
        "Bytes of its messages to shards.",
        lambda b: b.traffic.sent_bytes,
    ),
    Metric(
        "ps_worker_received_bytes_total",
        "Bytes of those from shards.",
        lambda b: b.traffic.received_bytes,
    ),
    Metric(
        "ps_worker_logged",
        "What its script has logged last by `ps.log(loss=...)`.",
        lambda b: [((name,), value) for name, value in b.work.logged.items()],
        ("name",),
    ),
)
"""What the port of a worker tells; `docs/metrics.md` lists the same."""


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S  # of each read and write

    @override
    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: whoever asks at will writes no lines here."""


class _Server(ThreadingWSGIServer):
    """Prometheus' server, with a bound on its threads."""

    daemon_threads = True

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        self._places = threading.BoundedSemaphore(CONNECTION_COUNT_MAX)
        super().__init__(*arguments, **options)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that is gone is no line of the log."""


@dataclass(frozen=True, slots=True)
class MetricsPort:
    """A port that is served.

    Attributes:
        url: Where it is reached.
    """

    url: str
    _server: _Server

    @classmethod
    def open(cls, address: Address, backend: Backend) -> "MetricsPort | None":
        """Serves from now on; None where the address can't be used, which is logged."""
        registry = CollectorRegistry()
        registry.register(Rows(WORKER, lambda: backend))
        ProcessCollector(registry=registry)
        scraped = make_wsgi_app(registry)

        def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "/")
            if path == "/metrics":
                return cast("Iterable[bytes]", scraped(environ, start))
            is_ready = path == "/readyz" and bool(backend.work.activity)
            status, text = {
                "/healthz": ("200 OK", "ok"),
                "/readyz": ("200 OK", "ready")
                if is_ready
                else ("503 Service Unavailable", "not ready: it does not train yet"),
            }.get(path, ("404 Not Found", "see /metrics, /healthz and /readyz"))
            start(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{text}\n".encode()]

        try:
            server = make_server(
                address.host, address.port, app, _Server, handler_class=_Handler
            )
        except OSError as error:
            logger.warning(
                "metrics can't be served on %s: %s; training goes on without them, "
                "choose another admin_listen (port 0 takes a free one)",
                *(address, error.strerror),
            )
            return None
        url = f"http://{Address(address.host, server.server_port)}/"
        thread = threading.Thread(
            target=server.serve_forever, name="psworker metrics", daemon=True
        )
        thread.start()
        logger.info("metrics of this worker are at %smetrics", url)
        return cls(url, server)

    def close(self) -> None:
        """Ends it and frees the port."""
        self._server.shutdown()
        self._server.server_close()
