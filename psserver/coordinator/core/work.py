"""What a worker says of its own work, and what a step of it has taken lately.

Counters only grow from its joining on; whoever reads them makes the rates.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pswire.activity import Activity

REPORT_COUNT_MAX = 16
"""Reports that are kept of a worker: half a minute."""

LATELY_MS = 10_000
"""What `lately` is about, where there was a step in it; else up to all that is kept."""


@dataclass(frozen=True, slots=True)
class Logged:
    """What a script has logged under a name.

    Attributes:
        value: Mean since the report before; may be no finite number.
        step: The worker's step of the newest of these.
    """

    value: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A worker's report.

    Attributes:
        step_count: Steps of its optimizers since it joined.
        sample_count: Samples behind these, as far as they are counted.
        compute_s: Time between steps, without that of its loader.
        load_s: Time in which the script has waited for its loader.
        send_s: Time in which steps have handed gradients over.
        wait_s: Time in which steps have waited for answers.
        idle_s: Time in which it has waited for data of others or the coordinator.
        activity: What it does now.
        activity_ms: For how long it has done that.
        sent_bytes: Of its messages to shards.
        received_bytes: Of those from shards.
        encodings: By name of an encoding, bytes that were sent and received in it.
        resident_bytes: Memory of its process, 0 if it is not known.
        metrics: What the script has logged, by name.
        round_step_count: Local steps of a round, 0 where each step is a push.
        steps_since_push: Local steps since its newest push began.
        fragment_under_way: Which fragment is being pushed beside further steps, from 1;
            0 for none.
    """

    step_count: int = 0
    sample_count: int = 0
    compute_s: float = 0.0
    load_s: float = 0.0
    send_s: float = 0.0
    wait_s: float = 0.0
    idle_s: float = 0.0
    activity: Activity = Activity.UNKNOWN
    activity_ms: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    encodings: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    resident_bytes: int = 0
    metrics: Mapping[str, Logged] = field(default_factory=dict)
    round_step_count: int = 0
    steps_since_push: int = 0
    fragment_under_way: int = 0

    @property
    def total_s(self) -> float:
        """All of its time since it began to train."""
        own_s = self.compute_s + self.load_s + self.send_s + self.wait_s
        return own_s + self.idle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeans:
    """Means over the steps of a worker lately.

    Attributes:
        steps_per_s: How many it makes.
        samples_per_s: Samples behind these; None where none are counted.
        compute_ms: Of a step, what it computes.
        load_ms: What it waits for its loader.
        send_ms: What it takes to hand the gradient over.
        wait_ms: What it waits for answers.
        idle_ms: What it waits for data between two of them, which is part of neither.
        bytes_per_step: Of its messages, both ways.
    """

    steps_per_s: float
    samples_per_s: float | None = None
    compute_ms: float = 0.0
    load_ms: float = 0.0
    send_ms: float = 0.0
    wait_ms: float = 0.0
    idle_ms: float = 0.0
    bytes_per_step: float = 0.0

    @property
    def step_ms(self) -> float:
        """The whole step."""
        return self.compute_ms + self.load_ms + self.send_ms + self.wait_ms


class RecentWork:
    """The last reports of one start of one worker.

    Attributes:
        newest: Its last one, None before the first.
    """

    def __init__(self) -> None:
        self.newest: Work | None = None
        self._reports: deque[tuple[int, Work]] = deque(maxlen=REPORT_COUNT_MAX)
        self._first: Work | None = None
        self._lately: StepMeans | None = None
        self._is_measured = True

    def take(self, work: Work, now_ms: int) -> int:
        """Takes a report; one that a newer one has overtaken changes nothing.

        Returns:
            Samples that are new in it; none in the first one, which may be of a time
            before this process began.
        """
        before = self.newest
        if before is not None and (
            work.step_count < before.step_count or work.total_s < before.total_s
        ):
            return 0
        self.newest = work
        self._is_measured = False
        counters = replace(work, encodings={}, metrics={})
        self._reports.append((now_ms, counters))
        if self._first is None and work.step_count:
            self._first = counters
        known = work.sample_count if before is None else before.sample_count
        return max(0, work.sample_count - known)

    def lately(self) -> StepMeans | None:
        """Means of its steps, None before there are some to measure.

        The first one is left out: it waits for what is made once, such as a loader's
        processes or a compiled model.
        """
        if not self._is_measured:
            self._lately, self._is_measured = self._measured(), True
        return self._lately

    def _measured(self) -> StepMeans | None:
        if self._first is None:
            return None
        at_ms, newest = self._reports[-1]
        # The shortest time that is long enough and has a step in it, or all there is.
        base = self._first
        for since_ms, before in reversed(self._reports):
            if not before.step_count:
                break
            if before.step_count < newest.step_count:
                base = before
                if at_ms - since_ms >= LATELY_MS:
                    break
        return _means(base, newest) if newest.step_count > base.step_count else None


def _means(before: Work, now: Work) -> StepMeans | None:
    seconds = now.total_s - before.total_s
    count = now.step_count - before.step_count
    if seconds <= 0:
        return None
    samples = now.sample_count - before.sample_count
    new_bytes = (
        now.sent_bytes + now.received_bytes - before.sent_bytes - before.received_bytes
    )
    return StepMeans(
        steps_per_s=count / seconds,
        samples_per_s=samples / seconds if now.sample_count else None,
        compute_ms=1000 * (now.compute_s - before.compute_s) / count,
        load_ms=1000 * (now.load_s - before.load_s) / count,
        send_ms=1000 * (now.send_s - before.send_s) / count,
        wait_ms=1000 * (now.wait_s - before.wait_s) / count,
        idle_ms=1000 * (now.idle_s - before.idle_s) / count,
        bytes_per_step=new_bytes / count,
    )
