"""The commands of `psctl` that look at a job or change it, and at its histories."""

import json
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from psctl.options import (
    CoordinatorOption,
    GraceWindowOption,
    JsonOption,
    OptionalCoordinatorOption,
    QuorumOption,
    StalenessOption,
    interruptible,
    parsed,
    say,
    show,
    timeout_option,
)
from pswire.addresses import Address
from pswire.exit_codes import ExitCode
from pswire.limits import NUMBER_MAX, TRACE_STEP_COUNT_MAX, WAIT_S_MAX
from pswire.membership import Mode
from pswire.names import printable
from pswire.number_range import NumberRange
from pswire.options import (
    MODES_TEXT,
    choice_option,
    chosen,
    count_option,
    number_option,
    peer_address,
    takes_credentials,
)


@takes_credentials
def status(*, coordinator: CoordinatorOption, as_json: JsonOption = False) -> None:
    """Shows what a job is doing, and why it is slow or waits.

    Example: psctl status --coordinator localhost:7070
    """
    from psctl.status import read_document, status_text

    document = read_document(coordinator)
    show(as_json, document, status_text(document))


@takes_credentials
def mode(
    name: Annotated[
        str,
        typer.Argument(
            parser=lambda text: chosen(Mode.labels(), text),
            metavar="|".join(Mode.labels()),
            help=f"{MODES_TEXT[0].upper()}{MODES_TEXT[1:]}.",
        ),
    ],
    *,
    coordinator: CoordinatorOption,
    staleness: StalenessOption = None,
    quorum: QuorumOption = None,
    grace_window: GraceWindowOption = None,
    timeout: Annotated[float, timeout_option(3600.0)] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Changes how workers keep together, while they train.

    Example: psctl mode ssp --staleness 3

    Example: psctl mode quorum --quorum 6 --grace-window 0.5

    Prints after which clock the mode holds, and the generation that begins with it.
    After the time-out the change is still wanted, and is made as soon as it can be.

    From bsp or quorum to ssp or asp, divide the learning rate by the number of workers
    and leave momentum out, and the reverse on the way back: see docs/modes.md.
    """
    from psctl.mode import set_mode, terms_given

    terms = terms_given(
        Mode.labelled(name),
        staleness=staleness,
        quorum=quorum,
        grace_window_s=grace_window,
    )
    changed = set_mode(coordinator, terms, timeout_s=timeout)
    show(as_json, changed.to_json(), changed.text)
    if hint := changed.rate_hint:
        say(hint)


@takes_credentials
def trace(
    *,
    coordinator: CoordinatorOption,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE", help="Where the trace goes, as JSON."),
    ],
    steps: Annotated[
        int, count_option("Steps of each worker.", most=TRACE_STEP_COUNT_MAX)
    ] = 20,
    otlp: Annotated[
        Address | None,
        typer.Option(
            "--otlp",
            parser=peer_address,
            metavar="HOST:PORT",
            help="Send it to a collector of OpenTelemetry as well, by OTLP over gRPC.",
        ),
    ] = None,
    timeout: Annotated[float, timeout_option(3600.0)] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Records the next steps of a job, for Perfetto.

    Example: psctl trace --steps 20 --out trace.json

    Workers: compute, load data, send, wait. Shards, of each push: receive, hold until
    it is applied and may be answered, and answer; of each chunk: apply. Needs the role
    admin where the job has tokens. Open the file in https://ui.perfetto.dev.
    """
    from psctl.trace import save_trace, send_trace

    report = save_trace(coordinator, out, step_count=steps, timeout_s=timeout)
    if otlp is not None:
        send_trace(report, otlp)
    show(as_json, report.to_json(), report.text)


@takes_credentials
def top(
    *,
    coordinator: CoordinatorOption,
    interval: Annotated[
        float,
        number_option(
            allowed=NumberRange(0.2, 3600.0, unit="seconds"),
            metavar="SECONDS",
            help="Between two looks.",
        ),
    ] = 1.0,
) -> None:
    """Shows a job in this terminal, and why it is slow.

    Example: psctl top --coordinator trainer-0:7070 --interval 2

    Only what has changed is written, so that it is usable over a slow line. Keys: q
    ends it, tab or left and right choose a pane, j and k scroll it. On no terminal it
    prints one look.
    """
    from psctl.top.command import run_top

    run_top(coordinator, interval)


@takes_credentials
def events(
    *,
    coordinator: CoordinatorOption,
    after: Annotated[
        int,
        number_option(
            allowed=NumberRange(0, NUMBER_MAX),
            metavar="NUMBER",
            help="Number of the last event that is known.",
        ),
    ] = 0,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Go on with what happens, also over a restart of the job."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each event.")
    ] = False,
) -> None:
    """Lists what has happened to a job.

    Example: psctl events --follow --json

    Joins, losses, checkpoints, changes of the mode. The coordinator remembers the last
    1,000 events. Numbers go on when it is started again, so that a script can ask for
    what it has missed.
    """
    from psctl.events import print_events

    print_events(coordinator, after=after, follow=follow, as_json=as_json)


