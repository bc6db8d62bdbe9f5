"""What one call of `prepare` is given: objects, and the script's names for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from psworker.errors import ConfigurationError, refuse_name

OPTIONS: Final = (
    "clip_grad_norm",
    "buffers",
    "overlap",
    "compression",
    "loss",
    "differential_privacy",
    "strategy",
)
"""What `prepare` takes by keyword that is no name of an object."""

_NAME_CURE: Final = "give prepare() the object under another name"


@dataclass(frozen=True, slots=True)
class NamedObjects:
    """Objects in the order of the call; those without a name come first.

    Attributes:
        objects: All of them.
        names: Of each, empty where the script has given none.
        is_dict: Whether they came in a dict, and go back in one.
    """

    objects: tuple[Any, ...]
    names: tuple[str, ...]
    is_dict: bool = False

    @classmethod
    def of(cls, objects: Sequence[Any], named: Mapping[str, Any]) -> Self:
        """Reads the arguments of `prepare`.

        Raises:
            ConfigurationError: A name is none, or they come in a dict and beside it.
        """
        if not any(isinstance(each, dict) for each in objects):
            given = (*objects, *named.values())
            for name in filter(None, named):
                refuse_name("name", name, _NAME_CURE)
            return cls(given, ("",) * len(objects) + tuple(named))
        if len(objects) > 1 or named:
            raise ConfigurationError(
                "prepare() takes a dict of objects by name, or objects and keyword "
                "arguments, and not both: put all of them into the dict, or unpack "
                "it, as in ps.prepare(**objects)"
            )
        (given_dict,) = objects
        for name in given_dict:
            _check_name(name)
        return cls(tuple(given_dict.values()), tuple(given_dict), is_dict=True)

    @property
    def positional(self) -> tuple[Any, ...]:
        """Objects without a name."""
        pairs = zip(self.objects, self.names, strict=True)
        return tuple(each for each, name in pairs if not name)

    @property
    def by_name(self) -> dict[str, Any]:
        """Objects with one."""
        pairs = zip(self.names, self.objects, strict=True)
        return {name: each for name, each in pairs if name}

    def of_kind(self, base: str, kind: type[Any]) -> dict[str, Any]:
        """Objects of a kind by the name that each has in the job.

        Those without a name are `model`, `model1`, `model2` ..., in order.

        Raises:
            ConfigurationError: One is named as another is called by its place.
        """
        found: dict[str, Any] = {}
        unnamed_count = 0
        for each, given in zip(self.objects, self.names, strict=True):
            if not isinstance(each, kind):
                continue
            name = given or f"{base}{unnamed_count or ''}"
            unnamed_count += not given
            if name in found:
                raise ConfigurationError(
                    f"a {type(each).__name__} is named {name!r}, as an object that "
                    "comes without a name is called by its place: name both, or "
                    "choose another name"
                )
            found[name] = each
        return found

    def replaced(self, others: Mapping[int, Any]) -> Self:
        """The same with others in their places, by `id()` of the object before."""
        given = tuple(others.get(id(each), each) for each in self.objects)
        return replace(self, objects=given)

    def without(self, is_left_out: Callable[[Any], bool]) -> Self:
        """The same without the objects of which this is true."""
        pairs = [
            (each, name)
            for each, name in zip(self.objects, self.names, strict=True)
            if not is_left_out(each)
        ]
        return replace(
            self,
            objects=tuple(each for each, _ in pairs),
            names=tuple(name for _, name in pairs),
        )

    def returned(self, replaced: Mapping[int, Any]) -> Any:  # noqa: ANN401, what was given
        """What `prepare` returns: a dict for a dict, else a tuple or a single object.

        `replaced` has what is returned in the place of an object, by its `id()`.
        """
        results = self.replaced(replaced).objects
        if self.is_dict:
            return dict(zip(self.names, results, strict=True))
        return results[0] if len(results) == 1 else results


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigurationError(
            f"{name!r} names nothing in a job: the keys of the dict that prepare() "
            "takes are names as of variables, such as 'generator'"
        )
    refuse_name("name", name, _NAME_CURE)
    if name in OPTIONS:
        raise ConfigurationError(
            f"{name!r} is an option of prepare(), which goes beside the dict and not "
            f"into it, as in ps.prepare(objects, {name}=...); if it is the name of an "
            "object, choose another"
        )
