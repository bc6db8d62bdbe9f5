"""All backends have the same interface, and little beside it."""

import inspect
from typing import Any

import pytest

from psworker.backends.backend import Backend
from psworker.backends.group import Group
from psworker.backends.host.backend import Host
from psworker.backends.job import Job
from psworker.backends.local import Local


def methods(kind: type[Any]) -> dict[str, str]:
    """Public methods and how they are called, but for what they return."""
    return {
        name: str([(e.name, e.kind.name) for e in parameters_of(member)])
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def parameters_of(member: Any) -> list[inspect.Parameter]:  # noqa: ANN401, a function
    return list(inspect.signature(member).parameters.values())


@pytest.mark.parametrize("kind", [Job, Local, Group, Host])
def test_a_backend_has_what_the_seam_says_and_no_more(kind: type[Any]) -> None:
    own = methods(kind)
    if kind is Job:
        del own["leave_at_once"]  # by a signal, in whatever is behind the connection
    assert own == methods(Backend)


def test_types_agree_too() -> None:
    """Checked by mypy, where a class has another type than the seam."""
    kinds: list[type[Backend]] = [Job, Local, Group, Host]
    shared = [name for name in dir(Backend) if not name.startswith("_")]
    assert all(hasattr(kind, name) for kind in kinds for name in shared)
