"""One clock while it is open: who has sent what, and what can be applied.

Who contributes is said by the clock table, from records; never by counting messages
and never by what a request says. Chunks are released only when the verdicts of all
contributors are in (*finite first*).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from psserver.shard.core.dedupe import PushEntry
from psserver.shard.core.push import Trailer
from pswire.membership import WorkerKey


@dataclass(slots=True)
class OpenClock:
    """Progress of one clock.

    Attributes:
        clock: Its number.
        applying: Chunks that the owner is applying now.
        applied: Chunks that are done, also those that nobody sent.
        torn: Workers whose chunk contradicted their verdict.
        is_settled: Whether its optimizer and settings are known to the shard.
        source: Whose optimizer and hyperparameters count, while it is armed.
    """

    clock: int
    applying: set[int] = field(default_factory=set)
    applied: set[int] = field(default_factory=set)
    torn: set[str] = field(default_factory=set)
    is_settled: bool = False
    source: Trailer | None = None
    _missing: dict[int, set[WorkerKey]] | None = None

    @property
    def is_armed(self) -> bool:
        """Whether all trailers were in when the clock was last looked at."""
        return self._missing is not None

    def disarm(self) -> None:
        """Forgets who is missing, since the contributors have changed."""
        self._missing = None
        self.source = None

    def arm(
        self,
        entries: Mapping[WorkerKey, PushEntry],
        chunk_indexes: Iterable[int],
        source: Trailer,
    ) -> None:
        """Works out whose bytes each chunk still lacks; all trailers are in.

        A chunk that nobody with weight sends is done at once. Chunks that are there
        already are released in ascending order: the next forward pass begins with them.
        """
        missing: dict[int, set[WorkerKey]] = {}
        for index in sorted(chunk_indexes):
            if index in self.applied:
                continue
            senders = {
                worker
                for worker, entry in entries.items()
                if entry.trailer is not None
                and entry.trailer.weight > 0
                and index in entry.trailer.chunk_indexes
            }
            if senders:
                missing[index] = {
                    worker for worker in senders if index not in entries[worker].digests
                }
            else:
                self.applied.add(index)
        self._missing = missing
        self.source = source

    def note_chunk(self, worker: WorkerKey, chunk_index: int) -> None:
        """A contributor's chunk has come."""
        if self._missing is not None and chunk_index in self._missing:
            self._missing[chunk_index].discard(worker)

    def take_ready(self, among: Iterable[int] | None = None) -> list[int]:
        """Chunks whose contributions are complete; marks them as being applied.

        Args:
            among: Chunks to look at; all when None.
        """
        if self._missing is None:
            return []
        ready = [
            index
            for index in (self._missing if among is None else among)
            if index in self._missing and not self._missing[index]
        ]
        for index in ready:
            del self._missing[index]
            self.applying.add(index)
        return ready

    @property
    def is_done(self) -> bool:
        """Whether every chunk of this shard is done."""
        return self._missing is not None and not self._missing and not self.applying
