"""`psctl snapshot`: pulls and lists the snapshots of a job."""

from pathlib import Path
from typing import Final, TypedDict

from psctl.failures import CommandError
from psctl.options import say
from psctl.status import read_status
from pswire.addresses import Address
from pswire.exit_codes import ExitCode
from psworker.errors import ConfigurationError
from psworker.snapshots.snapshot_path import refusal_text

SCHEMA_VERSION: Final = 1


class SavedSnapshot(TypedDict):
    """What was written where."""

    schema_version: int
    path: str
    job_id: str
    version: int
    clock: int
    generation: int
    parameter_bytes: int


class ListedSnapshot(TypedDict):
    """One snapshot that the job holds."""

    version: int


class SnapshotListing(TypedDict):
    """All snapshots that the job holds."""

    schema_version: int
    job_id: str
    snapshots: list[ListedSnapshot]


def get_snapshot(
    coordinator: Address,
    out: Path,
    *,
    newer_than: int | None,
    model: str | None,
    timeout_s: float,
) -> SavedSnapshot:
    """Pulls a snapshot and writes it.

    Raises:
        CommandError: There is no such folder, or no file can be there.
        PsError: No snapshot could be had.
    """
    # Seen before a long wait and a long download.
    if not out.absolute().parent.is_dir():
        raise CommandError(
            f"there is no folder {out.absolute().parent}; create it", ExitCode.USAGE
        )
    if text := refusal_text(out):
        raise CommandError(text, ExitCode.USAGE)
    say(f"asking {coordinator} for a snapshot")
    from psworker.snapshots.snapshot import SnapshotReader

    with SnapshotReader(str(coordinator)) as reader:
        snapshot = (
            reader.latest(timeout_s)
            if newer_than is None
            else reader.wait_newer(newer_than, timeout_s)
        )
    try:
        snapshot.save(out, model)
    except ConfigurationError as error:  # of --model, which the job alone can tell
        raise CommandError(str(error), ExitCode.USAGE) from error
    return SavedSnapshot(
        schema_version=SCHEMA_VERSION,
        path=str(out),
        job_id=snapshot.job_id,
        version=snapshot.version,
        clock=snapshot.clock,
        generation=snapshot.generation,
        parameter_bytes=snapshot.byte_count,
    )


def list_snapshots(coordinator: Address) -> SnapshotListing:
    """Asks the coordinator which snapshots it knows."""
    status = read_status(coordinator)
    known = [ListedSnapshot(version=status.snapshot_version)]
    return SnapshotListing(
        schema_version=SCHEMA_VERSION,
        job_id=status.settings.job_id,
        snapshots=[] if status.snapshot_version < 0 else known,
    )


def listing_text(listing: SnapshotListing) -> str:
    """The listing for people."""
    if not listing["snapshots"]:
        return "no snapshot yet; `psctl snapshot get --out FILE` makes one"
    return "\n".join(f"version {each['version']}" for each in listing["snapshots"])
