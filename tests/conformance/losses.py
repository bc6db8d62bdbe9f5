"""What scripts print, step by step, and how far two runs of one are apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Line:
    """One line that a script printed: losses, then the samples that they are means of.

    Attributes:
        losses: One or more.
        count: Samples, or whatever the gradient is weighted by.
    """

    losses: tuple[float, ...]
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        *losses, count = text.split()
        return cls(tuple(map(float, losses)), int(count))


def together(lines: Sequence[Line]) -> Line:
    """The losses over the samples of all lines: their weighted means."""
    count = sum(line.count for line in lines)
    columns = zip(*(line.losses for line in lines), strict=True)
    counts = [line.count for line in lines]
    return Line(
        tuple(
            sum(loss * each for loss, each in zip(column, counts, strict=True)) / count
            for column in columns
        ),
        count,
    )


def over_workers(
    alone: Sequence[Line], workers: Sequence[Sequence[Line]], batch_size: int
) -> list[Line]:
    """The lines of one process with the whole batch, from those of the workers.

    Rank r has the samples `[r * batch_size, (r + 1) * batch_size)` of each batch. One
    for whom nothing is left of the last batch of an epoch prints nothing.
    """
    left = [list(lines) for lines in workers]
    merged = []
    for line in alone:
        parts = [
            lines.pop(0)
            for rank, lines in enumerate(left)
            if line.count > rank * batch_size and lines
        ]
        merged.append(together(parts))
    assert not any(left), "the workers took more steps than one process"
    return merged


def in_turn(workers: Sequence[Sequence[Line]]) -> list[Line]:
    """The lines of one process that accumulates the workers' batches one by one."""
    return [line for step in zip(*workers, strict=True) for line in step]


def difference(alone: Sequence[Line], other: Sequence[Line]) -> float:
    """Largest difference of a loss, relative to that of one process.

    Where that loss is smaller than the mean of its column, relative to the mean: a
    loss that comes to nothing, or changes its sign, has no digits to compare.
    """
    assert [line.count for line in alone] == [line.count for line in other]
    worst = 0.0
    for expected, found in zip(
        zip(*(line.losses for line in alone), strict=True),
        zip(*(line.losses for line in other), strict=True),
        strict=True,
    ):
        mean = sum(map(abs, expected)) / len(expected)
        worst = max(
            worst,
            *(
                abs(ours - theirs) / max(abs(theirs), mean)
                for ours, theirs in zip(found, expected, strict=True)
            ),
        )
    return worst
