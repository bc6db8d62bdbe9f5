"""The merges of mode quorum, worked out again from what shards wrote down.

Not asked of the rules by which a shard closes a clock: one that is wrong there is to be
noticed here.
"""

from collections.abc import Mapping
from typing import NamedTuple

from psctl.history.findings import Findings
from psctl.history.lines import Line, Push, push_of


class Sent(NamedTuple):
    """What the trailer of a push says.

    Attributes:
        weight: Samples behind it, or what its strategy has in place of these.
        slack_ms: How long its worker can go on without the answer, None for any time.
    """

    weight: float
    slack_ms: int | None


class Merges:
    """The clocks that shard 0 has closed by a quorum.

    Attributes:
        pushes: Of each clock, the pushes with weight that it consists of.
    """

    def __init__(self) -> None:
        self.pushes: dict[int, frozenset[Push]] = {}
        self._places: dict[int, str] = {}
        self._terms: list[tuple[int, int, int]] = []  # from which clock on

    def note_record(self, line: Line) -> None:
        """A record says by which quorum clocks close from then on."""
        begin = line.number_of("terms_clock", 0) + 1
        quorum, window_ms = (
            line.number_of("quorum", 0),
            line.number_of("grace_window_ms", 0),
        )
        if not self._terms or self._terms[-1][1:] != (quorum, window_ms):
            self._terms.append((begin, quorum, window_ms))

    def take(
        self,
        line: Line,
        sent: Mapping[Push, Sent],
        member_count: int,
        findings: Findings,
    ) -> None:
        """A clock was closed.

        Args:
            line: Says how.
            sent: Trailers that this shard had by then.
            member_count: Workers that may push for it.
            findings: Takes what is wrong.
        """

        def require(kept: object, text: str) -> None:
            said = f"clock {clock} was closed by a quorum"
            findings.require("G40", bool(kept), line.place, f"{said} {text}")

        clock, closed_ms = line.number_of("clock"), line.number_of("closed_ms")
        active, quorum = line.number_of("active"), line.number_of("quorum")
        window_ms = line.number_of("window_ms")
        before = self._places.setdefault(clock, line.place)
        require(before == line.place, f"a second time, after {before}")
        wanted = [terms for terms in self._terms if terms[0] <= clock]
        known = wanted[-1][1:] if wanted else (quorum, window_ms)
        require(
            (quorum, window_ms) == known,
            f"of {quorum} and a window of {window_ms} ms, where the record has "
            f"{known[0]} and {known[1]} ms",
        )
        times, ends_ms = [], []
        for *push, weight, at_ms, slack_ms in line.values["arrivals"]:
            each = push_of(push)
            require(
                sent.get(each) == Sent(weight, slack_ms),
                f"with weight {weight} and slack {slack_ms} ms of {each}, whose "
                f"trailer says {sent.get(each)}",
            )
            times.append(int(at_ms))
            if slack_ms is not None:
                ends_ms.append(int(at_ms) + int(slack_ms))
        self.pushes[clock] = frozenset(push_of(a[:3]) for a in line.values["arrivals"])
        if not active:
            return  # nobody has data: it merges nothing
        require(active <= member_count, f"of {active}, of {member_count} members")
        least = min(quorum, active)
        require(len(times) >= least, f"with {len(times)} pushes, not {least}")
        if len(times) < least or len(times) >= active:
            return
        quorum_ms = sorted(times)[least - 1]
        end_ms = max(quorum_ms, min([quorum_ms + window_ms, *ends_ms]))
        require(
            closed_ms >= end_ms,
            f"at {closed_ms} ms, though its window ended at {end_ms} ms and "
            f"{active - len(times)} more could come",
        )
