"""`psctl check-history`: the report on a run's promises, for people and programs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pswire.exit_codes import ExitCode
from psworker.ctl.failures import CommandError
from psworker.ctl.history.findings import PROMISES, Findings
from psworker.ctl.history.job_check import Job, check_job
from psworker.ctl.history.lines import files_of, read_starts
from psworker.ctl.tables import aligned, printable

SCHEMA_VERSION: Final = 1
"""Of the JSON. `docs/history.md` describes it."""

_BREAKS_SHOWN: Final = 20
"""Of each promise, for people. The JSON has all of them."""


class HistoryReport:
    """What a check of histories has found.

    Attributes:
        file_count: Files that were read.
        job: What they tell.
        findings: What was checked and what is broken.
    """

    def __init__(self, file_count: int, job: Job, findings: Findings) -> None:
        self.file_count = file_count
        self.job = job
        self.findings = findings

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        return not self.findings.breaks

    def to_json(self) -> dict[str, object]:
        """For programs."""
        findings = self.findings
        return {
            "schema_version": SCHEMA_VERSION,
            "job_ids": list(self.job.job_ids),
            "file_count": self.file_count,
            "counts": dict(sorted(findings.counts.items())),
            "promises": {
                promise: {
                    "text": text,
                    "checked": findings.checks[promise],
                    "breaks": [
                        {"place": each.place, "text": each.text}
                        for each in findings.breaks_of(promise)
                    ],
                }
                for promise, text in PROMISES.items()
            },
        }

    def to_text(self) -> str:
        """For people."""
        counts = self.findings.counts
        head = (
            f"job {', '.join(map(printable, self.job.job_ids)) or '-'}: "
            f"{self.file_count} files, {counts['workers']} workers, "
            f"{counts['shards']} shards, {counts['generations']} generations, "
            f"{counts['evicted']} evictions\n"
            f"pushes: {counts['acknowledged']} acknowledged, "
            f"{counts['dropped']} dropped, "
            f"{counts['unknown_applied']} unknown and applied, "
            f"{counts['unknown_not_applied']} unknown and not applied, "
            f"{counts['lost']} lost, {counts['applied_twice']} applied twice, "
            f"{counts['torn']} torn"
        )
        rows = [
            (
                promise,
                text,
                self.findings.checks[promise],
                len(self.findings.breaks_of(promise)),
            )
            for promise, text in PROMISES.items()
        ]
        table = aligned(("", "PROMISE", "CHECKED", "BROKEN"), rows)
        return "\n\n".join([head, table, *self._breaks_text()])

    def _breaks_text(self) -> list[str]:
        texts = []
        for promise in PROMISES:
            breaks = self.findings.breaks_of(promise)
            lines = [
                f"{promise} broken at {printable(f'{each.place}: {each.text}')}"
                for each in breaks[:_BREAKS_SHOWN]
            ]
            if len(breaks) > _BREAKS_SHOWN:
                lines.append(f"{promise}: and {len(breaks) - _BREAKS_SHOWN} more")
            if lines:
                texts.append("\n".join(lines))
        return texts


def check_history(paths: Sequence[Path]) -> HistoryReport:
    """Checks the histories of one job.

    Args:
        paths: Files, or folders with nothing but histories of the job.

    Raises:
        CommandError: There is nothing to check, or it can't be read.
    """
    files = files_of(paths)
    if not files:
        raise CommandError(
            "there is no history in "
            f"{', '.join(str(path) for path in paths)}: start the job's processes "
            "with --history FOLDER/ first",
            ExitCode.USAGE,
        )
    endless = [file for file in files if file.exists() and not file.is_file()]
    if endless:
        raise CommandError(
            f"{endless[0]} is no file on a disk: name the histories' files or folder",
            ExitCode.USAGE,
        )
    findings = Findings()
    try:
        starts = read_starts(files, findings)
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error
    return HistoryReport(len(files), check_job(starts, findings), findings)
