"""Norms of clocks, for a job that clips by the global norm."""

from collections.abc import Callable, Sequence

from psserver.shard.core.effects import MeasureClock, StagedContribution
from psserver.shard.host.arithmetic import Arithmetic
from psserver.shard.host.chunk_updates import Failed, byte_count, with_bytes
from psserver.shard.host.shard_model import ShardModel
from pswire.clipping import sum_of_parts


class ClockNorms:
    """Carries out `MeasureClock`.

    The mean is worked out here and once more when it is applied: keeping it in between
    would cost a second gradient of memory.

    Args:
        arithmetic: Where the work is done, each chunk by itself.
        pump: Called when a thread has ended one.
    """

    def __init__(self, arithmetic: Arithmetic, pump: Callable[[], None]) -> None:
        self._arithmetic = arithmetic
        self._pump = pump

    def begin(self, model: ShardModel, effect: MeasureClock, failed: Failed) -> None:
        """Measures all chunks of a clock and tells the core.

        Args:
            model: What the shard holds.
            effect: The order.
            failed: Given a chunk's index and the error of a thread.
        """
        sums: dict[int, float] = {}

        def note(chunk_index: int, part: float) -> None:
            sums[chunk_index] = part
            if len(sums) == len(effect.chunks):
                tell()

        def tell() -> None:
            model.core.clock_measured(effect.choice, sum_of_parts(sums.values()))
            self._pump()

        def begin(chunk_index: int, parts: Sequence[StagedContribution]) -> None:
            self._arithmetic.run(
                lambda: model.engine.sum_of_squares(
                    chunk_index,
                    contributions=with_bytes(parts),
                    total_weight=effect.total_weight,
                    optimizer=effect.optimizer,
                    spec_digest=effect.spec_digest,
                ),
                byte_count(parts),
                then=lambda part: note(chunk_index, part),
                failed=lambda error: failed(chunk_index, error),
            )

        if not effect.chunks:
            tell()
        for each in effect.chunks:
            begin(*each)
