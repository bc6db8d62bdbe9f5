"""Chunks that came ahead of their push's trailer, replaceable and gone with their call.

A worker sends them while it still computes, and may change its mind about each until
the trailer. Until then they are in no dedupe table, image or report, and nobody waits
for them.
"""

from collections.abc import Collection

from psserver.shard.core.push import PushId, StagedChunk
from psserver.shard.host.push_session import PushSession
from psserver.shard.tensors.contribution import byte_count_of
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason, Refusal


class ProvisionalChunks:
    """What one call has sent ahead of the trailer.

    Attributes:
        push: What it will be part of.
        session: The call.
        chunks: By index; a later one replaces an earlier one.
        is_ended: Whether the call was ended here: nothing of it counts any more.
    """

    def __init__(self, push: PushId, session: PushSession) -> None:
        self.push = push
        self.session = session
        self.chunks: dict[int, StagedChunk] = {}
        self.is_ended = False

    def put(self, chunk_index: int, chunk: StagedChunk) -> None:
        """Keeps a chunk in place of the one that was there."""
        if not self.is_ended:
            self.chunks[chunk_index] = chunk

    def fail(self, refusal: Refusal) -> None:
        """Ends the call, and frees its bytes at once."""
        self.is_ended = True
        self.chunks.clear()
        self.session.fail(refusal)


class ProvisionalCalls:
    """The calls of workers that send ahead: one for each, so one gradient of bytes."""

    def __init__(self) -> None:
        self._calls: dict[WorkerKey, ProvisionalChunks] = {}

    def begin(self, call: ProvisionalChunks) -> None:
        """A call begins to send ahead; one that its worker had before is ended."""
        worker = call.push.worker
        if worker in self._calls:
            self._fail(
                worker, Refusal(ErrorReason.DRAINING, "a newer call sends ahead")
            )
        self._calls[worker] = call

    def end(self, call: ProvisionalChunks) -> None:
        """The trailer has come, or the call has ended."""
        if self._calls.get(call.push.worker) is call:
            del self._calls[call.push.worker]

    def keep_only(self, members: Collection[WorkerKey]) -> None:
        """Ends the calls of workers that are no members any more."""
        for worker in self._calls.keys() - set(members):
            self._fail(
                worker,
                Refusal(
                    ErrorReason.WORKER_INCARNATION_STALE,
                    f"{worker} is no member any more; what it sent ahead is dropped",
                ),
            )

    def end_all(self, refusal: Refusal) -> None:
        """Ends every call with an error."""
        for worker in list(self._calls):
            self._fail(worker, refusal)

    @property
    def byte_count(self) -> int:
        """Bytes that are held for all workers."""
        return sum(
            byte_count_of(chunk.payload)
            for call in self._calls.values()
            for chunk in call.chunks.values()
        )

    def _fail(self, worker: WorkerKey, refusal: Refusal) -> None:
        call = self._calls.pop(worker, None)
        if call is not None:
            call.fail(refusal)
