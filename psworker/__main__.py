"""The `psworker` command: starts training processes as workers of a job."""

import logging
import os
import re
import secrets
import socket
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, ClassVar, Final

import typer

from pswire.addresses import Address
from pswire.channels import check_credentials
from pswire.config_options import ConfiguredGroup
from pswire.exit_codes import ExitCode
from pswire.failpoints import FAILPOINT_VARIABLE, FailpointError, parse_failpoints
from pswire.history import is_for_many
from pswire.limits import WAIT_S_MAX
from pswire.logs import LOG_DIR_VARIABLE, LogFolderError, file_handler, know
from pswire.names import worker_id_problem
from pswire.number_range import NumberRange
from pswire.options import (
    VersionOption,
    number_option,
    peer_address,
    takes_credentials,
    takes_log_options,
)
from pswire.security.credentials import CredentialsError
from psworker.config import CONNECT_KEYS
from psworker.errors import ConnectError
from psworker.launch.cores import core_share, sharing_text
from psworker.launch.launch_plan import DeviceError, LaunchPlan, devices_of_choice
from psworker.launch.launched import PROCESS_COUNT_MAX, log_name
from psworker.launch.launcher import Launcher
from psworker.launch.reachability import wait_reachable
from psworker.status_row import StatusRow, asking, has_row


class Commands(ConfiguredGroup):
    """The one command, and what scripts read of its section of the job's file."""

    sections: ClassVar = {"run": ("job", "worker")}
    more_keys: ClassVar = {"worker": CONNECT_KEYS}


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_PROCESS_COUNT: Final = NumberRange(1, 1024, why="one machine has no cores for more")
_RESTART_LIMIT: Final = NumberRange(0, 1_000_000)
_CONNECT_TIMEOUT_S: Final = NumberRange(0.0, WAIT_S_MAX, unit="seconds")


_logger: Final = logging.getLogger("psworker.run")


def _log(text: str) -> None:
    typer.echo(f"psworker: {text}", err=True)
    _logger.warning("%s", text)


def _keep_log() -> None:
    """Has a file keep what is said on stderr, if there is a folder for it.

    Raises:
        LogFolderError: It can't be written.
    """
    _logger.propagate = False
    _logger.handlers = [logging.NullHandler()]
    if folder := os.environ.get(LOG_DIR_VARIABLE):
        _logger.handlers = [file_handler(Path(folder), log_name("run"))]
        know(role="run")


def _checked_command(command: list[str]) -> tuple[str, ...]:
    """Python's arguments, refused early rather than after the wait."""
    script = Path(command[0])
    if re.fullmatch(r"python[0-9.]*", script.name):
        raise typer.BadParameter(
            f"leave {command[0]!r} out: the script runs with this Python"
        )
    if command[0] != "-m" and not script.exists():
        raise typer.BadParameter(f"there is no script {command[0]!r}")
    if command == ["-m"]:
        raise typer.BadParameter("-m wants the name of a module")
    return tuple(command)


def _checked_history(history: str, process_count: int) -> str:
    """One file is for one process."""
    if history and process_count > 1 and not is_for_many(history):
        raise typer.BadParameter(
            f"{history} is one file, and {process_count} workers need one each: give a "
            "folder that ends with a slash",
            param_hint="--history",
        )
    return history


def _checked_group(process_count: int) -> str:
    if process_count > PROCESS_COUNT_MAX:
        raise typer.BadParameter(
            f"--one-push-per-host makes one worker of at most {PROCESS_COUNT_MAX} "
            f"processes, not {process_count}: give fewer, or leave it out",
            param_hint="--nproc",
        )
    # Other users of the machine could take the addresses of a name that they guess.
    return secrets.token_hex(16)


def _check_worker_ids(plan: LaunchPlan) -> None:
    """The coordinator would refuse them, but only after the wait for it."""
    given = plan.worker_id
    if given is None:
        return
    longest = plan.worker_id_of(plan.process_count - 1) or ""
    for each in (given, longest):
        if problem := worker_id_problem(each):
            raise typer.BadParameter(
                f"the worker id {each[:32]!r} {problem}: give another one",
                param_hint="--worker-id",
            )


def _named_coordinator(coordinator: Address | None) -> Address:
    if coordinator is None:
        raise typer.BadParameter(
            "no coordinator is named: give --coordinator HOST:PORT or set "
            "PS_COORDINATOR; without a job, run the script with python itself",
            param_hint="--coordinator",
        )
    return coordinator


def _devices(choice: str, process_count: int) -> tuple[str, ...] | None:
    try:
        devices = devices_of_choice(
            choice, process_count=process_count, environment=os.environ
        )
    except DeviceError as error:
        raise typer.BadParameter(str(error), param_hint="--gpus") from error
    if devices and process_count > len(devices):
        _log(f"{process_count} processes share {len(devices)} GPU: {','.join(devices)}")
    return devices


def _lasting_id() -> str:
    """An id that nobody else has, for processes that keep theirs over restarts."""
    return f"{socket.gethostname()}-{os.getpid()}"


