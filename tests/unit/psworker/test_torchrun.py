import pytest

from psworker.config import find_worker_id
from psworker.torchrun import TorchrunProcess, find_torchrun


def test_the_place_in_a_group_is_read() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert find_torchrun(variables) == TorchrunProcess(
        rank=3, process_count=4, restart_count=2
    )


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "3"}, {"RANK": "", "WORLD_SIZE": "4"}]
)
def test_other_processes_are_in_no_group(variables: dict[str, str]) -> None:
    assert find_torchrun(variables) is None


def test_processes_of_a_group_have_ids_of_their_own() -> None:
    ranks = [{"RANK": rank, "WORLD_SIZE": "2"} for rank in "01"]
    assert [find_worker_id(None, each) for each in ranks] == ["r0", "r1"]
    named = [{**each, "PS_WORKER_ID": "box"} for each in ranks]
    assert [find_worker_id(None, each) for each in named] == ["box-r0", "box-r1"]
    assert find_worker_id("mine", named[1]) == "mine"
    # Several groups of one each would all be rank 0.
    assert find_worker_id(None, {"RANK": "0", "WORLD_SIZE": "1"}) == ""
