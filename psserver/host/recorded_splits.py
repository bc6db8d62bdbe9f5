"""The splits of a job at work: what is recorded is kept before it is told."""

import logging

from psserver.core.split_book import RecordedSplit, SplitBook
from psserver.storage.job_store import JobStore

log = logging.getLogger("psserver.coordinator")


class RecordedSplits:
    """Splits by name.

    Args:
        store: The job's file, with those of an earlier process.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._book = SplitBook(store.load_splits())

    def record(self, split: RecordedSplit) -> RecordedSplit:
        """Records the first split of a name; returns what is recorded under it.

        Raises:
            Refusal: `MALFORMED_MESSAGE` or `LIMIT_EXCEEDED`; no state changed.
        """
        recorded = self._book.record(split)
        if recorded is split:
            self._store.save_split(split)
            log.info(
                "worker %r has recorded split %r of %d items, digest %s",
                split.recorder,
                split.name[:64],
                split.item_count,
                split.digest[:12],
            )
        return recorded

    def named(self, name: str) -> RecordedSplit | None:
        """The split of a name."""
        return self._book.named(name)

    def all(self) -> tuple[RecordedSplit, ...]:
        """All splits, in the order of recording."""
        return self._book.all()
