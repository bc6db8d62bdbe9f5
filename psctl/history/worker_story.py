"""What one start of one worker sent and was answered, checked on the way."""

from dataclasses import dataclass, field
from typing import Final

from psctl.history.findings import Findings
from psctl.history.lines import Line, Push
from psctl.history.shard_story import DROPPED, bound_of

ENDS: Final = ("ok", "fail", "unknown")

EVICTED: Final = "evicted"
"""Outcome of a push that a later start of its worker found out not to count."""


@dataclass(slots=True)
class PushOfWorker:
    """What a worker knows of one of its pushes.

    Attributes:
        invoked: Line that says it was sent.
        outcome: What every shard said, empty while that is unknown.
        ended: Line that says so.
    """

    invoked: Line
    outcome: str = ""
    ended: Line | None = None

    @property
    def is_acknowledged(self) -> bool:
        """Whether the worker was told what became of it."""
        return bool(self.outcome)


@dataclass(slots=True)
class _Told:
    version: int = 0
    frontier: int = 0
    places: dict[str, str] = field(default_factory=dict)


class WorkerStory:
    """One start of one worker."""

    def __init__(
        self, begin: Line, findings: Findings, pushes: dict[Push, PushOfWorker]
    ) -> None:
        """Begins the story.

        Args:
            begin: First line of the history.
            findings: Where breaks are told.
            pushes: Of all workers of the job. A later start may find out what became
                of an earlier one's.
        """
        self.worker = begin.worker()
        self.pushes = pushes
        self._sequence = 0
        self._findings = findings
        self._told: dict[tuple[int, int], _Told] = {}

    def take(self, line: Line) -> None:
        """Replays one line."""
        if line.kind == "invoke" and line.text_of("op") == "push":
            self._invoke(line)
        elif line.kind in ENDS:
            if line.text_of("op") == "push":
                self._end(line)
            for reply in line.values.get("replies", ()):
                self._check_reply(Line(line.file, line.number, reply))

    def _invoke(self, line: Line) -> None:
        push = line.push()
        known = self.pushes.get(push)
        if known is None:
            self._findings.require(
                "G4",
                push.sequence > self._sequence,
                line.place,
                f"{push} was begun after push {self._sequence}",
            )
            self._sequence = max(self._sequence, push.sequence)
            self.pushes[push] = PushOfWorker(line)
        elif known.is_acknowledged:
            self._findings.broken(
                "G1", line.place, f"{push} was sent again after it was acknowledged"
            )

    def _end(self, line: Line) -> None:
        push = line.push()
        known = self.pushes.get(push)
        if known is None:  # an earlier start's, whose own history is not here
            known = self.pushes[push] = PushOfWorker(line)
        if line.kind == "ok":
            known.outcome, known.ended = line.text_of("outcome"), line
        elif line.kind == "fail":
            known.outcome, known.ended = EVICTED, line

    def _check_reply(self, reply: Line) -> None:
        shard = (reply.number_of("shard"), reply.number_of("incarnation"))
        told = self._told.setdefault(shard, _Told())
        version, frontier = reply.number_of("version"), reply.number_of("frontier")
        for name, value, before in (
            ("version", version, told.version),
            ("frontier", frontier, told.frontier),
        ):
            self._findings.require(
                "G4",
                value >= before,
                reply.place,
                f"{self.worker} received {name} {value} from shard {shard[0]} after "
                f"{before} at {told.places.get(name, 'the start')}",
            )
            told.places[name] = reply.place
        told.version = max(told.version, version)
        told.frontier = max(told.frontier, frontier)
        bound = bound_of(reply)
        if bound is None or reply.values.get("outcome") == DROPPED:
            return
        clock = reply.number_of("clock")
        self._findings.require(
            "G6",
            frontier >= clock - bound,
            reply.place,
            f"{self.worker} at clock {clock} received frontier {frontier} from shard "
            f"{shard[0]}, with a bound of {bound}",
        )
