"""A push as a shard's core sees it: what it consists of, and what was seen before."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from pswire.leased_data import DataRange
from pswire.membership import Mode, Outcome, WorkerKey
from pswire.reasons import ErrorReason, Refusal


class PushId(NamedTuple):
    """Identity of a push on this shard."""

    worker: WorkerKey
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """What completes a push.

    Attributes:
        optimizer: Name of the optimizer that shall apply it.
        weight: Number of samples behind the gradient; finite, at least 0.
        hyperparameters: For each group of the optimizer, its current values.
        finite: The sender's verdict on its whole gradient.
        loss_scale: Factor the gradient still carries; 0 and 1 mean none.
        chunk_indexes: Chunks of this shard that are part of the push.
        ranges: Data consumed since the push before.
        averaged_buffers: Buffers of the schema that are averaged in SSP and ASP, by
            their entries; other buffers are replaced.
        gradient_norm: L2 norm of the sender's whole gradient, 0 if it is not finite.
        loads_state: Whether the state that the worker has staged is loaded first.
        is_of_longest: Whether its worker was the longest member when it was made.
        scheduler_steps: Steps of the worker's schedulers of this optimizer.
        spec_digest: Declaration of the optimizer that the hyperparameters are of.
        value_entries: Tensors of which it has values, which replace the shard's.
        publishes: Whether all that it has are values, and it is no step.
        continues_batch: Whether it is a further step on the batch of the push before.
        slack_ms: How long its worker can go on without the answer; None if it has not
            said.
        is_last: Whether its worker has no data for another one.
    """

    optimizer: str
    weight: float
    hyperparameters: tuple[tuple[float, ...], ...] = ()
    finite: bool = True
    loss_scale: float = 1.0
    chunk_indexes: frozenset[int] = frozenset()
    ranges: tuple[DataRange, ...] = ()
    averaged_buffers: frozenset[int] = frozenset()
    gradient_norm: float = 0.0
    loads_state: bool = False
    is_of_longest: bool = False
    scheduler_steps: tuple[int, ...] = ()
    spec_digest: str = ""
    value_entries: frozenset[int] = frozenset()
    publishes: bool = False
    continues_batch: bool = False
    slack_ms: int | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedChunk:
    """A chunk of a push, received and not applied.

    Attributes:
        digest: Of the bytes, which set a resend apart from a conflict.
        presence: For each slice of the chunk, whether the payload holds it.
        payload: The bytes; the core hands them on unread.
    """

    digest: int
    presence: tuple[bool, ...]
    payload: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to a push or pull.

    Attributes:
        outcome: What became of it.
        generation: Newest generation this shard knows.
        version: Steps of all workers ever that are in the values.
        frontier: Smallest clock over the members.
        clock: The worker's clock after it; when dropped, the newest clock.
        staleness: Updates applied between the values its gradient came from and it.
        mode: Mode under which the values are sent.
        staleness_bound: Bound under which the values are sent, in clocks.
        closed_sequence: The worker's pushes up to it are done or closed.
        nonfinite_worker_ids: For whose gradient it was skipped.
        grad_norm: Norm of what was applied before it was clipped; None if it was not
            measured.
        gradient_factor: What its gradient was multiplied by, 0 if it did not count.
    """

    outcome: Outcome
    generation: int
    version: int
    frontier: int
    clock: int
    staleness: int = 0
    mode: Mode = Mode.BSP
    staleness_bound: int = 0
    closed_sequence: int = 0
    nonfinite_worker_ids: tuple[str, ...] = ()
    grad_norm: float | None = None
    gradient_factor: float = 1.0


class ChunkState(IntEnum):
    """What a shard has of a chunk; mirrors `pswire.v1.ChunkState`."""

    ABSENT = 1
    STAGED = 2
    APPLIED = 3


