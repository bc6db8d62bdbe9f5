"""Environments, devices and delays of `psworker run`."""

from dataclasses import replace
from pathlib import Path

import pytest

from psworker.launch.launch_plan import (
    DeviceError,
    LaunchPlan,
    devices_of_choice,
    restart_delay_s,
    visible_cuda_devices,
)
from psworker.launch.launched import HostPlace, find_host_place


def test_processes_get_one_cuda_device_each_and_share_when_there_are_too_few() -> None:
    plan = LaunchPlan(
        command=("t.py",), coordinator="a:1", process_count=3, devices=("2", "5")
    )
    handed = [plan.environment(i, {})["CUDA_VISIBLE_DEVICES"] for i in range(3)]
    assert handed == ["2", "5", "2"]
    alone = LaunchPlan(command=("t.py",), coordinator="a:1", devices=("2", "5"))
    assert alone.environment(0, {})["CUDA_VISIBLE_DEVICES"] == "2,5"
    untouched = LaunchPlan(command=("t.py",), coordinator="a:1", process_count=2)
    assert "CUDA_VISIBLE_DEVICES" not in untouched.environment(0, {})


def test_several_processes_share_the_cores_unless_told_otherwise() -> None:
    several = LaunchPlan(command=("t.py",), coordinator="a:1", process_count=1_000)
    assert several.environment(0, {})["OMP_NUM_THREADS"] == "1"
    told = several.environment(0, {"OMP_NUM_THREADS": "8"})
    assert told["OMP_NUM_THREADS"] == "8"
    alone = LaunchPlan(command=("t.py",), coordinator="a:1")
    assert "OMP_NUM_THREADS" not in alone.environment(0, {})


def test_devices_are_those_the_environment_names_or_the_machine_has(
    tmp_path: Path,
) -> None:
    for name in ("nvidia3", "nvidia7", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_cuda_devices({}, tmp_path) == ("0", "1")
    assert visible_cuda_devices({"CUDA_VISIBLE_DEVICES": "4, 6"}, tmp_path) == (
        "4",
        "6",
    )
    assert visible_cuda_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


def test_every_process_is_told_where_its_history_goes() -> None:
    plan = LaunchPlan(command=("t.py",), coordinator="a:1", history="runs/")
    assert plan.environment(0, {"PS_HISTORY": "old"})["PS_HISTORY"] == "runs/"
    silent = LaunchPlan(command=("t.py",), coordinator="a:1")
    assert silent.environment(0, {"PS_HISTORY": "old"})["PS_HISTORY"] == "old"


def test_a_process_has_the_same_place_after_each_of_its_starts() -> None:
    plan = LaunchPlan(
        command=("t.py",), coordinator="a:1", process_count=2, worker_id="box"
    )
    places = [
        (found["PS_WORKER_ID"], found["PS_LOCAL_RANK"], found["PS_COORDINATOR"])
        for found in (plan.environment(index, {}) for index in (0, 1, 1))
    ]
    assert places == [
        ("box-0", "0", "a:1"),
        ("box-1", "1", "a:1"),
        ("box-1", "1", "a:1"),
    ]


def test_delays_double_up_to_half_a_minute() -> None:
    assert [restart_delay_s(count) for count in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert restart_delay_s(1_000_000) == 30


@pytest.fixture
def two_gpus(tmp_path: Path) -> Path:
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("choice", "process_count", "visible", "devices"),
    [
        ("auto", 2, None, ("0", "1")),
        ("auto", 2, "1", ("1",)),
        ("auto", 1, None, None),
        ("auto", 2, "", None),
        ("none", 2, "1", ()),
        ("none", 1, None, ()),
        ("1, 0", 2, None, ("1", "0")),
        ("6", 1, "4,6", ("6",)),
    ],
)
def test_gpus_are_those_chosen_among_those_allowed(
    choice: str,
    process_count: int,
    visible: str | None,
    devices: tuple[str, ...] | None,
    two_gpus: Path,
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = devices_of_choice(
        choice,
        process_count=process_count,
        environment=environment,
        device_folder=two_gpus,
    )
    assert found == devices
    plan = LaunchPlan(
        command=("t.py",),
        coordinator="a:1",
        process_count=process_count,
        devices=found,
    )
    if choice == "none":
        assert plan.environment(0, environment)["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("choice", "visible", "says"),
    [
        ("0,,1", None, "'0,,1' is no list of GPUs: give auto, none, or names"),
        ("0,0", None, "no list of GPUs"),
        ("0", "4,6", "CUDA_VISIBLE_DEVICES=4,6 hides GPU 0: name those that it has"),
    ],
)
def test_gpus_that_can_not_be_had_are_refused(
    choice: str, visible: str | None, says: str, two_gpus: Path
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(DeviceError, match=says):
        devices_of_choice(
            choice, process_count=2, environment=environment, device_folder=two_gpus
        )


@pytest.mark.parametrize(
    ("choice", "count", "says"),
    [
        ("7", 0, "this machine has no GPU, so none is named '7': leave --gpus out"),
        ("nan", 0, "so none is named 'nan'"),
        ("0,7", 2, "no GPU of this machine is named '7': it has 0, 1$"),
        ("-1", 2, "no GPU of this machine is named '-1'"),
        ("a,\n", 2, r"no list of GPUs"),
        ("\x1b[31m", 2, r"is named '\\x1b\[31m'"),
    ],
)
def test_a_gpu_that_there_is_not_is_refused_with_those_that_there_are(
    choice: str, count: int, says: str, tmp_path: Path
) -> None:
    for number in range(count):
        (tmp_path / f"nvidia{number}").touch()
    with pytest.raises(DeviceError, match=says) as caught:
        devices_of_choice(
            choice, process_count=1, environment={}, device_folder=tmp_path
        )
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("other", ["dxg", "kfd", "nvhost-ctrl-gpu", "nvgpu"])
def test_where_gpus_have_no_files_any_may_be_named(other: str, tmp_path: Path) -> None:
    (tmp_path / other).touch()
    found = devices_of_choice(
        "7", process_count=1, environment={}, device_folder=tmp_path
    )
    assert found == ("7",)


def test_a_name_that_only_the_driver_knows_is_handed_on(two_gpus: Path) -> None:
    found = devices_of_choice(
        "GPU-8a0c,1", process_count=2, environment={}, device_folder=two_gpus
    )
    assert found == ("GPU-8a0c", "1")


def test_processes_of_a_host_group_have_one_worker_id_and_a_name() -> None:
    plan = LaunchPlan(
        command=("t.py",),
        coordinator="a:1",
        process_count=2,
        worker_id="box",
        host_group="here",
    )
    environment = plan.environment(1, {})
    found = find_host_place(environment)
    assert found == HostPlace("here", 1, 2)
    assert environment["PS_WORKER_ID"] == "box"
    plain = replace(plan, host_group="").environment(1, {"PS_HOST_GROUP": "outer"})
    assert find_host_place(plain) is None
    assert plain["PS_WORKER_ID"] == "box-1"
