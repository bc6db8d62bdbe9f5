"""`psworker run` with real processes: scripts of a few lines, a port of our own."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Thread

import pytest

from pswire.end_signals import SAME_WISH_S, EndWish
from psworker.launch import launcher
from psworker.launch.launch_plan import LaunchPlan
from psworker.launch.launcher import Launcher
from tests.doubles.child_process import killed_at_end
from tests.doubles.free_addresses import free_address


@pytest.fixture
def coordinator() -> Iterator[str]:
    """Address of something that listens, which is all the launcher looks for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def unconnected(path: str) -> str:
    return (
        f"psworker: process 0: {path} ended without ever connecting, so the job has "
        "nothing of it: call psworker.connect() and prepare() in it\n"
    )


def start(
    *arguments: str, program: Sequence[str] = ("-m", "psworker"), **environment: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PS_")}
    return killed_at_end(
        subprocess.Popen(
            [sys.executable, *program, "run", *arguments],
            env=inherited | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    with start(*arguments, **environment) as process:
        output, errors = process.communicate(timeout=90)
        return process.returncode, output, errors


def wait_until(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


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
    assert (code, errors) == (0, f"None\n{unconnected(path)}")
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
        "[p0] no end of line",
        "[p0] out box-0",
        "[p1] no end of line",
        "[p1] out box-1",
    ]
    lines = [line for line in errors.splitlines() if "ever connecting" not in line]
    assert sorted(lines) == ["[p0] err", "[p1] err"]


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
    assert "exit code 5, starts again in 1 s, restarts used: 0 of 1" in errors
    assert (tmp_path / "starts").read_text() == "xx"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_first_signal_is_passed_on_and_the_exit_code_is_the_scripts(
    tmp_path: Path, coordinator: str, number: signal.Signals
) -> None:
    path = script(
        tmp_path,
        f"""
        import signal, sys
        signal.signal({int(number)}, lambda *_: sys.exit(0))
        print("ready", flush=True)
        signal.pause()
        """,
    )
    with start("--coordinator", coordinator, "--max-restarts", "3", path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == 0


def test_a_second_signal_kills_what_the_first_did_not_end(
    tmp_path: Path, coordinator: str
) -> None:
    path = script(
        tmp_path,
        """
        import os, signal
        # By the system's own call: a signal may come while one is under way.
        signal.signal(signal.SIGINT, lambda *_: os.write(1, b"heard\\n"))
        os.write(1, b"ready\\n")
        while True:
            signal.pause()
        """,
    )
    with start("--coordinator", coordinator, "--nproc", "2", path) as process:
        assert process.stdout is not None
        heard = [process.stdout.readline() for _ in range(2)]
        assert sorted(heard) == ["[p0] ready\n", "[p1] ready\n"]
        process.send_signal(signal.SIGINT)
        heard = [process.stdout.readline() for _ in range(2)]
        assert sorted(heard) == ["[p0] heard\n", "[p1] heard\n"]
        time.sleep(SAME_WISH_S)  # one that comes sooner is the first
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 137


PATIENT = """
from pswire import end_signals
end_signals.SAME_WISH_S = 600.0
from psworker.__main__ import main
main()
"""
"""The launcher, for which signals that a busy machine brings late came at once."""


def test_a_signal_that_comes_twice_at_once_kills_nobody(
    tmp_path: Path, coordinator: str
) -> None:
    """As `timeout` sends it: to the launcher, and to the group that it is in."""
    path = script(
        tmp_path,
        """
        import os, signal, sys
        def end(*_):
            os.write(1, b"ends\\n")
            sys.exit(5)
        signal.signal(signal.SIGTERM, end)
        os.write(1, b"ready\\n")
        while True:
            signal.pause()
        """,
    )
    arguments = ("--coordinator", coordinator, "--nproc", "2", path)
    with start(*arguments, program=("-c", PATIENT)) as process:
        assert process.stdout is not None
        heard = [process.stdout.readline() for _ in range(2)]
        assert sorted(heard) == ["[p0] ready\n", "[p1] ready\n"]
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert sorted(output.splitlines()) == ["[p0] ends", "[p1] ends"]
    assert process.returncode == 5
    assert errors.count("SIGTERM: stopping") == 1
    assert "killed" not in errors


@pytest.mark.parametrize(("later_s", "is_killed"), [(0.1, False), (1.0, True)])
def test_what_a_second_signal_is_follows_from_when_it_comes(
    tmp_path: Path, later_s: float, is_killed: bool
) -> None:
    clock = [100.0]
    said: list[str] = []
    path = script(
        tmp_path,
        """
        import pathlib, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: folder.joinpath("heard").touch())
        folder = pathlib.Path(__file__).parent
        folder.joinpath("ready").touch()
        while not folder.joinpath("end").exists():
            signal.sigtimedwait([], 0.01)
        """,
    )
    plan = LaunchPlan(command=(path,), coordinator="127.0.0.1:1")
    launched = Launcher(plan, log=said.append, wish=EndWish(lambda: clock[0]))
    codes: list[int] = []
    running = Thread(target=lambda: codes.append(launched.run()))
    running.start()
    wait_until(tmp_path.joinpath("ready").exists)
    launched.stop(signal.SIGTERM)
    wait_until(tmp_path.joinpath("heard").exists)
    clock[0] += later_s
    launched.stop(signal.SIGTERM)
    if not is_killed:
        tmp_path.joinpath("end").touch()
    running.join(60)
    assert codes == [137 if is_killed else 0]
    assert ("killed" in said) == is_killed


def test_it_waits_for_a_coordinator_that_is_late(tmp_path: Path) -> None:
    address = str(free_address())
    path = script(tmp_path, "print('started')")
    with start("--coordinator", address, path) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said.startswith(
            f"psworker: waiting for the coordinator at {address}: "
            "connection refused (nothing listens there yet); "
        )
        assert said.endswith(" s so far, at most 300 s\n")
        host, _, port = address.rpartition(":")
        with socket.create_server((host, int(port))):
            output, errors = process.communicate(timeout=60)
    assert output == "started\n"
    # After further lines of waiting, where the machine is slow.
    assert errors.endswith(
        f"psworker: the coordinator at {address} is there\n{unconnected(path)}"
    )


def test_it_gives_up_after_the_connect_timeout(tmp_path: Path) -> None:
    address = str(free_address())
    path = script(tmp_path, "print('started')")
    code, output, errors = run("--coordinator", address, "--connect-timeout", "0", path)
    assert (code, output) == (69, "")
    assert f"`psserver coordinator --listen {address} ...`" in errors


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    path = script(tmp_path, "print('started')")
    with start("--coordinator", str(free_address()), path) as process:
        assert process.stderr is not None
        assert "waiting" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
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
        (["--", "-m", "this"], "no coordinator is named: give --coordinator"),
        (["--coordinator=a:1", "--", "python3", "t.py"], "leave 'python3' out"),
        (["--coordinator=a:1", "--gpus=0,0", "--", "-m", "this"], "no list of GPUs"),
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


def test_the_loss_of_a_shard_ends_a_process_for_good(
    tmp_path: Path, coordinator: str
) -> None:
    """Its exit code is passed on, and no restart is wasted on it."""
    path = script(
        tmp_path,
        """
        import psworker
        from psworker.launch.launched import note_connected, note_started
        note_started()  # as connect() does
        note_connected()
        raise psworker.ShardLostError("shard 1 was lost")
        """,
    )
    code, _, errors = run("--coordinator", coordinator, "--max-restarts", "2", path)
    assert code == 69
    assert "shard 1 was lost" in errors
    assert (
        "ended with exit code 69, not started again: a process of the job that it "
        "needs is lost\n"
    ) in errors
    assert errors.count("Traceback") == 1
    assert "ever connecting" not in errors


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        ('psworker.SchemaMismatchError("another\\nmodel")', 78),
        ('psworker.VersionMismatchError("another\\nmodel")', 76),
        ("SystemExit(78)", 78),
    ],
)
def test_who_is_refused_for_good_ends_all(
    tmp_path: Path, coordinator: str, refusal: str, code: int
) -> None:
    path = script(
        tmp_path,
        f"""
        import os, time
        import psworker
        from psworker.launch.launched import note_started
        note_started()  # as connect() does
        if os.environ["PS_WORKER_ID"] == "x-1":
            raise {refusal}
        time.sleep(60)
        """,
    )
    arguments = ("--nproc", "2", "--worker-id", "x", "--max-restarts", "3", "--", path)
    ended, _, errors = run("--coordinator", coordinator, *arguments)
    assert ended == code
    why = ": another\nmodel" if "model" in refusal else ""
    assert (
        f"psworker: process 1 (worker x-1) was refused with exit code {code}, which a "
        f"new start would not mend, and the other processes are ended{why}\n"
    ) in errors
    assert "starts again" not in errors


def test_of_one_process_alone_a_refusal_says_no_more_than_it_did(
    tmp_path: Path, coordinator: str
) -> None:
    refused = 'import psworker; psworker.connect("nothing")'
    code, _, errors = run("--coordinator", coordinator, "--", script(tmp_path, refused))
    assert code == 78
    assert "process 0 was refused with exit code 78, which a new start would not" in (
        errors
    )
    assert "other processes" not in errors
    assert errors.count("'nothing'") == 1, "said by the traceback, and not again"


def test_an_error_that_may_pass_ends_nobody_else(
    tmp_path: Path, coordinator: str
) -> None:
    path = script(
        tmp_path,
        """
        import os, time
        import psworker
        from psworker.launch.launched import note_started
        note_started()
        if os.environ["PS_WORKER_ID"] == "x-1":
            raise psworker.ConnectError("nobody answers")
        time.sleep(1)
        print("done")
        """,
    )
    arguments = ("--nproc", "2", "--worker-id", "x", "--", path)
    code, output, errors = run("--coordinator", coordinator, *arguments)
    assert (code, output) == (1, "[p0] done\n")
    assert "refused" not in errors


def test_who_does_not_end_when_another_was_refused_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "END_TIMEOUT_S", 0.2)
    path = script(
        tmp_path,
        """
        import os, pathlib, signal, sys, time
        ready = pathlib.Path(__file__).with_name("ready")
        if os.environ["PS_LOCAL_RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready.touch()
            time.sleep(60)
        while not ready.exists():
            time.sleep(0.01)
        sys.exit(76)
        """,
    )
    said: list[str] = []
    plan = LaunchPlan(command=(path,), coordinator="127.0.0.1:1", process_count=2)
    assert Launcher(plan, log=said.append).run() == 76
    assert [line.split(" which")[0] for line in said] == [
        "process 1 was refused with exit code 76,"
    ]


def test_outside_of_a_launch_an_uncaught_error_ends_a_process_as_ever() -> None:
    program = """
import psworker
from psworker.launch.launched import note_connected, note_started
note_started()
note_connected()
raise psworker.ShardLostError("shard 1 was lost")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "ShardLostError: shard 1 was lost" in done.stderr


def test_processes_of_a_launcher_that_is_killed_are_ended(
    tmp_path: Path, coordinator: str
) -> None:
    path = script(
        tmp_path,
        """
        import os, signal, sys

        def end(number, frame):
            os.write(1, b"ended by SIGTERM\\n")
            sys.exit(0)

        signal.signal(signal.SIGTERM, end)
        signal.alarm(60)  # where nobody ends it
        os.write(1, b"here\\n")
        while True:
            signal.pause()
        """,
    )
    with start("--coordinator", coordinator, "--", path) as launched:
        assert launched.stdout is not None
        assert launched.stdout.readline() == "here\n"
        launched.kill()
        assert launched.stdout.read() == "ended by SIGTERM\n"
