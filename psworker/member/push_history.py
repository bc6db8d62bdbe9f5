"""What a worker writes down for `psctl check-history`; see `docs/history.md`.

Without `PS_HISTORY` there is no file, and every method returns at once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pswire.history import HistoryFile, HistoryPathError
from pswire.membership import WorkerKey
from psworker.errors import ConfigurationError
from psworker.transport.values import PushHeader, PushReply

Answered = Callable[[Sequence[PushReply]], Sequence[PushReply]]


class PushHistory:
    """What one start of a worker sent and was answered."""

    def __init__(self, file: HistoryFile | None = None) -> None:
        self._file = file

    @classmethod
    def open(
        cls, wanted: str, job_id: str, worker: WorkerKey, *, is_shared: bool = False
    ) -> "PushHistory":
        """Begins a start's history, if one is wanted.

        Args:
            wanted: Where it goes, empty for nowhere.
            job_id: The job.
            worker: Which start of which worker.
            is_shared: Whether several processes are this start, one after the other:
                each has a file of its own.

        Raises:
            ConfigurationError: It can't be written there.
        """
        if not wanted:
            return cls()
        name = f"worker-{worker.worker_id}-{worker.incarnation}"
        if is_shared:
            name += f"-{os.getpid()}"
        facts = {"role": "worker", "worker": [worker.worker_id, worker.incarnation]}
        try:
            file = HistoryFile(wanted, process=name, job_id=job_id, facts=facts)
        except HistoryPathError as error:
            raise ConfigurationError(str(error)) from None
        return cls(file)

    def close(self) -> None:
        """Ends the history."""
        if self._file is not None:
            self._file.close()

    @contextmanager
    def push(self, header: PushHeader) -> Iterator[Answered]:
        """A push that is about to be sent, for the first time or again.

        Yields:
            Takes the answers of all shards, and returns them. Where it is not called
            the outcome of the push is unknown.
        """
        if self._file is None:
            yield _unchanged
            return
        facts = {"op": "push", "push": _push(header.worker, header.sequence)}
        self._file.write(
            "invoke", **facts, clock=header.clock, generation=header.generation
        )
        write = self._file.write

        def answered(replies: Sequence[PushReply]) -> Sequence[PushReply]:
            outcomes = {reply.outcome.label for reply in replies}
            # One that was sent again says `duplicate` where it was done already.
            others = sorted(outcomes - {"duplicate"})
            outcome = others[0] if others else "duplicate"
            write("ok", **facts, outcome=outcome, replies=_replies(replies))
            return replies

        try:
            yield answered
        except BaseException as error:
            write("unknown", **facts, error=f"{type(error).__name__}: {error}")
            raise

    def push_settled(self, worker: WorkerKey, sequence: int, *, was_done: bool) -> None:
        """What became of an evicted start's last push, as its successor found out."""
        if self._file is not None:
            push = _push(worker, sequence)
            if was_done:
                self._file.write("ok", op="push", push=push, outcome="duplicate")
            else:
                self._file.write("fail", op="push", push=push)

    def pulled(
        self, worker: WorkerKey, clock: int, replies: Sequence[PushReply]
    ) -> None:
        """Every shard has sent its values."""
        if self._file is not None:
            self._file.write(
                "ok",
                op="pull",
                worker=[worker.worker_id, worker.incarnation],
                clock=clock,
                replies=_replies(replies),
            )

    def round_chosen(self, worker: WorkerKey, step_count: int, clock: int) -> None:
        """Rounds of local steps are so long from a clock on."""
        if self._file is not None:
            self._file.write(
                "round",
                worker=[worker.worker_id, worker.incarnation],
                clock=clock,
                steps=step_count,
            )

    def waited(self, worker: WorkerKey, clock: int, wait_s: float) -> None:
        """A local step has waited for the push of a clock."""
        if self._file is not None:
            self._file.write(
                "wait",
                worker=[worker.worker_id, worker.incarnation],
                clock=clock,
                wait_ms=round(1000 * wait_s, 3),
            )

    def committed(self, worker: WorkerKey, shard_index: int, clock: int) -> None:
        """A commit of a clock is about to be sent to a shard."""
        if self._file is not None:
            self._file.write(
                "invoke",
                op="commit",
                worker=[worker.worker_id, worker.incarnation],
                shard=shard_index,
                clock=clock,
            )


def _unchanged(replies: Sequence[PushReply]) -> Sequence[PushReply]:
    return replies


def _push(worker: WorkerKey, sequence: int) -> list[object]:
    return [worker.worker_id, worker.incarnation, sequence]


def _replies(replies: Sequence[PushReply]) -> list[dict[str, object]]:
    """The answers; they come in the order of shards."""
    return [
        {
            "shard": index,
            "incarnation": reply.shard_incarnation,
            "outcome": reply.outcome.label,
            "clock": reply.clock,
            "generation": reply.generation,
            "version": reply.version,
            "frontier": reply.frontier,
            "staleness": reply.staleness,
            "mode": reply.mode.label,
            "bound": reply.staleness_bound,
        }
        for index, reply in enumerate(replies)
    ]
