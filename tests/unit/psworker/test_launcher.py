"""`psworker run` with real processes: scripts of a few lines, a port of our own."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from psworker.launcher import LaunchPlan, visible_cuda_devices


@pytest.fixture
def coordinator() -> Iterator[str]:
    """Address of something that listens, which is all the launcher looks for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PS_")}
    return subprocess.Popen(
        [sys.executable, "-m", "psworker", "run", *arguments],
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    with start(*arguments, **environment) as process:
        output, errors = process.communicate(timeout=30)
        return process.returncode, output, errors


def test_script_gets_its_arguments_and_the_coordinator(
    tmp_path: Path, coordinator: str
) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        print(sys.executable, sys.argv[1:], os.environ["PS_COORDINATOR"])
        print(os.environ.get("PS_WORKER_ID"), file=sys.stderr)
        """,
    )
    code, output, errors = run(
        "--coordinator", coordinator, "--", path, "--epochs", "3"
    )
    assert (code, errors) == (0, "None\n")
    assert output == f"{sys.executable} ['--epochs', '3'] {coordinator}\n"


def test_coordinator_and_worker_id_come_from_the_environment_too(
    tmp_path: Path, coordinator: str
) -> None:
    path = script(tmp_path, "import os; print(os.environ['PS_WORKER_ID'])")
    code, output, _ = run(path, PS_COORDINATOR=coordinator, PS_WORKER_ID="left")
    assert (code, output) == (0, "left\n")


def test_a_module_runs_as_with_python(coordinator: str) -> None:
    code, output, _ = run("--coordinator", coordinator, "--", "-m", "this")
    assert code == 0
    assert "Beautiful is better than ugly." in output


def test_several_processes_have_ids_and_tagged_lines(
    tmp_path: Path, coordinator: str
) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        print("out", os.environ["PS_WORKER_ID"])
        print("err", file=sys.stderr)
        sys.stdout.write("no end of line")
        """,
    )
    code, output, errors = run(
        "--coordinator", coordinator, "--nproc", "2", "--worker-id", "box", "--", path
    )
    assert code == 0
    assert sorted(output.splitlines()) == [
        "[w0] no end of line",
        "[w0] out box-0",
        "[w1] no end of line",
        "[w1] out box-1",
    ]
    assert sorted(errors.splitlines()) == ["[w0] err", "[w1] err"]


def test_exit_code_is_that_of_the_process_that_failed(
    tmp_path: Path, coordinator: str
) -> None:
    path = script(
        tmp_path,
        """
        import os
        raise SystemExit(7 if os.environ["PS_WORKER_ID"] == "x-1" else 0)
        """,
    )
    code, _, errors = run(
        "--coordinator", coordinator, "--nproc", "3", "--worker-id", "x", "--", path
    )
    assert code == 7
    assert (
        "psworker: process 1 (worker x-1) ended with exit code 7, "
        "not started again since --max-restarts is 0\n"
    ) in errors


def test_a_process_ended_by_a_signal_counts_as_128_and_its_number(
    tmp_path: Path, coordinator: str
) -> None:
    path = script(tmp_path, "import os; os.kill(os.getpid(), 9)")
    code, _, errors = run("--coordinator", coordinator, "--", path)
    assert code == 137
    assert "process 0 ended with exit code 137 (SIGKILL), not started" in errors


