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
    """What may be deleted, oldest first; nothing that is newer than `verified`.

    Of those with finite values and of the others, each by itself, the newest stay: a
    run that has diverged does not push out what it could go back to.

    Args:
        held: All checkpoints of the job.
        verified: The newest with finite values, of which every byte was read back.
        keep: How many of each kind stay, at least 1.
    """
    kinds: dict[tuple[bool, bool], list[CheckpointName]] = {}
    for each in held:
        kinds.setdefault((each.is_whole, each.is_finite), []).append(each.name)
    going = []
    for (is_whole, _), names in kinds.items():
        candidates = sorted(names)
        if is_whole:
            candidates = candidates[: -max(1, keep)]
        going += [name for name in candidates if name < verified]
    return sorted(going)
