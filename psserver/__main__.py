"""The `psserver` command: starts the daemons of a job."""

from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import typer

from psserver.config import (
    RECORD_GIB,
    RECORD_GIB_DEFAULT,
    SHARD_INDEX,
    THREAD_COUNT,
    ListenConfig,
    ShardConfig,
    usable_thread_count,
)
from psserver.edge.limits import Limits
from psserver.job_options import JobOptions, takes_job_options
from pswire.addresses import Address, parse_address
from pswire.config_options import ConfiguredGroup
from pswire.limits import WAIT_S_MAX
from pswire.logs import LogFolderError
from pswire.number_range import NumberRange
from pswire.options import (
    VersionOption,
    listen_address,
    number_option,
    peer_address,
    takes_credentials,
    takes_log_options,
)
from pswire.security.credentials import Credentials

OFF: Final = "off"
"""In place of an address, for no admin port."""


class Commands(ConfiguredGroup):
    """The daemons, with the sections that each reads of the job's file."""

    sections: ClassVar = {
        "coordinator": ("job", "coordinator"),
        "form": ("job", "coordinator"),
        "shard": ("job", "shard"),
        # What the coordinator is told holds for the one that it starts, too.
        "local": ("job", "coordinator", "local"),
    }


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _admin_text(text: str) -> str:
    """An address, or that there is none."""
    return text if text == OFF else str(listen_address(text))


Listen = Annotated[
    Address,
    typer.Option(
        parser=listen_address,
        metavar="HOST:PORT",
        help="Where to listen; port 0 takes a free one and prints it.",
    ),
]
AdminListen = Annotated[
    str,
    typer.Option(
        parser=_admin_text,
        metavar="HOST:PORT|off",
        help="Where to serve health, readiness, metrics and the page of the job by "
        "HTTP; port 0 takes a free one and logs it. See docs/operations.md.",
    ),
]
StateDir = Annotated[
    Path,
    typer.Option(
        help="Folder for what a restart needs; made if it does not exist.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen beyond loopback without TLS, or without asking who calls.",
    ),
]
Tokens = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The job's tokens, as `psctl token create` keeps them: whoever calls must "
        "show one, or a certificate of --tls-ca. Read again when it changes.",
    ),
]
History = Annotated[
    str,
    typer.Option(
        metavar="FILE|FOLDER/", help="Where to write a history, see docs/history.md."
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder in which each shard records its first values and each push in the "
        "order of its update, for `psctl replay`; made if it does not exist. It takes "
        "as many bytes as are pushed, and the values and optimizer state once. See "
        "docs/replay.md.",
    ),
]
RecordLimit = Annotated[
    float,
    number_option(
        allowed=RECORD_GIB,
        metavar="GIB",
        help="Size of each shard's recording at which it ends; training goes on. See "
        "docs/replay.md.",
    ),
]
Limit = Annotated[
    list[str],
    typer.Option(
        "--limit",
        envvar="PS_LIMITS",
        metavar="NAME=VALUE",
        help="What callers may make it hold, and how long it waits for them; may be "
        "given again. Names, and what they are without it: "
        # With dashes, names would be broken at the ends of lines.
        + "; ".join(
            f"{name.replace('-', '_')} ({default})"
            for name, default, _ in Limits.rows()
        )
        + ". See docs/limits.md.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")]


@app.callback()
def psserver(
    version: VersionOption = False,
) -> None:
    """Runs the daemons of a paramserver job: one coordinator and its shards."""


@app.command()
@takes_credentials
@takes_log_options
@takes_job_options
def coordinator(
    *,
    listen: Listen = "127.0.0.1:7070",  # type: ignore[assignment]
    admin_listen: AdminListen = "127.0.0.1:0",
    state_dir: StateDir,
    insecure: Insecure = False,
    tokens: Tokens = None,
    history: History = "",
    limit: Limit = [],  # noqa: B006, typer copies it
    verbose: Verbose = False,
    job: JobOptions,
) -> None:
    """Serves one job: settings, members, shard map, data order."""
    listening = _listening(listen, tokens, insecure=insecure)
    config = replace(
        job.config(listening, state_dir),
        admin=_admin(listening, admin_listen),
        history=history,
        limits=_limits(limit),
    )
    from psserver.coordinator.daemon import run_coordinator

    _run("coordinator", run_coordinator(config), verbose=verbose)


