"""Which checkpoints of a folder are not needed any more: a pure function."""

from collections.abc import Iterable
from typing import NamedTuple

from pswire.checkpoint.manifest import CheckpointName


class Held(NamedTuple):
    """A checkpoint of one job.

    Attributes:
        name: Its name.
        is_whole: Whether all files are there, in their sizes.
        is_finite: Whether its values are finite.
    """

    name: CheckpointName
    is_whole: bool
    is_finite: bool = True


def superfluous(
    held: Iterable[Held], verified: CheckpointName, keep: int
) -> list[CheckpointName]:
    """What may be deleted, oldest first.

    Of those with finite values and of the others, each by itself, the newest stay: a
    run that has diverged does not push out what it could go back to. Nor does what is
    newer than `verified`, and so may be damaged; of that nothing finite goes.

    Args:
        held: All checkpoints of the job.
        verified: The newest with finite values, of which every byte was read back.
        keep: How many of each kind stay, at least 1.
    """
    going: list[CheckpointName] = []
    finite: list[CheckpointName] = []
    diverged: list[CheckpointName] = []
    for each in held:
        if each.is_whole and not each.is_finite:
            diverged.append(each.name)
        elif each.name <= verified:
            is_kept = each.is_whole or each.name == verified
            (finite if is_kept else going).append(each.name)
    for names in (finite, diverged):
        going += sorted(names)[: -max(1, keep)]
    return sorted(going)
