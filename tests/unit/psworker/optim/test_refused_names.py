"""A name that can't be sent is refused where the script gives it, before any call."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pswire.addresses import Address
from psworker.config import WorkerConfig
from psworker.data import split
from psworker.data.splitting import to_record
from psworker.errors import ConfigurationError
from psworker.optim.model_schema import bind_models
from psworker.optim.named_objects import NamedObjects


def named_tensor(name: str) -> None:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.zeros(3)))
    bind_models({"net": module})


def named_worker(name: str) -> None:
    WorkerConfig(coordinator=Address("localhost", 7070), worker_id=name)


def named_keyword(name: str) -> None:
    NamedObjects.of((), {name: nn.Linear(1, 1)})


def named_split(name: str) -> None:
    to_record(name, split(torch.arange(20), parts={"train": 0.8, "test": 0.2}))


PLACES = {
    named_tensor: "rename the module or the parameter",
    named_worker: "PS_WORKER_ID",
    named_keyword: "give prepare() the object under another name",
    named_split: "record it under another name",
}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a\ud800b", r"'a\ud800b' can't be written in UTF-8"),
        ("n" * 1025, "has 1025 bytes in UTF-8, of at most 1024"),
    ],
)
@pytest.mark.parametrize(("give", "cure"), PLACES.items())
def test_a_name_that_cannot_be_sent_is_refused_with_what_to_do(
    give: Callable[[str], None], cure: str, name: str, says: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        give(name)
    assert says in str(caught.value)
    assert cure in str(caught.value)


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "a\x1b[31mb"])
def test_an_id_that_would_garble_logs_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        named_worker(name)
    assert "contains the control character" in str(caught.value)
    assert "PS_WORKER_ID" in str(caught.value)
    assert str(caught.value).isprintable()
    named_tensor(name)  # a name is data


@pytest.mark.parametrize("name", ["a\ud800b", "n" * 1025])
def test_the_keys_of_a_dict_are_looked_at_too(name: str) -> None:
    with pytest.raises(ConfigurationError):
        NamedObjects.of(({name: nn.Linear(1, 1)},), {})


@pytest.mark.parametrize("give", [named_tensor, named_worker, named_keyword])
def test_any_text_in_any_language_goes(give: Callable[[str], None]) -> None:
    give("重み")