@app.callback()
def psworker(
    version: VersionOption = False,
) -> None:
    """Runs training scripts as workers of a paramserver job."""
    # Before the options of a command are read: a script would refuse it as well, but
    # only after the wait for the coordinator.
    try:
        parse_failpoints(os.environ.get(FAILPOINT_VARIABLE, ""))
    except FailpointError as error:
        _log(str(error))
        raise typer.Exit(ExitCode.BAD_CONFIGURATION) from error


@app.command(context_settings={"allow_interspersed_args": False})
@takes_credentials
@takes_log_options
def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- SCRIPT [ARGS]...",
            help="A Python script, or -m and a module, with its arguments.",
        ),
    ],
    *,
    coordinator: Annotated[
        Address | None,
        typer.Option(
            parser=peer_address, metavar="HOST:PORT", help="The job's coordinator."
        ),
    ] = None,
    nproc: Annotated[
        int,
        number_option(
            allowed=_PROCESS_COUNT,
            metavar="N",
            help="Processes to start on this machine.",
        ),
    ] = 1,
    max_restarts: Annotated[
        int,
        number_option(
            allowed=_RESTART_LIMIT,
            metavar="N",
            help="How often each process that failed starts again: after 1 s, then "
            "after twice as long each time, at most 30 s.",
        ),
    ] = 0,
    one_push_per_host: Annotated[
        bool,
        typer.Option(
            "--one-push-per-host",
            help="Make the processes one worker of the job: they add up their "
            "gradients in shared memory, and one of them pushes the mean.",
        ),
    ] = False,
    gpus: Annotated[
        str,
        typer.Option(
            metavar="auto|none|LIST",
            help="GPUs to use, one in each process. auto takes those of "
            "CUDA_VISIBLE_DEVICES, else all of the machine; a single process then "
            "keeps all.",
        ),
    ] = "auto",
    worker_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Stable id of the worker; with several processes ID-0, ID-1, ..., "
            "unless they push as one. "
            "By default the coordinator assigns ids; with restarts (--max-restarts) "
            "they are made of this host's name, so that a process that starts again "
            "keeps its own.",
        ),
    ] = None,
    history: Annotated[
        str,
        typer.Option(
            metavar="FILE|FOLDER/",
            help="Where to write histories, see docs/history.md.",
        ),
    ] = "",
    progress: Annotated[
        bool,
        typer.Option(
            "--progress/--no-progress",
            help="On a terminal, show how far the job is in its last row.",
        ),
    ] = True,
    connect_timeout: Annotated[
        float,
        number_option(
            allowed=_CONNECT_TIMEOUT_S,
            metavar="SECONDS",
            help="How long to wait for the coordinator.",
        ),
    ] = 300.0,
) -> None:
    """Waits for the coordinator, then runs a script.

    Example: psworker run --coordinator localhost:7070 --nproc 2 -- train.py --epochs 3

    The script runs with this Python, in one process or several. Ctrl-C, SIGTERM or
    SIGHUP is passed on to it, a second one kills it. The exit code is that of the first
    process that failed for good, 128 + n after signal n, 69 if the coordinator can't be
    reached or a shard of the job is lost. 76 (another version of the protocol) and 78
    (the script does not fit the job) end all processes at once.
    """
    coordinator = _named_coordinator(coordinator)
    try:
        check_credentials()
        _keep_log()
    except (CredentialsError, LogFolderError) as error:
        _log(str(error))
        raise typer.Exit(ExitCode.BAD_CONFIGURATION) from error
    plan = LaunchPlan(
        command=_checked_command(command),
        coordinator=str(coordinator),
        process_count=nproc,
        restart_limit=max_restarts,
        worker_id=_lasting_id() if worker_id is None and max_restarts else worker_id,
        history=_checked_history(history, nproc),
        devices=_devices(gpus, nproc),
        host_group=_checked_group(nproc) if one_push_per_host else "",
    )
    _check_worker_ids(plan)
    if nproc > 1 and (text := sharing_text(nproc, core_share(nproc), os.environ)):
        _log(text)
    launcher = Launcher(plan, log=_log)
    launcher.install_signal_handlers()
    try:
        has_waited = wait_reachable(
            coordinator,
            connect_timeout,
            log=_log,
            first_notice_s=0.5,
            is_name_final=True,
            cancelled=launcher.stopped,
        )
    except ConnectError as error:
        _log(str(error))
        raise typer.Exit(ExitCode.PEER_UNAVAILABLE) from error
    if has_waited and not launcher.stopped.is_set():
        _log(f"the coordinator at {coordinator} is there")
    with _status_row(coordinator, is_wanted=progress):
        code = launcher.run()
    raise typer.Exit(code)


def _status_row(
    coordinator: Address, *, is_wanted: bool
) -> AbstractContextManager[object]:
    if not is_wanted or not has_row(sys.stderr):
        return nullcontext()
    return StatusRow(asking(str(coordinator)))


def main() -> None:
    """Entry point of the `psworker` command."""
    app()


if __name__ == "__main__":
    main()