@app.command()
@takes_credentials
@takes_log_options
def shard(
    *,
    coordinator: Annotated[
        Address,
        typer.Option(
            parser=peer_address,
            metavar="HOST:PORT",
            help="The job's coordinator; it may be started later.",
        ),
    ],
    listen: Listen = "127.0.0.1:0",  # type: ignore[assignment]
    admin_listen: AdminListen = "127.0.0.1:0",
    state_dir: StateDir,
    advertise: Annotated[
        Address | None,
        typer.Option(
            parser=peer_address,
            metavar="HOST:PORT",
            help="Where workers reach this shard, if not where it listens.",
        ),
    ] = None,
    index: Annotated[
        int | None,
        number_option(
            allowed=SHARD_INDEX,
            metavar="N",
            help="Which shard of the job it shall be, if that place is free; any by "
            "default.",
        ),
    ] = None,
    threads: Annotated[
        int,
        number_option(
            allowed=THREAD_COUNT, metavar="N", help="Threads that apply updates."
        ),
    ] = usable_thread_count(),
    insecure: Insecure = False,
    tokens: Tokens = None,
    history: History = "",
    record: Record = None,
    record_limit: RecordLimit = RECORD_GIB_DEFAULT,
    limit: Limit = [],  # noqa: B006, typer copies it
    verbose: Verbose = False,
) -> None:
    """Holds one shard of the parameters and runs its optimizer."""
    listening = _listening(listen, tokens, insecure=insecure)
    config = ShardConfig(
        listen=listening,
        admin=_admin(listening, admin_listen),
        coordinator=coordinator,
        advertise=advertise,
        state_dir=state_dir,
        index=index,
        thread_count=threads,
        history=history,
        record=record,
        record_gib_max=record_limit,
        limits=_limits(limit),
    )
    from psserver.shard.daemon import run_shard

    name = f"shard-{state_dir.absolute().name if index is None else index}"
    _run("shard", run_shard(config), verbose=verbose, name=name)


@app.command()
@takes_credentials
@takes_log_options
@takes_job_options
def local(
    *,
    listen: Listen = "127.0.0.1:7070",  # type: ignore[assignment]
    admin_listen: AdminListen = "127.0.0.1:0",
    state_dir: StateDir,
    insecure: Insecure = False,
    tokens: Tokens = None,
    history: History = "",
    record: Record = None,
    record_limit: RecordLimit = RECORD_GIB_DEFAULT,
    limit: Limit = [],  # noqa: B006, typer copies it
    verbose: Verbose = False,
    job: JobOptions,
) -> None:
    """Runs a coordinator and its shards on one machine."""
    listening = _listening(listen, tokens, insecure=insecure)
    config = replace(
        job.config(listening, state_dir),
        admin=_admin(listening, admin_listen),
        history=history,
        limits=_limits(limit),
    )
    from psserver.local import run_local

    daemons = run_local(
        config,
        job.arguments(),
        shard_arguments=[]
        if record is None
        else [f"--record={record}", f"--record-limit={record_limit!r}"],
        verbose=verbose,
    )
    _run("local", daemons, verbose=verbose)


@app.command()
@takes_credentials
@takes_log_options
def form(
    *,
    listen: Listen = "127.0.0.1:7070",  # type: ignore[assignment]
    state_dir: StateDir,
    checkpoint_dir: Annotated[
        str,
        typer.Option(metavar="FOLDER|URL", help="Where the job's checkpoints are."),
    ],
    wait: Annotated[
        float,
        number_option(
            allowed=NumberRange(0.1, WAIT_S_MAX, unit="seconds"),
            metavar="SECONDS",
            help="Longest wait for shards that live, which call --listen.",
        ),
    ] = 5.0,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it; without this nothing is changed.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs.")
    ] = False,
    insecure: Insecure = False,
    tokens: Tokens = None,
    limit: Limit = [],  # noqa: B006, typer copies it
    verbose: Verbose = False,
) -> None:
    """Forms a job anew whose coordinator's state is damaged.

    Says first what that means: what is wrong, from which checkpoint, which shards live,
    and how much is trained again. With --yes the damaged files are set aside, never
    deleted. The coordinator must not run; start it afterwards by its command line.
    """
    from psserver.coordinator.forming import form as formed

    forming = formed(
        listen=_listening(listen, tokens, insecure=insecure),
        state_dir=state_dir,
        checkpoint_url=checkpoint_dir,
        wait_s=wait,
        is_wanted=yes,
        as_json=as_json,
        limits=_limits(limit),
    )
    _run("form", forming, verbose=verbose)


def _listening(
    address: Address, tokens: Path | None, *, insecure: bool
) -> ListenConfig:
    return ListenConfig(
        address=address,
        insecure=insecure,
        tokens=tokens,
        credentials=Credentials.from_environment(),
    )


def _admin(listen: ListenConfig, text: str) -> ListenConfig | None:
    return None if text == OFF else listen.admin(parse_address(text))


def _limits(texts: list[str]) -> Limits:
    try:
        return Limits.parse(texts)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--limit") from error


def _run(
    role: str, daemon: Coroutine[Any, Any, None], *, verbose: bool, name: str = ""
) -> None:
    """Runs a daemon and turns its end into an exit code and one line."""
    from psserver.edge.ending import run_daemon
    from psserver.logs import configure_logs

    try:
        configure_logs(role=role, verbose=verbose, name=name)
    except LogFolderError as error:
        daemon.close()
        raise typer.BadParameter(str(error), param_hint="--log-dir") from error
    raise typer.Exit(run_daemon(daemon))


def main() -> None:
    app(prog_name="psserver")


if __name__ == "__main__":
    main()