@takes_credentials
def doctor(
    *,
    coordinator: OptionalCoordinatorOption = None,
    state_dir: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="A folder of state of a daemon here: whether it has room. May be "
            "given several times.",
        ),
    ] = None,
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where checkpoints are written, in place of where the job says.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        count_option(
            "Workers that this machine is to have, in place of those that the job has "
            "here.",
            most=1024,
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHECK",
            help="Leave a check out, such as torch, which takes some seconds. May be "
            "given several times.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Finds what is wrong here, or on the way to a job.

    Example: psctl doctor --coordinator trainer-0:7070

    Run it where a worker is to run. Each finding is ok, a warning, a problem or
    unknown, with what to do next. Exit code 1 when there is a problem.

    Without --coordinator it looks at this machine alone. A job that trains is delayed
    for less than a second.
    """
    from psctl.doctor.checks import CHECKS, NOT_REACHED, examine
    from psctl.doctor.findings import (
        exit_code,
        finding_text,
        findings_json,
        summary_text,
    )
    from psctl.doctor.probes import Surroundings

    names = [check.name for check in CHECKS]
    skipped = {chosen(names, each) for each in skip or ()}
    around = Surroundings(
        coordinator,
        state_folders=state_dir or (),
        checkpoint_url=checkpoint_dir,
        worker_count=workers,
    )
    findings = []
    with closing(around):
        for name, found in examine(around, skipped):
            findings.append((name, found))
            if found is not NOT_REACHED and not as_json:
                typer.echo(finding_text(name, found))
    if as_json:
        at = None if coordinator is None else str(coordinator)
        typer.echo(json.dumps(findings_json(at, findings), indent=2))
    else:
        if left_out := [name for name, found in findings if found is NOT_REACHED]:
            typer.echo(finding_text("others", NOT_REACHED) + f": {', '.join(left_out)}")
        typer.echo(f"\n{summary_text(findings)}")
    code = exit_code(findings)
    if code != ExitCode.DONE:
        raise typer.Exit(code)


snapshot_app = typer.Typer(no_args_is_help=True, help="Pulls snapshots of a job.")


@snapshot_app.command("get")
@takes_credentials
def snapshot_get(
    *,
    coordinator: OptionalCoordinatorOption = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Where to write, as safetensors; the endings of other formats, such "
            "as .pt, are refused.",
        ),
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL[/NAME]",
            help="Take a checkpoint, the newest good one or the one named, in place "
            "of a running job's values.",
        ),
    ] = None,
    newer_than: Annotated[
        int | None,
        number_option(
            allowed=NumberRange(0, NUMBER_MAX),
            metavar="VERSION",
            help="Wait for a version above this.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which model, where the job has several."),
    ] = None,
    timeout: Annotated[float, timeout_option(WAIT_S_MAX)] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Writes a snapshot to a file that loads into the plain model.

    Example: psctl snapshot get --out model.safetensors

    The file has one version of all parameters and appears whole or not at all.

    With --checkpoint no job needs to run.
    """
    if checkpoint is not None:
        if newer_than is not None:
            raise typer.BadParameter(
                "a checkpoint does not change: leave it out, or --checkpoint",
                param_hint="--newer-than",
            )
        from psctl.checkpoints import get_saved

        saved, text = get_saved(checkpoint, out, model=model)
    else:
        if coordinator is None:
            raise typer.BadParameter(
                "name the job's coordinator, or a --checkpoint",
                param_hint="--coordinator",
            )
        from psctl.snapshots import get_snapshot

        saved = get_snapshot(
            coordinator, out, newer_than=newer_than, model=model, timeout_s=timeout
        )
        text = (
            f"version {saved['version']} (clock {saved['clock']}) is in "
            f"{printable(str(saved['path']))}"
        )
    show(as_json, saved, text)


@snapshot_app.command("list")
@takes_credentials
def snapshot_list(
    *, coordinator: CoordinatorOption, as_json: JsonOption = False
) -> None:
    """Lists the snapshots the job holds: in this release the newest one.

    Example: psctl snapshot list --json
    """
    from psctl.snapshots import list_snapshots

    show(as_json, *list_snapshots(coordinator))


def logs(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", help="Where the logs are; by default that of --log-dir."
        ),
    ] = None,
    *,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The --log-dir of the processes."),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The --state-dir of a `psserver local`, which keeps logs in it.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="10min|TIME", help="Only lines of so long ago, or since a time."
        ),
    ] = None,
    role: Annotated[
        str | None,
        choice_option(
            ("coordinator", "shard", "local", "worker", "run", "form"),
            help="Only lines of processes of this role.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the lines as they are kept, as JSON.")
    ] = False,
) -> None:
    """Shows the logs of all processes of a job, by time.

    Example: psctl logs --state-dir state --since 10min --role shard

    Reads what `psserver local` keeps in its state folder, and any process that was
    given --log-dir.
    """
    from psctl.logs import LogFolder, parsed_since

    kept = state_dir / "logs" if state_dir is not None else None
    chosen = folder or kept or log_dir
    if chosen is None:
        raise typer.BadParameter(
            "name the folder of the logs, or the --state-dir of a `psserver local`",
            param_hint="FOLDER",
        )
    first = ""
    if since is not None:
        first = parsed("--since", lambda: parsed_since(since, datetime.now(UTC)))
    found = LogFolder(chosen, since=first, role=role)
    with interruptible():
        for line in found.follow() if follow else found.lines():
            typer.echo(line.text if as_json else line.shown())


