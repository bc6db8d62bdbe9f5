"""The splits of a job at work: what is recorded is kept before it is told."""

import logging
from collections.abc import Callable

from psserver.coordinator.core.coordinator_effects import Persist
from psserver.coordinator.core.data.split_book import SplitBook
from pswire.recorded_split import RecordedSplit

log = logging.getLogger("psserver.coordinator")


class RecordedSplits:
    """Splits by name.

    Args:
        splits: Those of an earlier process.
        keep: Writes a change that was made, or has it undone and refuses it.
    """

    def __init__(
        self,
        splits: tuple[RecordedSplit, ...],
        keep: Callable[[Persist, Callable[[], None]], None],
    ) -> None:
        self._keep = keep
        self._book = SplitBook(splits)

    def record(self, split: RecordedSplit) -> RecordedSplit:
        """Records the first split of a name; returns what is recorded under it.

        Raises:
            Refusal: `MALFORMED_MESSAGE`, `LIMIT_EXCEEDED` or `STATE_NOT_WRITTEN`; no
                state changed.
        """
        recorded = self._book.record(split)
        if recorded is split:
            self._keep(Persist(split=split), lambda: self._book.forget(split.name))
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
