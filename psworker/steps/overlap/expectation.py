"""Which gradients will come before the next step, as the steps before have shown.

A script may go backward several times for one step, use a parameter never, or step
several optimizers in turn. What it did last time says when a gradient is final. It
decides only when chunks leave: a wrong guess costs bytes, never a number.
"""

from collections import Counter
from collections.abc import Mapping

from pswire.placement import Chunk, Placement
from pswire.schema import OptimizerSpec


class Expectation:
    """What has come since the last step, against what came before earlier ones."""

    def __init__(
        self, placement: Placement, specs: Mapping[str, OptimizerSpec]
    ) -> None:
        """Expects nothing yet.

        Args:
            placement: How tensors are cut.
            specs: Optimizers by name.
        """
        self._held = {
            name: frozenset(spec.entry_indexes) for name, spec in specs.items()
        }
        self._chunks = placement.chunks_by_entry
        self._successors: dict[str, str] = {}
        self._newest = ""
        self._known: dict[str, Counter[int]] = {}
        self._counts: Counter[int] = Counter()
        self._missing: dict[int, set[int]] = {}

    @property
    def optimizer(self) -> str | None:
        """The one that the next step is of, if that is known."""
        if len(self._held) == 1:
            return next(iter(self._held))
        return self._successors.get(self._newest)

    def declare(self, spec: OptimizerSpec) -> None:
        """An optimizer has other entries from now on; what it did is forgotten."""
        self._held[spec.name] = frozenset(spec.entry_indexes)
        self._known.pop(spec.name, None)
        self._missing.clear()

    def note(self, entry_index: int) -> list[Chunk]:
        """A backward pass has added to a gradient; the chunks that are final by it."""
        self._counts[entry_index] += 1
        optimizer = self.optimizer
        if optimizer is None or entry_index not in self._held[optimizer]:
            return []
        known = self._known.get(optimizer, Counter())
        if self._counts[entry_index] != known[entry_index]:
            return []
        ready = []
        for chunk in self._chunks.get(entry_index, ()):
            missing = self._missing.get(chunk.index)
            if missing is None:
                missing = self._missing[chunk.index] = {
                    piece.entry_index
                    for piece in chunk.slices
                    if known[piece.entry_index]
                    and piece.entry_index in self._held[optimizer]
                    and self._counts[piece.entry_index] < known[piece.entry_index]
                }
            missing.discard(entry_index)
            if not missing:
                ready.append(chunk)
        return ready

    def stepped(self, optimizer: str) -> None:
        """A step of an optimizer has taken what has come."""
        if self._newest:
            self._successors[self._newest] = optimizer
        self._newest = optimizer
        self._known[optimizer] = self._counts
        self._counts = Counter()
        self._missing.clear()