def check_history(
    *,
    histories: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|FOLDER...",
            exists=True,
            help="Histories of one job, or folders with nothing else in them.",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Checks by its histories whether a job kept its promises.

    Example: psctl check-history runs/monday/

    Exit code 1 when a promise was broken. 75 when one looks broken, but histories were
    still being written: check again when the job has ended.

    Start the processes with --history FOLDER/,
    or with PS_HISTORY, to have histories; see docs/history.md.
    """
    from psctl import check_history as checking

    found = checking.check_history(histories)
    show(as_json, found.to_json(), found.to_text())
    if found.still_written:
        say(found.still_written_text)
    if found.exit_code != ExitCode.DONE:
        raise typer.Exit(found.exit_code)


def replay(
    *,
    recordings: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER|FILE...",
            exists=True,
            help="Folder of the recordings, of which the newest of each shard is "
            "taken; or one recording of each shard.",
        ),
    ],
    until: Annotated[
        str,
        typer.Option(
            metavar="VERSION|clock:CLOCK",
            help="Stop at this version of each shard, or when all workers have reached "
            "this clock; at the end by default.",
        ),
    ] = "",
    norm: Annotated[
        float | None,
        number_option(
            allowed=NumberRange(0.0, NUMBER_MAX),
            help="Name the first update that changes the values by more, as L2 norm.",
        ),
    ] = None,
    shows_pushes: Annotated[
        bool, typer.Option("--show", help="List the pushes.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the model there, as safetensors."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Which model to write, where the job has several."
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON for programs, see docs/replay.md."),
    ] = False,
) -> None:
    """Applies again what shards have recorded.

    Example: psctl replay runs/monday/ --until 1200 --out before.safetensors

    In the same order, and without a job. Ends with the same bits as the shards, and
    names the first update after which a value is not finite. Exit code 1 when a
    recording is damaged or a bit differs.

    Start the shards with --record FOLDER to have recordings; see docs/replay.md.
    """
    from psctl import replay as replaying
    from psctl.folders import writable_file
    from psserver.shard.host.replaying import Until

    end = parsed("--until", lambda: Until.parse(until)) if until else Until()
    if out is not None:
        writable_file(out)
    with interruptible():
        found = replaying.replay(
            recordings, until=end, norm_max=norm, shows_pushes=shows_pushes
        )
        if out is not None:
            found.save(out, model)
    show(as_json, found.to_json(), found.to_text())
    if found.exit_code != ExitCode.DONE:
        raise typer.Exit(found.exit_code)
