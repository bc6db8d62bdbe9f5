"""Connections in a notebook, where cells run again and errors end nothing.

A script that fails ends, and its worker with it. In a notebook the process stays: a
cell that failed leaves a worker that others wait for, and a cell that runs again would
be a second worker. Without IPython nothing happens here.
"""

import sys
from typing import Any, Final

from psworker.connection import Connection

_AFTER_CELL: Final = "post_run_cell"


_held: dict[tuple[str, str], tuple[Connection, int]] = {}
"""Connections and the cells that made them, by coordinator and wanted worker id."""


def close_earlier(coordinator: str, worker_id: str) -> None:
    """Closes the connection that an earlier cell has made under the same wanted id."""
    shell = _running_shell()
    if shell is None or (coordinator, worker_id) not in _held:
        return
    earlier, cell = _held[coordinator, worker_id]
    if earlier.is_closed or cell == shell.execution_count:  # one may make several
        return
    _say(
        f"closes the connection of worker {earlier.worker_id}, which an earlier cell "
        "made to the same job; give connect() worker ids that differ to keep both"
    )
    earlier.close()


def is_running() -> bool:
    """Whether cells run here: one of them may well make several connections."""
    return _running_shell() is not None


def watch(connection: Connection, coordinator: str, worker_id: str) -> None:
    """From now on prints what a cell that fails means for the job."""
    shell = _running_shell()
    if shell is None:
        return
    if not _held:
        shell.events.register(_AFTER_CELL, _after_cell)
    _held[coordinator, worker_id] = connection, shell.execution_count
    _say(f"connected to {coordinator} as worker {connection.worker_id}")


def _after_cell(result: Any) -> None:  # noqa: ANN401, of IPython
    """Called by IPython when a cell has ended."""
    for key, (connection, _) in list(_held.items()):
        if connection.is_closed:
            del _held[key]
        if result.success:
            continue
        if connection.is_closed:
            _say(
                f"worker {connection.worker_id} is no part of the job any more, which "
                "counts it as lost: connect() and prepare() again to go on"
            )
        else:
            _say(
                f"worker {connection.worker_id} is still part of the job, and others "
                "may wait for it: go on in another cell, or call close() on its "
                "connection"
            )
    if not _held:
        shell = _running_shell()
        assert shell is not None, "it has called"
        shell.events.unregister(_AFTER_CELL, _after_cell)


def _say(text: str) -> None:
    print(f"psworker: {text}", file=sys.stderr)


def _running_shell() -> Any:  # noqa: ANN401, of IPython
    """The shell that runs cells, `None` outside of IPython, which is not imported."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