@dataclass(slots=True)
class PushEntry:
    """One push.

    Attributes:
        trailer: Its trailer, once received.
        digests: Digest of each chunk received, kept after the chunk is applied.
        staged: Chunks received and not applied.
        applied: Chunks that are part of the parameters.
        outcome: Set when the push is done.
        nonfinite_worker_ids: For whose gradient it was skipped.
        grad_norm: Norm of what was applied before it was clipped, if it was measured.
        gradient_factor: What its gradient was multiplied by, 0 if it did not count.
    """

    trailer: Trailer | None = None
    digests: dict[int, int] = field(default_factory=dict)
    staged: dict[int, StagedChunk] = field(default_factory=dict)
    applied: set[int] = field(default_factory=set)
    outcome: Outcome | None = None
    nonfinite_worker_ids: tuple[str, ...] = ()
    grad_norm: float | None = None
    gradient_factor: float = 1.0

    @property
    def is_complete(self) -> bool:
        """Whether all of the push is there."""
        return (
            self.trailer is not None
            and len(self.trailer.chunk_indexes) <= len(self.digests)
            and self.trailer.chunk_indexes <= self.digests.keys()
        )

    def state_of(self, chunk_index: int) -> ChunkState:
        """State of one chunk."""
        if chunk_index in self.applied:
            return ChunkState.APPLIED
        if chunk_index in self.digests:
            return ChunkState.STAGED
        return ChunkState.ABSENT

    def add_trailer(self, trailer: Trailer) -> bool:
        """Keeps a trailer.

        Returns:
            Whether it is new.

        Raises:
            Refusal: `PUSH_CONFLICT` when it differs from the one received before;
                no state changed.
        """
        if self.trailer is None:
            extra = set(self.digests) - trailer.chunk_indexes
            if extra:
                raise Refusal(
                    ErrorReason.PUSH_CONFLICT,
                    f"the trailer leaves out chunk {min(extra)}, which was received",
                )
            self.trailer = trailer
            return True
        if self.trailer != trailer:
            raise Refusal(
                ErrorReason.PUSH_CONFLICT,
                "the trailer differs from the one received before under the same id",
            )
        return False

    def add_chunk(self, chunk_index: int, chunk: StagedChunk) -> bool:
        """Stages a chunk.

        Returns:
            Whether it is new; False for a resend of the same bytes.

        Raises:
            Refusal: `PUSH_CONFLICT` or `CHUNK_INVALID`; no state changed.
        """
        known = self.digests.get(chunk_index)
        if known is not None:
            if known != chunk.digest:
                raise _conflict(chunk_index)
            return False
        if self.outcome is not None:
            return False
        if self.trailer and chunk_index not in self.trailer.chunk_indexes:
            raise Refusal(
                ErrorReason.CHUNK_INVALID,
                f"chunk {chunk_index} is not in the push's bitmap",
            )
        self.digests[chunk_index] = chunk.digest
        self.staged[chunk_index] = chunk
        return True

    def add_push(
        self, trailer: Trailer, chunks: Mapping[int, StagedChunk]
    ) -> list[int]:
        """Keeps a trailer with the chunks that went ahead of it, in one change.

        Chunks that the trailer's bitmap leaves out were withdrawn by their sender.

        Returns:
            The chunks that are new.

        Raises:
            Refusal: `PUSH_CONFLICT` when anything differs from what was received
                before under the same id; no state changed.
        """
        counted = {i: chunks[i] for i in trailer.chunk_indexes if i in chunks}
        for index, chunk in counted.items():
            if self.digests.get(index, chunk.digest) != chunk.digest:
                raise _conflict(index)
        self.add_trailer(trailer)
        return [i for i, chunk in counted.items() if self.add_chunk(i, chunk)]


