"""What one start of one worker sent and was answered, checked on the way."""

from dataclasses import dataclass
from typing import Final

from psctl.history.findings import Findings
from psctl.history.lines import Line, Push
from psctl.history.shard_story import DROPPED, Newest, bound_of

ENDS: Final = ("ok", "fail", "unknown")

EVICTED: Final = "evicted"
"""Outcome of a push that a later start of its worker found out not to count."""


@dataclass(slots=True)
class PushOfWorker:
    """What a worker knows of one of its pushes; the outcome is empty while unknown."""

    invoked: Line
    outcome: str = ""
    ended: Line | None = None

    @property
    def is_acknowledged(self) -> bool:
        return bool(self.outcome)


class WorkerStory:
    """One start of one worker."""

    def __init__(
        self, begin: Line, findings: Findings, pushes: dict[Push, PushOfWorker]
    ) -> None:
        """Begins with the first line; `pushes` are those of all workers of the job.

        A later start may find out how an earlier one's push ended.
        """
        self.worker = begin.worker()
        self.pushes = pushes
        self._sequence = 0
        self._findings = findings
        self._newest: dict[tuple[int, int], Newest] = {}

    def take(self, line: Line) -> None:
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
        elif known.is_acknowledged and known.outcome != DROPPED:
            # A new leader of a host group has not heard of what was dropped.
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
        index = reply.number_of("shard")
        newest = self._newest.setdefault(
            (index, reply.number_of("incarnation")), Newest()
        )
        newest.check(
            reply,
            self._findings,
            lambda what: f"{self.worker} received {what} from shard {index}",
        )
        bound = bound_of(reply)
        if bound is None or reply.values.get("outcome") == DROPPED:
            return
        clock, frontier = reply.number_of("clock"), reply.number_of("frontier")
        self._findings.require(
            "G6",
            frontier >= clock - bound,
            reply.place,
            f"{self.worker} at clock {clock} received frontier {frontier} from shard "
            f"{index}, with a bound of {bound}",
        )
