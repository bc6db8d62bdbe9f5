"""State that a script has registered: what it may be, and what is read of it."""

import math
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pswire.checkpoint.errors import DamagedError
from pswire.checkpoint.registered_state import (
    NotStorableError,
    decode_states,
    encode_states,
)
from pswire.limits import STATE_BYTES_MAX

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats()
    | st.text()
    | st.binary()
)
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(st.integers(), st.integers(), max_size=4).map(Counter)
    )


VALUES = st.recursive(PLAIN, containers, max_leaves=12)


def is_same(left: Any, right: Any) -> bool:  # noqa: ANN401, any state
    """Whether all is equal, types and signs of zeros too; NaN is NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (
            left.dtype is right.dtype
            and left.shape == right.shape
            and torch.equal(left, right)
        )
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    if isinstance(left, dict):
        return is_same(list(left.items()), list(right.items()))
    return bool(left == right)


@settings(max_examples=200, deadline=None)
@given(states=st.dictionaries(st.text(max_size=9), VALUES, max_size=3))
def test_all_that_is_plain_is_read_as_it_was_written(states: dict[str, Any]) -> None:
    assert is_same(decode_states(encode_states(states)), states)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 4, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)).data,
        torch.Generator().manual_seed(3).get_state(),
    ],
)
def test_tensors_are_read_as_they_were_written(tensor: torch.Tensor) -> None:
    states = {"ema": {"a": tensor, 1: [tensor, (tensor,)]}}

    found = decode_states(encode_states(states))

    assert is_same(found, states)
    found["ema"]["a"].zero_()  # its own memory
    assert is_same(found["ema"][1], states["ema"][1])


def test_states_of_schedulers_and_scalers_are_stored() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    schedulers = {
        "steps": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        "cycle": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100),
    }
    states: dict[str, Any] = {
        name: each.state_dict() for name, each in schedulers.items()
    }
    states["scaler"] = torch.amp.GradScaler("cpu").state_dict()

    assert is_same(decode_states(encode_states(states)), states)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, {2: object()}]}, r"loss\.a\[1\]\[2\] is a builtins\.object"),
        ({"rng": torch.ones(2).numpy()}, r"loss\.rng is a numpy\.ndarray"),
        ({"a": {1, 2}}, r"loss\.a is a builtins\.set"),
        ({"a": torch.ones(2).to_sparse()}, r"loss\.a is a tensor of torch\.sparse_coo"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, r"loss\.a is a tensor of .*comp"),
        ({object(): 1}, "loss has a key of type object"),
        ({"a": 1 << 9000}, r"loss\.a has 9001 bits"),
        ({"a": torch.ones(STATE_BYTES_MAX // 4 + 1)}, "it has more than 4.0 MiB"),
        ({"a": "x" * (STATE_BYTES_MAX + 1)}, "it has more than 4.0 MiB"),
        ({"a": '"' * (STATE_BYTES_MAX // 2)}, "it has more than 4.0 MiB"),
    ],
)
def test_what_can_not_be_stored_is_named(value: object, text: str) -> None:
    with pytest.raises(NotStorableError, match=text):
        encode_states({"loss": value})


def test_what_holds_itself_is_refused() -> None:
    held: list[object] = []
    held.append(held)
    with pytest.raises(NotStorableError, match=r"loss\[0\]\[0\].*nested too deep"):
        encode_states({"loss": held})


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_flipped_bytes_are_refused_or_give_another_plain_state(
    data: st.DataObject,
) -> None:
    states = {"a": {"b": [1.5, math.inf, b"x", (1,)], "c": torch.arange(3)}}
    written = bytearray(encode_states(states))
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.integers(0, len(written) - 1))
        written[index] = data.draw(st.integers(0, 255))

    try:
        found = decode_states(bytes(written))
    except DamagedError:
        return
    encode_states(found)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_states(data)


def forged(skeleton: str) -> bytes:
    """A file of safetensors with a skeleton of somebody's own."""
    from safetensors.torch import save

    return save({"0": torch.ones(2)}, {"paramserver.state": skeleton})


@pytest.mark.parametrize(
    "skeleton",
    [
        "",
        "[]",
        "3",
        '{"a": {}}',
        '{"a": {"tuple": 3}}',
        '{"a": {"tuple": [], "list": []}}',
        '{"a": {"eval": "1"}}',
        '{"a": {"tensor": "1"}}',
        '{"a": {"tensor": ["0"]}}',
        '{"a": {"bytes": "%"}}',
        '{"a": {"float": "1"}}',
        '{"a": {"dict": [[1]]}}',
        '{"a": {"dict": [[[1], 2]]}}',
        '{"a": {"Counter": 7}}',
        '{"a": ' + "[" * 100 + "]" * 100 + "}",
        "[" * 100_000,
        '{"a": ' + "9" * 100_000 + "}",
    ],
)
def test_a_forged_skeleton_is_refused(skeleton: str) -> None:
    with pytest.raises(DamagedError, match="it is no registered state"):
        decode_states(forged(skeleton))


def test_a_file_that_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(DamagedError, match=f"of at most {STATE_BYTES_MAX}"):
        decode_states(bytes(STATE_BYTES_MAX + 1))