@dataclass(slots=True)
class PushWindow:
    """Pushes of one incarnation of one worker: each is applied exactly once.

    Push ids are (worker, incarnation, sequence). All sequences up to `done_sequence`
    are done; the entry of the one above holds for each chunk its state and digest,
    changed together with that chunk's values. A done entry stays until the worker says
    that it has the answer from every shard (its lowest unacknowledged sequence), so
    that a resend with other bytes can be refused; nothing is collected by time-out.
    Source: Lee et al., "Implementing Linearizability at Large Scale and Low Latency"
    (RIFL), SOSP 2015.

    Attributes:
        worker: Whose they are.
        done_sequence: Every sequence up to it is done.
        entries: Pushes that are not done, and done ones not yet acknowledged.
        ranges: Data of done pushes, oldest first, of the newest two epochs of each
            loader: what an epoch before consumed was reported when the next began.
        steps_again: Whether a push that is done was a further step on a batch.
        counted_sequence: The newest push that is done and was not dropped. A later one
            that is done was, whether it has an entry or not: of a stopped worker whose
            clocks close without it nothing is kept for each.
        unacknowledged_min: Its worker has the answers to all pushes below this one.
    """

    worker: WorkerKey
    done_sequence: int = 0
    entries: dict[int, PushEntry] = field(default_factory=dict)
    ranges: list[tuple[int, DataRange]] = field(default_factory=list)
    steps_again: bool = False
    counted_sequence: int = 0
    unacknowledged_min: int = 1

    @property
    def next_entry(self) -> PushEntry | None:
        """The first push that is not done, if anything of it is here."""
        return self.entries.get(self.done_sequence + 1)

    @property
    def complete_sequence(self) -> int:
        """Highest push of which everything is here, done or not."""
        entry = self.next_entry
        return self.done_sequence + (entry is not None and entry.is_complete)

    @property
    def trailer_sequence(self) -> int:
        """Highest push of which the trailer is here, done or not."""
        entry = self.next_entry
        return self.done_sequence + (entry is not None and entry.trailer is not None)

    @property
    def touched_sequence(self) -> int:
        """Highest push of which something was applied, or that is done for good."""
        entry = self.next_entry
        if entry is not None and entry.applied:
            return self.done_sequence + 1
        done = self.entries.get(self.done_sequence)
        is_void = not done.applied if done is not None else self._is_missed
        return self.done_sequence - is_void

    @property
    def _is_missed(self) -> bool:
        """Whether the newest push was dropped, which its worker has not heard."""
        known = max(self.counted_sequence, self.unacknowledged_min - 1)
        return self.done_sequence > known

    def outcome_of(self, sequence: int) -> Outcome | None:
        """What became of a push that is done; None if only its worker knows."""
        if sequence > self.counted_sequence:
            return Outcome.DROPPED
        entry = self.entries.get(sequence)
        return None if entry is None else entry.outcome

    def note_ranges(self, sequence: int, ranges: tuple[DataRange, ...]) -> None:
        """Keeps the data of a push that is done."""
        if not ranges:
            return
        newest = {piece.loader: piece.epoch for piece in ranges}
        if self.ranges and self.ranges[-1][1].epoch not in newest.values():
            self.ranges = [
                (number, piece)
                for number, piece in self.ranges
                if piece.epoch >= newest.get(piece.loader, 0) - 1
            ]
        self.ranges += [(sequence, piece) for piece in ranges]

    def ranges_known(self) -> tuple[tuple[int, DataRange], ...]:
        """Data of all pushes that are done or under way, oldest first."""
        entry = self.next_entry
        known = list(self.ranges)
        if entry is not None and entry.trailer is not None:
            known += [(self.done_sequence + 1, each) for each in entry.trailer.ranges]
        return tuple(known)

    def discard_after(self, sequence: int) -> dict[int, PushEntry]:
        """Forgets the pushes of a closed incarnation after its last one.

        The window itself stays, so that the last one can still be answered; not its
        data, which the record that closed it has settled.
        """
        self.ranges.clear()
        beyond = [number for number in self.entries if number > sequence]
        return {number: self.entries.pop(number) for number in sorted(beyond)}

    def check_sequence(self, sequence: int) -> None:
        """Checks that a push is the next one or an earlier one.

        Raises:
            Refusal: `SEQUENCE_GAP`; no state changed.
        """
        if sequence < 1 or sequence > self.done_sequence + 1:
            raise Refusal(
                ErrorReason.SEQUENCE_GAP,
                f"push {sequence} of {self.worker} came after push "
                f"{self.done_sequence}",
                sequence=sequence,
                sequence_done_max=self.done_sequence,
            )

    def open(self, sequence: int) -> PushEntry | None:
        """Finds or makes the entry of a push.

        Returns:
            The entry, or None when the push is done and acknowledged.

        Raises:
            Refusal: `SEQUENCE_GAP`; no state changed.
        """
        self.check_sequence(sequence)
        if sequence == self.done_sequence + 1:
            return self.entries.setdefault(sequence, PushEntry())
        return self.entries.get(sequence)

    def has_chunk(self, sequence: int, chunk_index: int, digest: int) -> bool:
        """Whether these bytes of a chunk came before, or its push is done.

        Nothing of such a resend needs to be looked up: where its bytes were may be
        gone by now.
        """
        entry = self.entries.get(sequence)
        known = entry.digests.get(chunk_index) if entry is not None else None
        if known is not None:
            return known == digest
        return sequence <= self.done_sequence

    def finish(
        self,
        sequence: int,
        outcome: Outcome,
        nonfinite_worker_ids: tuple[str, ...] = (),
    ) -> None:
        """Marks a push as done and frees its bytes."""
        assert sequence == self.done_sequence + 1
        self.done_sequence = sequence
        if outcome is not Outcome.DROPPED:
            self.counted_sequence = sequence
        elif sequence not in self.entries:
            return
        entry = self.entries.setdefault(sequence, PushEntry())
        entry.outcome = outcome
        entry.nonfinite_worker_ids = nonfinite_worker_ids
        entry.staged.clear()
        if entry.trailer is None:
            return
        self.steps_again |= entry.trailer.continues_batch
        if outcome is not Outcome.DROPPED:
            self.note_ranges(sequence, entry.trailer.ranges)

    def shrink(self) -> None:
        """Keeps of the done pushes of a closed incarnation only what came of them.

        Their digests take 100 bytes for each chunk of the shard. Nobody sends them
        again but a worker that has not heard of its end, and it gets the outcome.
        """
        for sequence, entry in self.entries.items():
            if entry.outcome is not None:
                self.entries[sequence] = PushEntry(
                    outcome=entry.outcome,
                    nonfinite_worker_ids=entry.nonfinite_worker_ids,
                    grad_norm=entry.grad_norm,
                    gradient_factor=entry.gradient_factor,
                )

    def acknowledge(self, sequence_unacknowledged_min: int) -> None:
        """Forgets done pushes below the worker's lowest unacknowledged sequence."""
        known = [
            sequence
            for sequence in self.entries
            if sequence < sequence_unacknowledged_min and sequence <= self.done_sequence
        ]
        for sequence in known:
            del self.entries[sequence]
        self.unacknowledged_min = max(
            self.unacknowledged_min, sequence_unacknowledged_min
        )


def _conflict(chunk_index: int) -> Refusal:
    return Refusal(
        ErrorReason.PUSH_CONFLICT,
        f"chunk {chunk_index} differs from the one received before under the same id",
    )