def test_a_failed_process_starts_again_as_often_as_allowed(
    tmp_path: Path, coordinator: str
) -> None:
    path = script(
        tmp_path,
        """
        import pathlib
        starts = pathlib.Path(__file__).with_name("starts")
        count = len(starts.read_text()) if starts.exists() else 0
        starts.write_text("x" * (count + 1))
        raise SystemExit(5 if count == 0 else 0)
        """,
    )
    refused = run("--coordinator", coordinator, "--", path)
    assert refused[0] == 5
    (tmp_path / "starts").unlink()
    code, _, errors = run("--coordinator", coordinator, "--max-restarts", "1", path)
    assert code == 0
    assert "restarts used: 0 of 1" in errors
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_first_signal_is_passed_on_and_the_exit_code_is_the_scripts(
    tmp_path: Path, coordinator: str
) -> None:
    path = script(
        tmp_path,
        """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("ready", flush=True)
        signal.pause()
        """,
    )
    with start("--coordinator", coordinator, "--max-restarts", "3", path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


def test_a_second_signal_kills_what_the_first_did_not_end(
    tmp_path: Path, coordinator: str
) -> None:
    path = script(
        tmp_path,
        """
        import signal
        signal.signal(signal.SIGINT, lambda *_: print("heard", flush=True))
        print("ready", flush=True)
        while True:
            signal.pause()
        """,
    )
    with start("--coordinator", coordinator, "--nproc", "2", path) as process:
        assert process.stdout is not None
        heard = [process.stdout.readline() for _ in range(2)]
        assert sorted(heard) == ["[w0] ready\n", "[w1] ready\n"]
        process.send_signal(signal.SIGINT)
        heard = [process.stdout.readline() for _ in range(2)]
        assert sorted(heard) == ["[w0] heard\n", "[w1] heard\n"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 137


def test_it_waits_for_a_coordinator_that_is_late(tmp_path: Path) -> None:
    address = free_address()
    path = script(tmp_path, "print('started')")
    with start("--coordinator", address, path) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == (
            f"psworker: waiting for the coordinator at {address}: "
            "connection refused (nothing listens there yet)\n"
        )
        host, _, port = address.rpartition(":")
        with socket.create_server((host, int(port))):
            output, errors = process.communicate(timeout=10)
    assert output == "started\n"
    assert errors == f"psworker: the coordinator at {address} is there\n"


def test_it_gives_up_after_the_connect_timeout(tmp_path: Path) -> None:
    address = free_address()
    path = script(tmp_path, "print('started')")
    code, output, errors = run("--coordinator", address, "--connect-timeout", "0", path)
    assert (code, output) == (69, "")
    assert f"`psserver coordinator --listen {address} ...`" in errors


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    path = script(tmp_path, "print('started')")
    with start("--coordinator", free_address(), path) as process:
        assert process.stderr is not None
        assert "waiting" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
    assert (process.returncode, output) == (143, "")


def test_a_host_that_has_no_address_fails_at_once(tmp_path: Path) -> None:
    path = script(tmp_path, "print('started')")
    code, _, errors = run("--coordinator", "no-such-host.invalid:7070", path)
    assert code == 69
    assert "'no-such-host.invalid' does not resolve" in errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--coordinator", "localhost", "--", "-m", "this"], "expected HOST:PORT"),
        (["--coordinator", "localhost:0", "--", "-m", "this"], "port 0"),
        (["--coordinator", "localhost:1", "missing.py"], "no script 'missing.py'"),
        (["--coordinator", "localhost:1", "--", "-m"], "name of a module"),
        (["--", "-m", "this"], "PS_COORDINATOR"),
        (
            ["--coordinator=a:1", "--nproc=2", "--history=h", "--", "-m", "this"],
            "h is one file, and 2 workers need one each",
        ),
    ],
)
def test_a_wrong_command_line_says_so_before_it_waits(
    arguments: list[str], says: str
) -> None:
    code, _, errors = run(*arguments)
    assert code == 2
    assert says in errors


@pytest.mark.parametrize("coordinator_option", [(), ("--coordinator", "localhost:1")])
def test_a_failpoint_that_there_is_not_is_refused_at_once(
    coordinator_option: tuple[str, ...],
) -> None:
    code, _, errors = run(
        *coordinator_option, "--", "-m", "this", PS_FAILPOINT="worker.foo=kill"
    )
    assert code == 78
    assert "there is no failpoint 'worker.foo'; places are worker.joined," in errors


def test_processes_get_one_cuda_device_each_and_share_when_there_are_too_few() -> None:
    plan = LaunchPlan(
        command=("t.py",), coordinator="a:1", process_count=3, devices=("2", "5")
    )
    handed = [plan.environment(i, {})["CUDA_VISIBLE_DEVICES"] for i in range(3)]
    assert handed == ["2", "5", "2"]
    alone = LaunchPlan(command=("t.py",), coordinator="a:1", devices=("2", "5"))
    assert "CUDA_VISIBLE_DEVICES" not in alone.environment(0, {})


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
