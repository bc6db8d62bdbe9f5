"""`optimizer.state` of a prepared optimizer: the shards hold it, a script may edit it.

It is fetched when the script first reads it after a step, and forgotten with the next
one. Before that step, identities and torch's counts of writes show what the script has
changed; then all of it is sent to the shards, which go on from there. What is cleared
as a whole need not be fetched.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from typing_extensions import override

from psworker.errors import ConfigurationError

Held = dict[str, Any]
"""State of one parameter: tensors and numbers by name."""

_Marks = dict[str, tuple[object, int]]
"""Of each name the value that was there, and how often torch had written to it."""


class _Entry(dict[str, Any]):
    """State of one parameter. Other than a plain dict it can be referred to weakly."""


def _looking_first(name: str) -> Any:  # noqa: ANN401, a method of whatever type
    """A dict's method of this name, after a look at what the shards hold."""
    method = getattr(defaultdict, name)

    @wraps(method)
    def looking(self: "FetchedState", *arguments: object) -> object:
        self._look()
        return method(self, *arguments)

    return looking


class FetchedState(defaultdict[Any, Any]):
    """By parameter, as torch's; other keys are the script's own, and stay here."""

    def __init__(
        self,
        fetch: Callable[[], Mapping[torch.Tensor, Held]],
        name_of: Callable[[object], str | None],
    ) -> None:
        """Fetches nothing yet.

        Args:
            fetch: Returns what the shards hold now; the result is kept.
            name_of: The name of a parameter of the job, `None` for any other key.
        """
        super().__init__(dict)
        self._fetch = fetch
        self._name_of = name_of
        self._is_touched = False
        self._is_whole = False
        self._is_cleared = False
        self._marks: dict[torch.Tensor, _Marks] = {}
        # What was handed out before earlier steps and the script still has.
        self._old: list[tuple[weakref.ref[Any], Any, str]] = []

    @property
    def is_untouched(self) -> bool:
        """Whether the script has looked into nothing of it that it may still have."""
        return not (self._is_touched or self._old)

    def edits(
        self, stateful: Collection[torch.Tensor], *, is_readable: bool
    ) -> dict[torch.Tensor, Held] | None:
        """All state as the script has it now, or None if it has changed nothing.

        Args:
            stateful: All parameters that shards may hold state of.
            is_readable: Whether this process can read from shards. If not, the result
                may lack what the script has not touched.

        Raises:
            ConfigurationError: The script has written to state of an earlier step.
        """
        if self._old:
            self._refuse_old()
        if not self._is_touched:
            return None
        if not self._is_whole:
            has = super().__contains__
            if is_readable and not all(map(has, stateful)):
                self._look()
            else:
                self._is_whole = self._is_cleared = True
        if not self._is_cleared and _are_same(self._now(), self._marks):
            return None
        return dict(self._of_parameters())

    def note_taken(self) -> None:
        """What the script has changed so far is known."""
        self._marks, self._is_cleared = self._now(), False

    def forget(self) -> None:
        """What was fetched holds no longer: it is fetched again when it is read."""
        self._is_touched = self._is_whole = self._is_cleared = False
        self._marks = {}
        handed_out: list[tuple[torch.Tensor, Held]] = list(self._of_parameters())
        for parameter, held in handed_out:
            super().__delitem__(parameter)
            self._note_old(held, self._name_of(parameter) or "")
        handed_out.clear()
        if self._old:
            held = {}
            self._old = [each for each in self._old if each[0]() is not None]

    def take_own(self, state: Mapping[Any, Any]) -> None:
        """Keeps what a script has put into a state that it has loaded."""
        for key, value in state.items():
            if self._name_of(key) is None:
                super().__setitem__(key, value)

    def own(self) -> dict[Any, Any]:
        """What the script keeps here for itself."""
        return {
            key: value for key, value in super().items() if self._name_of(key) is None
        }

    def _of_parameters(self) -> Iterator[tuple[torch.Tensor, Held]]:
        for key, value in super().items():
            if self._name_of(key) is not None:
                yield key, value

    def _now(self) -> dict[torch.Tensor, _Marks]:
        return {p: _marks_of(held) for p, held in self._of_parameters() if held}

    def _look(self) -> None:
        """Fetches what the shards hold, unless it is all here."""
        self._is_touched = True
        if self._is_whole:
            return
        for parameter, state in self._fetch().items():
            self._marks[parameter] = _marks_of(state)
            if not super().__contains__(parameter):
                super().__setitem__(parameter, _Entry(state))
        self._is_whole = True

    def _note_old(self, held: object, name: str) -> None:
        if not isinstance(held, Mapping):
            return
        if isinstance(held, _Entry):
            self._old.append((weakref.ref(held), _marks_of(held), name))
        for value in held.values():
            if isinstance(value, torch.Tensor):
                self._old.append((weakref.ref(value), _count(value), name))

    def _refuse_old(self) -> None:
        self._old = [each for each in self._old if each[0]() is not None]
        for position, (reference, mark, name) in enumerate(self._old):
            now = reference()
            is_same = (
                _are_same({name: _marks_of(now)}, {name: mark})
                if not isinstance(now, torch.Tensor)
                else _count(now) == mark
            )
            if is_same:
                continue
            del self._old[position]  # said once
            raise ConfigurationError(
                f"the script has written to state of {name!r} that it had read before "
                "an earlier step, and that the shards have gone on from: read "
                "optimizer.state[parameter] again, and write to what that returns"
            )

    # As a dict

    __getitem__ = _looking_first("__getitem__")
    __delitem__ = _looking_first("__delitem__")
    __contains__ = _looking_first("__contains__")
    __iter__ = _looking_first("__iter__")
    __reversed__ = _looking_first("__reversed__")
    __len__ = _looking_first("__len__")
    __eq__ = _looking_first("__eq__")
    __hash__ = None  # type: ignore[assignment]  # as that of any dict
    keys = _looking_first("keys")
    values = _looking_first("values")
    items = _looking_first("items")
    get = _looking_first("get")
    setdefault = _looking_first("setdefault")
    pop = _looking_first("pop")
    popitem = _looking_first("popitem")

    @override
    def __missing__(self, key: Any) -> Any:
        made = _Entry()
        super().__setitem__(key, made)
        return made

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        self._is_touched = self._is_touched or self._name_of(key) is not None
        super().__setitem__(key, value)

    @override
    def __repr__(self) -> str:
        return repr(self.copy())

    @override
    def clear(self) -> None:
        self._is_touched = self._is_whole = self._is_cleared = True
        super().clear()

    @override
    def update(self, *others: Any, **named: Any) -> None:
        for key, value in dict(*others, **named).items():
            self[key] = value

    @override
    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    @override
    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        self._look()
        plain = (
            (key, dict(value) if isinstance(value, _Entry) else value)
            for key, value in super().items()
        )
        return defaultdict(dict, plain)

    __copy__ = copy  # type: ignore[assignment]

    @override
    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    @override
    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self.copy()))


