"""`prepare` takes names, as keywords or in a dict, and returns what it was given."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from psworker.connection import Connection, LocalConnection
from psworker.errors import ConfigurationError
from psworker.optim.named_objects import OPTIONS, NamedObjects
from psworker.optim.prepare import sort_objects


def of(*objects: Any, **named: Any) -> NamedObjects:  # noqa: ANN401
    return NamedObjects.of(objects, named)


def test_a_connection_takes_the_options_that_no_object_is_named_by() -> None:
    parameters = inspect.signature(Connection.prepare).parameters.values()
    options = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    assert tuple(options) == OPTIONS
    assert [each.kind for each in parameters][-1] is inspect.Parameter.VAR_KEYWORD


def test_names_are_those_of_the_job_and_the_rest_is_named_by_its_place() -> None:
    one, two, three, four = (nn.Linear(1, 1) for _ in range(4))

    named = of(one, two, generator=three, critic=four)

    assert named.of_kind("model", nn.Module) == {
        "model": one,
        "model1": two,
        "generator": three,
        "critic": four,
    }
    assert named.positional == (one, two)
    assert named.by_name == {"generator": three, "critic": four}


def test_models_optimizers_and_loaders_have_names_of_their_own() -> None:
    generator, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    first = torch.optim.SGD(generator.parameters(), lr=0.1)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)

    given = sort_objects(of(second, g=generator, c=critic, opt_g=first))

    assert given.models == {"g": generator, "c": critic}
    assert given.optimizers == {"optimizer": second, "opt_g": first}
    assert [entry.model for entry in given.bound.schema.entries] == ["g", "g", "c", "c"]


@pytest.mark.parametrize(
    ("make", "returned"),
    [
        (lambda a, b: of(a, b), lambda a, b: (a, b)),
        (lambda a, b: of(a, name=b), lambda a, b: (a, b)),
        (lambda a, b: of(second=b, first=a), lambda a, b: (b, a)),
        (lambda a, b: of({"x": a, "y": b}), lambda a, b: {"x": a, "y": b}),
        (lambda a, b: of(a), lambda a, b: a),
        (lambda a, b: of(name=b), lambda a, b: b),
        (lambda a, b: of({"x": a}), lambda a, b: {"x": a}),
    ],
)
def test_what_is_returned_has_the_form_of_what_was_given(
    make: Callable[[str, str], NamedObjects], returned: Callable[[str, str], object]
) -> None:
    here, there = ("a", "b"), ("A", "B")
    replaced = {id(old): new for old, new in zip(here, there, strict=True)}
    assert make(*here).returned({}) == returned(*here)
    assert make(*here).returned(replaced) == returned(*there)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m: of({"a": m}, m), "and not both"),
        (lambda m: of({"a": m}, b=m), "and not both"),
        (lambda m: of({"overlap": m}), "'overlap' is an option of prepare"),
        (lambda m: of({"": m}), "'' names nothing"),
        (lambda m: of({3: m}), "3 names nothing"),
        (lambda m: of({"a.b": m}), "'a.b' names nothing"),
        (
            lambda m: of(m, model=nn.Linear(1, 1)).of_kind("model", nn.Module),
            "name bot",
        ),
    ],
)
def test_names_that_are_none_are_refused(
    make: Callable[[nn.Module], object], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make(nn.Linear(1, 1))


def test_an_option_that_there_is_not_is_no_name() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(
        ConfigurationError, match=r"clip_grad=1\.0 .* \(did you mean clip_grad_norm"
    ):
        LocalConnection().prepare(model, optimizer, clip_grad=1.0)
    with pytest.raises(ConfigurationError, match="no_such=None is no option"):
        sort_objects(of(model, optimizer, no_such=None))
