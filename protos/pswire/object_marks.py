"""What tells objects of a job apart that could stand in each other's place.

Objects that a script names are matched by name. All others are matched by their place
in the call of `prepare`, and two of equal shapes that come in another order would be
exchanged. Their marks show that, and never more: a mark that nobody else has is no sign
of an exchange, since workers may well differ.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pswire.limits import NAME_BYTES_MAX
from pswire.reasons import ErrorReason, Refusal

MARK_COUNT_MAX: Final = 1024
"""Most objects that one worker describes."""

MODEL: Final = "model"
LOADER: Final = "loader"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectMark:
    """One object.

    Attributes:
        kind: `MODEL` or `LOADER`.
        name: Its name in the job.
        described: What it is, for people, such as `Generator`.
        structure: Digest of how it is built: classes, names and sizes.
        content: Digest of what it held first; empty where `structure` tells it from
            all others of its worker.
        named: Whether the script has named it.
    """

    kind: str
    name: str
    described: str
    structure: str
    content: str = ""
    named: bool = False


def check_marks(marks: Iterable[ObjectMark]) -> None:
    """Checks what a hostile client could get wrong.

    Raises:
        Refusal: `LIMIT_EXCEEDED`.
    """
    count = 0
    for count, mark in enumerate(marks, start=1):
        texts = (mark.kind, mark.name, mark.described, mark.structure, mark.content)
        if count > MARK_COUNT_MAX or any(
            len(text.encode(errors="replace")) > NAME_BYTES_MAX for text in texts
        ):
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"more than {MARK_COUNT_MAX} models and loaders, or the description "
                f"of one has more than {NAME_BYTES_MAX} bytes",
            )


def exchanged(job: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Which of the job's objects stand under other names here.

    Args:
        job: Digest of each object of the job by name.
        here: The same of a worker.

    Returns:
        For each of them, the name that it has in the job by the one here. Empty where
        nothing is exchanged for certain: such names form cycles.
    """
    named: dict[str, list[str]] = {}
    for name, digest in job.items():
        named.setdefault(digest, []).append(name)
    moved = {
        name: named[digest][0]
        for name, digest in here.items()
        if name in job and job[name] != digest and len(named.get(digest, ())) == 1
    }
    while True:
        targets = list(moved.values())
        kept = {
            name: target
            for name, target in moved.items()
            if target in moved and name in targets and targets.count(target) == 1
        }
        if len(kept) == len(moved):
            return kept
        moved = kept


def order_difference(
    job: Iterable[ObjectMark], here: Iterable[ObjectMark], kind: str
) -> list[str]:
    """Lines that tell of objects of a kind that come in another order than the job's.

    Empty where none do, or nothing shows that they do.
    """
    mine = {mark.name: mark for mark in job if mark.kind == kind}
    theirs = {
        mark.name: mark
        for mark in here
        if mark.kind == kind and mark.name in mine and not mark.named
    }
    theirs = {n: mark for n, mark in theirs.items() if not mine[n].named}
    moved = exchanged(
        {name: mark.structure for name, mark in mine.items()},
        {name: mark.structure for name, mark in theirs.items()},
    )
    if moved:
        return [
            f"! {name}: {mine[name].described} in the job, "
            f"{theirs[name].described} here, which is {target} in the job"
            for name, target in moved.items()
        ]
    moved = exchanged(
        {name: mark.content for name, mark in mine.items() if mark.content},
        {name: mark.content for name, mark in theirs.items() if mark.content},
    )
    what = "first values" if kind == MODEL else "data"
    return [
        f"! {name}: here with the {what} of the job's {target} "
        f"({theirs[name].described})"
        for name, target in moved.items()
    ]


def doubts(job: Iterable[ObjectMark], here: Iterable[ObjectMark]) -> list[str]:
    """What a worker's log should say of models that may not be the job's.

    Args:
        job: Marks of the job.
        here: Those of a worker with the same tensors, none of which are exchanged for
            certain.
    """
    mine = {mark.name: mark for mark in job if mark.kind == MODEL}
    pairs = [
        (mine[mark.name], mark)
        for mark in here
        if mark.kind == MODEL and mark.name in mine
    ]
    lines = [
        f"{own.name} has the tensors of the job's and is built otherwise: it, or a "
        f"module in it, is of another class ({theirs.described} in the job, "
        f"{own.described} here), so that workers may compute different things"
        for theirs, own in pairs
        if own.structure != theirs.structure
    ]
    unsettled = [
        own.name
        for theirs, own in pairs
        if not (own.named or theirs.named)
        and own.structure == theirs.structure
        and own.content
        and theirs.content
        and own.content != theirs.content
    ]
    if len(unsettled) > 1:
        lines.append(
            f"{' and '.join(unsettled)} are of one class with equal tensors, and "
            "their first values are not the job's, so that only their order in the "
            "call of prepare() tells which is which; name them on all workers, as in "
            "ps.prepare(generator=G, discriminator=D, ...)"
        )
    return lines
