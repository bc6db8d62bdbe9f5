"""All connections have the same interface, and it is all they have."""

import inspect
from typing import Any

import pytest

from psworker.backends.group_connection import GroupConnection
from psworker.backends.local_connection import LocalConnection
from psworker.connection import Connection
from psworker.worker_connection import WorkerConnection


def interface(kind: type[Any]) -> dict[str, str]:
    """Public names and how they are called, but for what they return."""
    shown = {}
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") and name not in ("__enter__", "__exit__"):
            continue
        if inspect.ismethod(member):
            continue  # Of the class: how psworker makes one.
        if name == "leave_at_once":
            continue  # What psworker calls when its process is told to end.
        if isinstance(member, property):
            shown[name] = "property"
        else:
            parameters = inspect.signature(member).parameters.values()
            shown[name] = str([(each.name, each.kind.name) for each in parameters])
    return shown


@pytest.mark.parametrize("kind", [Connection, LocalConnection, GroupConnection])
def test_a_connection_has_what_the_interface_says_and_no_more(kind: type[Any]) -> None:
    assert interface(kind) == interface(WorkerConnection)
