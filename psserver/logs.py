"""Logs of the daemons: one event a line on stderr, for people or for programs."""

import asyncio
import logging
import os
import sys

import structlog


def configure_logs(*, role: str, verbose: bool = False) -> None:
    """Sends all logs to stderr: plain text on a terminal, JSON lines elsewhere."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.PositionalArgumentsFormatter(),
    ]
    is_terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors="NO_COLOR" not in os.environ)
        if is_terminal
        else structlog.processors.JSONRenderer()
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, _add_role(role)],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *([] if is_terminal else [structlog.processors.format_exc_info]),
            renderer,
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_telling)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Leaves out the traceback that gRPC writes for each call whose client is gone.

    It comes when an answer can't be sent any more, which is what a dead worker is
    like; that it is gone is told elsewhere, by name. So does a call that ends in the
    moment in which the server does.
    """
    kind = record.exc_info[0] if record.exc_info else None
    is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
    return not is_cancelled and "ExecuteBatchError" not in record.getMessage()


def _add_role(role: str) -> structlog.typing.Processor:
    def add(
        logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["role"] = role
        return event

    return add
