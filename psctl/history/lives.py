"""Lives of a job: from its start, or a return to a checkpoint, to the next return.

With a return all shards and workers begin as new starts, and what was done since the
checkpoint is done again: a promise holds within a life.
"""

from collections.abc import Sequence
from typing import Any

from psctl.history.lines import Line, Start, Worker
from psctl.history.worker_story import ENDS

Key = tuple[int, str]
"""Generation and fence of the record that begins a life."""


def lives_of(starts: Sequence[Start]) -> list[list[Start]]:
    """What the processes did in each life, in the order of their generations.

    A process that lives on has a part in several. What a worker finds out of a push
    of the life before is left out: the return decides what became of it.
    """
    order = sorted(
        {
            _key(line)
            for start in starts
            if start.role == "shard"
            for line in start.lines
            if _begins_life(line)
        }
    )
    if len(order) < 2:
        return [list(starts)]
    lives: dict[Key, list[Start]] = {key: [] for key in order}
    members: dict[Key, set[Worker]] = {key: set() for key in order}
    for start in starts:
        if start.role == "worker":
            continue
        for key, part in _parts_of(start, order).items():
            lives[key].append(part)
            for line in part.lines:
                if line.kind == "record":
                    members[key] |= _members_of(line)
    for start in starts:
        if start.role == "worker":
            worker = start.begin.worker()
            found = (key for key in order if worker in members[key])
            key = next(found, order[-1])  # of no record: it has pushed nothing
            lives[key].append(_without_earlier(start, members[key] | {worker}))
    return list(lives.values())


def _begins_life(line: Line) -> bool:
    return line.kind == "record" and line.values.get("kind") == "start"


def _key(line: Line) -> Key:
    """Of a life. Its number alone may come again, after a lost state."""
    return line.number_of("generation"), str(line.values.get("fence"))


def _parts_of(start: Start, order: Sequence[Key]) -> dict[Key, Start]:
    """A start's lines by life. A shard's are of one, and none if it never began."""
    parts: dict[Key, Start] = {}
    waiting: list[Line] = []  # of before the first record
    part: Start | None = None
    for line in start.lines:
        if _begins_life(line) and (key := _key(line)) in order:
            part = parts.setdefault(key, Start(start.begin, waiting))
            waiting = []
        (waiting if part is None else part.lines).append(line)
    return parts


def _members_of(line: Line) -> set[Worker]:
    found: Any = line.values["members"]
    return {Worker(each[0], each[1]) for each in found}


def _without_earlier(start: Start, own: set[Worker]) -> Start:
    """A worker's start without what became of pushes of another life."""
    return Start(
        start.begin,
        [
            line
            for line in start.lines
            if line.kind not in ENDS
            or line.values.get("op") != "push"
            or line.push().worker in own
        ],
    )
