"""What a shard writes down for `psctl check-history`; see `docs/history.md`.

Without `--history` there is no file, and every method returns at once.
"""

from collections.abc import Collection, Mapping

from psserver.edge.fence_report import FenceReport
from psserver.edge.record_history import record_values
from psserver.shard.core.effects import ApplyChunk
from psserver.shard.core.push import PushId, Reply, Trailer
from psserver.shard.core.quorum import Merge
from psserver.shard.core.shard import ShardCore
from psserver.shard.core.shard_fence import Cut
from pswire.history import HistoryFile
from pswire.job_settings import JobSettings
from pswire.membership import Outcome, Record, WorkerKey


class ShardHistory:
    """What one shard did, in its own order."""

    def __init__(self, file: HistoryFile | None = None) -> None:
        self._file = file

    @classmethod
    def open(
        cls, wanted: str, *, shard_index: int, incarnation: int, settings: JobSettings
    ) -> "ShardHistory":
        """Begins a shard's history, if one is wanted.

        Raises:
            HistoryPathError: It can't be written there.
        """
        facts: Mapping[str, object] = {
            "role": "shard",
            "shard": shard_index,
            "incarnation": incarnation,
            "shard_count": settings.shard_count,
            "atomicity": settings.step_atomicity.label,
            "backups": settings.backup_worker_count,
        }
        name = f"shard-{shard_index}-{incarnation}"
        if not wanted:
            return cls()
        return cls(
            HistoryFile(wanted, process=name, job_id=settings.job_id, facts=facts)
        )

    @property
    def is_kept(self) -> bool:
        """Whether there is one."""
        return self._file is not None

    def close(self) -> None:
        """Ends the history."""
        if self._file is not None:
            self._file.close()

    def opened(self, push: PushId, clock: int) -> None:
        """The first message of a call for a push is here."""
        if self._file is not None:
            self._file.write("opened", push=_push(push), clock=clock)

    def trailer(self, push: PushId, trailer: Trailer) -> None:
        """A push's trailer is here and was taken."""
        if self._file is not None:
            self._file.write(
                "trailer",
                push=_push(push),
                chunks=sorted(trailer.chunk_indexes),
                weight=trailer.weight,
                finite=trailer.finite,
                slack_ms=trailer.slack_ms,
            )

    def applied(
        self, effect: ApplyChunk, pushes: list[PushId], torn: Collection[str]
    ) -> None:
        """The values of a chunk have changed; some workers may have been left out."""
        if self._file is not None:
            self._file.write(
                "applied",
                chunk=effect.chunk_index,
                clock=effect.clock,
                pushes=[_push(p) for p in pushes if p.worker.worker_id not in torn],
                torn=[_push(p) for p in pushes if p.worker.worker_id in torn],
                staleness=effect.staleness,
            )

    def closed(self, merge: Merge) -> None:
        """A clock of mode quorum is closed, on shard 0."""
        if self._file is not None:
            self._file.write(
                "merge",
                clock=merge.clock,
                quorum=merge.quorum,
                needed=merge.needed_count,
                active=merge.active_count,
                window_ms=merge.window_ms,
                closed_ms=merge.closed_ms,
                arrivals=[
                    [*_push(each.push), each.weight, each.at_ms, each.slack_ms]
                    for each in merge.arrivals
                ],
            )

    def done(self, push: PushId, outcome: Outcome) -> None:
        """Everything of a push is done."""
        if self._file is not None:
            self._file.write("done", push=_push(push), outcome=outcome.label)

    def answered(self, push: PushId, reply: Reply) -> None:
        """The answer to a push is made, and leaves behind this line."""
        if self._file is not None:
            self._file.write(
                "reply", op="push", push=_push(push), **_reply_values(reply)
            )

    def pulled(self, worker: WorkerKey, reply: Reply) -> None:
        """A member is sent all values."""
        if self._file is not None:
            self._file.write(
                "reply", op="pull", worker=list(worker), **_reply_values(reply)
            )

    def installed(self, record: Record, torn_step_count: int) -> None:
        """The shard goes on under a record."""
        if self._file is not None:
            self._file.write("record", **record_values(record), torn=torn_step_count)

    def fence(self, effect: FenceReport) -> None:
        """The shard reports for a fence, and applies nothing until it is decided."""
        if self._file is not None:
            self._file.write(
                "report",
                fence=effect.fence_number,
                frontier=effect.frontier,
                holdings=[
                    [*each.worker, each.complete_sequence, each.touched_sequence]
                    for each in effect.holdings
                ],
            )

    def copying(self, cut: Cut, clock: int) -> None:
        """The image of a cut is made."""
        if self._file is not None:
            self._file.write("cut", snapshot=cut.snapshot_id, clock=clock)


def pushes_of(core: ShardCore, effect: ApplyChunk) -> list[PushId]:
    """Whose bytes an update has.

    Asked for before it is made: a record that comes meanwhile may number clocks anew.
    """
    if effect.pusher is not None:
        member = core.state.known_member(effect.pusher)
        assert member is not None, "an update is of somebody who was a member"
        return [PushId(effect.pusher, member.sequence_of(effect.clock))]
    names = {part.worker_id for part in effect.contributions}
    pushes = core.pushes_of(effect.clock)
    return [push for push in pushes if push.worker.worker_id in names]


def _push(push: PushId) -> list[object]:
    return [*push.worker, push.sequence]


def _reply_values(reply: Reply) -> dict[str, object]:
    return {
        "outcome": reply.outcome.label,
        "clock": reply.clock,
        "generation": reply.generation,
        "version": reply.version,
        "frontier": reply.frontier,
        "staleness": reply.staleness,
        "mode": reply.mode.label,
        "bound": reply.staleness_bound,
    }
