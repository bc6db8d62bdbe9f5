import pytest

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
