"""What the coordinator writes down for `psctl check-history`; see `docs/history.md`.

Without `--history` there is no file, and every method returns at once.
"""

from psserver.coordinator.core.coordinator_effects import Abort, DecideCut, Prepare
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.record_history import record_values
from pswire.history import HistoryFile
from pswire.membership import Record


class CoordinatorHistory:
    """What the coordinator decided, in its own order."""

    def __init__(self, file: HistoryFile | None = None) -> None:
        self._file = file

    @classmethod
    def open(cls, wanted: str, settings: CoordinatorSettings) -> "CoordinatorHistory":
        """Begins or goes on with the coordinator's history, if one is wanted.

        Raises:
            HistoryPathError: It can't be written there.
        """
        if not wanted:
            return cls()
        facts = {"role": "coordinator", "shard_count": settings.shard_count}
        return cls(
            HistoryFile(
                wanted, process="coordinator", job_id=settings.job_id, facts=facts
            )
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def persisted(self, record: Record) -> None:
        """A record is durable, and not yet sent to anybody."""
        if self._file is not None:
            self._file.write("record", **record_values(record))

    def sent(self, effect: Prepare | Abort | DecideCut) -> None:
        """A fence begins or is aborted, or a cut is decided."""
        if self._file is None:
            return
        match effect:
            case Prepare():
                self._file.write(
                    "fence",
                    fence=effect.fence_number,
                    kind=effect.kind.label,
                    evicting=[list(worker) for worker in effect.evicting],
                )
            case Abort():
                self._file.write(
                    "abort", fence=effect.fence_number, reason=effect.reason
                )
            case DecideCut():
                self._file.write(
                    "cut",
                    fence=effect.fence_number,
                    snapshot=effect.snapshot_id,
                    clock=effect.clock,
                    sequences=[[*worker, last] for worker, last in effect.sequences],
                )
