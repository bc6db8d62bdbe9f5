"""`psctl check-history`: the report on a run's promises, for people and programs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psctl.failures import CommandError
from psctl.history.findings import PROMISES, Findings
from psctl.history.job_check import check_job
from psctl.history.lines import files_of, read_starts
from psctl.tables import aligned, count_text
from pswire.exit_codes import ExitCode
from pswire.names import printable

SCHEMA_VERSION: Final = 1
"""Of the JSON. `docs/history.md` describes it."""

_BREAKS_SHOWN: Final = 20
"""Of each promise, for people. The JSON has all of them."""

_FILES_NAMED: Final = 5
"""In a text, so that a folder of a big job does not fill the screen."""

STILL_WRITTEN: Final = (
    "these histories are still being written: check again when the job has ended"
)


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """What a check of histories has found.

    Attributes:
        still_written: Names of files that grew or were made meanwhile. The files are
            of different moments then, so a break may come from that alone.
    """

    file_count: int
    job_ids: Sequence[str]
    findings: Findings
    still_written: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not self.findings.breaks

    @property
    def exit_code(self) -> ExitCode:
        if self.is_clean:
            return ExitCode.DONE
        return ExitCode.TRY_AGAIN if self.still_written else ExitCode.ERROR

    @property
    def still_written_text(self) -> str:
        """That breaks may come from a process that still writes, empty if none does."""
        if not self.still_written:
            return ""
        return (
            f"{STILL_WRITTEN} ({_named(self.still_written)} changed while they were "
            "read one after the other, so a push under way may look broken)"
        )

    def to_json(self) -> dict[str, object]:
        findings = self.findings
        return {
            "schema_version": SCHEMA_VERSION,
            "job_ids": list(self.job_ids),
            "file_count": self.file_count,
            "still_written": list(self.still_written),
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
        counts = self.findings.counts
        head = (
            f"job {', '.join(map(printable, self.job_ids)) or '-'}: "
            f"{count_text(self.file_count, 'file')}, "
            f"{count_text(counts['workers'], 'worker')} "
            f"({count_text(counts['worker_starts'], 'start')}), "
            f"{count_text(counts['shards'], 'shard')}, "
            f"{count_text(counts['generations'], 'generation')}, "
            f"{count_text(counts['evicted'], 'eviction')}{self._lives_text}\n"
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
        note = [self.still_written_text] if self.still_written else []
        return "\n\n".join([head, table, *self._breaks_text(), *note])

    @property
    def _lives_text(self) -> str:
        returns = self.findings.counts["lives"] - 1
        if returns < 1:
            return ""
        return f", {count_text(returns, 'return')} to a checkpoint"

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
    """Checks the histories of one job: files, or folders with nothing else in them."""
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
        sizes = _sizes_of(files)
        starts = read_starts(files, findings)
        later_sizes = _sizes_of(files_of(paths))
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error
    if not any(start.begin.values.get("role") == "shard" for start in starts):
        raise CommandError(
            "there is no shard's history among these files: "
            f"{_named([file.name for file in files])}: nothing can be checked without "
            "one. Name the histories of all processes, or their folder",
            ExitCode.USAGE,
        )
    # Histories have no last line, so what tells that one goes on is that it grew.
    still_written = [
        file.name for file, size in later_sizes.items() if sizes.get(file) != size
    ]
    job_ids = check_job(starts, findings)
    return HistoryReport(len(files), job_ids, findings, tuple(still_written))


def _sizes_of(files: Iterable[Path]) -> dict[Path, int]:
    return {file: file.stat().st_size for file in files}


def _named(names: Sequence[str]) -> str:
    """The names for a person, not all of very many."""
    said = ", ".join(map(printable, names[:_FILES_NAMED]))
    more = len(names) - _FILES_NAMED
    return f"{said} and {more} more" if more > 0 else said
