import pytest
import torch

from pswire.limits import MESSAGE_BYTES_MAX
from pswire.optimizer_states import StateKey, decode_state, encode_state
from pswire.reasons import ErrorReason
from tests.refusals import refused


def test_state_comes_back_with_one_file_for_each_name_and_one_for_numbers() -> None:
    state = {
        StateKey(0, 2, "step"): torch.tensor(3.0),
        StateKey(0, 2, "exp_avg"): torch.arange(5.0),
        StateKey(4, 5, "exp_avg"): torch.ones(1, dtype=torch.bfloat16),
        StateKey(4, 5, "mu_product"): torch.tensor(0.5),
    }

    files = list(encode_state(state))

    found: dict[StateKey, torch.Tensor] = {}
    for each in files:
        found.update(decode_state(each))
    assert len(files) == 2
    assert found.keys() == state.keys()
    for key, value in state.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value)


def test_thousands_of_histories_take_several_small_files() -> None:
    state = {
        StateKey(place, place + 1, "exp_avg"): torch.full((3,), float(place))
        for place in range(20_000)
    }

    files = list(encode_state(state))

    assert max(map(len, files)) < MESSAGE_BYTES_MAX // 2
    assert len(files) == 3
    found = {key: value for each in files for key, value in decode_state(each).items()}
    assert found.keys() == state.keys()
    assert all(float(value[0]) == key.first for key, value in found.items())


def test_no_state_is_no_file() -> None:
    assert list(encode_state({})) == []


@pytest.mark.parametrize("data", [b"", b"\x80\x04K\x01.", b"\0" * 8, b"\xff" * 99])
def test_other_bytes_are_refused_in_words(data: bytes) -> None:
    with refused(ErrorReason.MALFORMED_MESSAGE, "can't be read"):
        decode_state(data)
