"""`psctl snapshot`: pulls and lists the snapshots of a job."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from psctl.failures import CommandError
from psctl.folders import writable_file, writing
from psctl.progress import working
from psctl.status import read_document
from pswire.addresses import Address
from pswire.exit_codes import ExitCode
from psworker.errors import ConfigurationError

if TYPE_CHECKING:
    from psworker.snapshots.snapshot import Snapshot

SCHEMA_VERSION: Final = 1


def get_snapshot(
    coordinator: Address,
    out: Path,
    *,
    newer_than: int | None,
    model: str | None,
    timeout_s: float,
) -> dict[str, object]:
    """Pulls a snapshot and writes it; what is where, for programs."""
    # Before a long wait and a long download.
    writable_file(out)
    from psworker.snapshots.snapshot import SnapshotReader

    with (
        working(f"asking {coordinator} for a snapshot") as work,
        SnapshotReader(str(coordinator)) as reader,
    ):
        snapshot = (
            reader.latest(timeout_s, progress=work.update)
            if newer_than is None
            else reader.wait_newer(newer_than, timeout_s, progress=work.update)
        )
    return save_snapshot(snapshot, out, model)


def save_snapshot(
    snapshot: "Snapshot", out: Path, model: str | None
) -> dict[str, object]:
    """Writes a snapshot to a file; what is where, for programs."""
    try:
        with writing(out):
            snapshot.save(out, model)
    except ConfigurationError as error:  # about --model, which only the job can check
        raise CommandError(str(error), ExitCode.USAGE) from error
    return {
        "schema_version": SCHEMA_VERSION,
        "path": str(out),
        "job_id": snapshot.job_id,
        "version": snapshot.version,
        "clock": snapshot.clock,
        "generation": snapshot.generation,
        "parameter_bytes": snapshot.byte_count,
    }


def list_snapshots(coordinator: Address) -> tuple[dict[str, object], str]:
    """The snapshots that the job holds, for programs and for people."""
    status = read_document(coordinator)
    version = status["snapshot_version"]
    listing = {
        "schema_version": SCHEMA_VERSION,
        "job_id": status["job"]["job_id"],
        "snapshots": [] if version is None else [{"version": version}],
    }
    if version is None:
        return listing, "no snapshot yet; `psctl snapshot get --out FILE` makes one"
    return listing, f"version {version}"
