import pytest
import torch.distributed as dist

from psworker.backends.local import alone_text
from psworker.connecting import find_worker_id
from psworker.launch.launch_plan import LaunchPlan
from psworker.launch.torchrun import (
    TorchrunProcess,
    count_text,
    find_torchrun,
    rank_text,
)
from tests.doubles.free_addresses import free_address

STARTED = {"TORCHELASTIC_RUN_ID": "none"}
LEFT_OVER = {"RANK": "0", "WORLD_SIZE": "4"}


def test_the_place_in_a_group_is_read() -> None:
    variables = {**STARTED, "RANK": "3", "WORLD_SIZE": "4"}
    assert find_torchrun(variables) == TorchrunProcess(rank=3, process_count=4)
    assert rank_text(variables).startswith("this process is one of a group by RANK=3")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        STARTED,
        {**STARTED, "RANK": "3"},
        {**STARTED, "RANK": "", "WORLD_SIZE": "4"},
        LEFT_OVER,
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_other_processes_are_in_no_group(variables: dict[str, str]) -> None:
    assert find_torchrun(variables) is None
    assert find_worker_id(None, variables) == ""


def test_processes_of_a_group_have_ids_of_their_own() -> None:
    ranks = [{**STARTED, "RANK": rank, "WORLD_SIZE": "2"} for rank in "01"]
    assert [find_worker_id(None, each) for each in ranks] == ["r0", "r1"]
    named = [{**each, "PS_WORKER_ID": "box"} for each in ranks]
    assert [find_worker_id(None, each) for each in named] == ["box-r0", "box-r1"]
    assert find_worker_id("mine", named[1]) == "mine"
    # Several groups of one each would all be rank 0.
    alone = {**STARTED, "RANK": "0", "WORLD_SIZE": "1"}
    assert find_worker_id(None, alone) == ""
    assert rank_text(alone) == ""


def test_what_is_left_in_a_shell_is_named_and_does_not_count() -> None:
    named = {**LEFT_OVER, "PS_WORKER_ID": "box"}
    assert find_worker_id(None, named) == "box"
    assert "RANK=0 and WORLD_SIZE=4 are in the environment and do not count" in (
        rank_text(named)
    )
    assert rank_text({"PATH": ""}) == ""


def test_variables_count_where_torch_has_made_a_group_by_them() -> None:
    address = free_address()
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=0, world_size=1
    )
    try:
        assert find_torchrun({"RANK": "0", "WORLD_SIZE": "1"}) is not None
        assert find_torchrun(LEFT_OVER) is None
    finally:
        dist.destroy_process_group()


def test_a_process_of_psworker_run_was_not_started_by_the_torchrun_around_it() -> None:
    plan = LaunchPlan(command=("train.py",), coordinator="h:1", process_count=2)
    around = {**STARTED, **LEFT_OVER}
    for index in range(2):
        environment = plan.environment(index, around)
        assert find_torchrun(environment) is None
        assert environment["RANK"] == "0"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8"),
        ({"WORLD_SIZE": "1"}, ""),
        ({"WORLD_SIZE": "many"}, ""),
        ({"SLURM_NTASKS": "8"}, ""),  # of the allocation, not of what runs in it
        ({}, ""),
    ],
)
def test_a_variable_that_tells_of_several_processes_is_found(
    variables: dict[str, str], text: str
) -> None:
    assert count_text(variables) == text


def test_without_a_coordinator_several_processes_are_several_trainings() -> None:
    assert "each of them trains a model of its own" in alone_text(None, "WORLD_SIZE=4")
    assert "each of" not in alone_text(None, "")
