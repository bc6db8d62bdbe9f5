"""Runs the checks, and says what they find as they find it."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import typer

from psctl.doctor.checks import CHECKS, NOT_REACHED, examine
from psctl.doctor.findings import (
    exit_code,
    finding_text,
    findings_json,
    summary_text,
)
from psctl.doctor.probes import Surroundings
from pswire.addresses import Address
from pswire.exit_codes import ExitCode
from pswire.options import chosen


def run_doctor(
    coordinator: Address | None,
    *,
    state_folders: Sequence[Path],
    checkpoint_url: str | None,
    worker_count: int | None,
    skipped: Collection[str],
    as_json: bool,
) -> ExitCode:
    """Examines, and prints what is found; the exit code."""
    names = [check.name for check in CHECKS]
    skipped = {chosen(names, each) for each in skipped}
    around = Surroundings(
        coordinator,
        state_folders=state_folders,
        checkpoint_url=checkpoint_url,
        worker_count=worker_count,
    )
    findings, left_out = [], []
    try:
        for name, found in examine(around, skipped):
            findings.append((name, found))
            if found is NOT_REACHED:
                left_out.append(name)
            elif not as_json:
                typer.echo(finding_text(name, found))
    finally:
        around.close()
    if as_json:
        at = None if coordinator is None else str(coordinator)
        typer.echo(json.dumps(findings_json(at, findings), indent=2))
    else:
        if left_out:
            typer.echo(finding_text("others", NOT_REACHED) + f": {', '.join(left_out)}")
        typer.echo(f"\n{summary_text(findings)}")
    return exit_code(findings)