def _marks_of(held: object) -> _Marks:
    """What a look later is compared with; the values stay alive by it."""
    if not isinstance(held, Mapping):
        return {"": (held, 0)}
    return {
        name: (value, _count(value) if isinstance(value, torch.Tensor) else 0)
        for name, value in held.items()
    }


def _count(tensor: torch.Tensor) -> int:
    """How often torch has written to it, which it does not count in inference."""
    return 0 if tensor.is_inference() else tensor._version


def _are_same(now: Mapping[Any, _Marks], before: Mapping[Any, _Marks]) -> bool:
    return now.keys() == before.keys() and all(
        marks.keys() == before[parameter].keys()
        and all(
            value is before[parameter][name][0] and count == before[parameter][name][1]
            for name, (value, count) in marks.items()
        )
        for parameter, marks in now.items()
    )


class WatchedParameters(list[torch.Tensor]):
    """A list of parameters. A copy or pickle of it is a plain list."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], about_to_read: Callable[[], None]
    ) -> None:
        """Of one group; `about_to_read` returns once the newest values are there."""
        super().__init__(parameters)
        self._about_to_read = about_to_read

    @override
    def __getitem__(self, index: Any) -> Any:
        self._about_to_read()
        return super().__getitem__(index)

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        self._about_to_read()
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)
