"""What the thread of a script does and for how long, and what the script logs.

Written by that thread without a lock, and read by others: what they see may be a moment
old. Counters only grow, but for a new start of the worker.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import get_ident
from typing import Final, TypeVar, cast

import torch

from pswire.activity import Activity
from pswire.limits import METRIC_COUNT_MAX, NUMBER_MAX
from pswire.names import metric_name_problem
from pswire.span_log import Recording, SpanLog
from psworker.errors import ConfigurationError
from psworker.transport.values import WorkDone

T = TypeVar("T")

LogValue = float | torch.Tensor
"""What a script logs: a number, or a tensor of one element."""


KINDS: Final = {
    Activity.COMPUTING: "compute",
    Activity.LOADING: "load",
    Activity.SENDING: "send",
    Activity.WAITING: "wait",
    Activity.IDLE: "idle",
}
"""Their words in traces and metrics."""


class _Logged:
    """The sum of what was logged under a name since it was read last."""

    __slots__ = ("count", "step", "total")

    def __init__(self) -> None:
        self.total: LogValue = 0.0
        self.count = 0
        self.step = 0


class WorkLog:
    """What one script does.

    Attributes:
        step_count: Steps of its optimizers.
        sample_count: Samples behind these, as far as they are counted.
        activity: What its thread does.
        spans: Its part in traces.
        round_step_count: Local steps of a round, 0 where each step is a push.
        steps_since_push: Local steps since its newest push began.
        fragment_under_way: Which fragment is being pushed beside further steps, from 1;
            0 for none.
    """

    def __init__(self) -> None:
        self.step_count = 0
        self.sample_count = 0
        self.activity = Activity.UNKNOWN
        self.spans = SpanLog()
        self.round_step_count = 0
        self.steps_since_push = 0
        self.fragment_under_way = 0
        self._since_s = 0.0
        self._seconds = [0.0] * len(Activity)
        self._thread_id = 0
        self._logged: dict[str, _Logged] = {}
        self._metrics: dict[str, tuple[float, int]] = {}

    # The script's thread

    def start(self) -> None:
        """The script trains from now on, in this thread."""
        self._thread_id = get_ident()
        self._since_s = time.perf_counter()
        self.activity = Activity.COMPUTING

    def begin_step(self) -> Activity:
        """A step begins, in whichever thread; what the script did before."""
        self._thread_id = get_ident()
        return self.enter(Activity.SENDING)

    def enter(self, activity: Activity) -> Activity:
        """The script does this from now on; returns what it did before.

        Nothing changes by another thread than that of its steps, such as one that draws
        batches ahead; nor while it waits for others, by what it sends them meanwhile.
        """
        is_for_others = self.activity is Activity.IDLE and activity in _OF_STEPS
        return self.activity if is_for_others else self.go_back(activity)

    def go_back(self, activity: Activity) -> Activity:
        """As `enter`, and also where the script has waited for others within a step."""
        before = self.activity
        if get_ident() == self._thread_id:
            now_s = time.perf_counter()
            since_s, self._since_s = self._since_s, now_s
            self._seconds[before] += now_s - since_s
            self.activity = activity
            if (recording := self.spans.recording) is not None:
                self._record(recording, before, since_s, now_s)
        return before

    def _record(
        self, recording: Recording, activity: Activity, since_s: float, now_s: float
    ) -> None:
        """Notes what the script did until now: `time.perf_counter` is spans' clock."""
        if activity:
            begin_us, end_us = int(since_s * 1e6), int(now_s * 1e6)
            kind = KINDS[activity]
            recording.note(kind, begin_us, end_us, self.step_count + 1)

    def note_step(self, sample_count: float) -> None:
        """A step has pushed a gradient, of samples as far as they are counted.

        A weight that a script gives counts as samples, however large it is.
        """
        self.step_count += 1
        self.sample_count = int(min(self.sample_count + sample_count, NUMBER_MAX))

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time until each is there counts as waiting for it."""
        iterator = iter(batches)
        end = object()
        while True:
            before = self.enter(Activity.LOADING)
            try:
                batch = next(iterator, end)
            finally:
                self.enter(before)
            if batch is end:
                return
            yield cast("T", batch)

    def idle(self, answer: Callable[[], T]) -> T:
        """What the coordinator answers of data; no loader is faster than that."""
        before = self.enter(Activity.IDLE)
        try:
            return answer()
        finally:
            self.enter(before)

    def log(self, values: Mapping[str, object]) -> None:
        """Notes values that the script logs; reads no tensor.

        Raises:
            ConfigurationError: A name or a value can't be logged; nothing is.
        """
        found = {name: _checked(name, value) for name, value in values.items()}
        known = {*self._metrics, *self._logged, *found}
        if len(known) > METRIC_COUNT_MAX:
            raise ConfigurationError(
                f"ps.log() takes {METRIC_COUNT_MAX} names in all, and these are "
                f"{len(known)}: {', '.join(sorted(known))}; log fewer"
            )
        for name, value in found.items():
            logged = self._logged.get(name)
            if logged is None:
                logged = self._logged[name] = _Logged()
            logged.total = logged.total + value
            logged.count += 1
            logged.step = self.step_count

    # Others

    @property
    def seconds(self) -> tuple[float, ...]:
        """How long the script did what, by `Activity`, up to its last change."""
        return tuple(self._seconds)

    @property
    def logged(self) -> dict[str, float]:
        """What the script has logged, as it was read last."""
        return {name: value for name, (value, _) in list(self._metrics.items())}

    def restart(self) -> None:
        """Counts from 0 for a new start of the worker, while its script waits."""
        self.step_count = self.sample_count = 0
        self._seconds = [0.0] * len(Activity)

    def read(self) -> WorkDone:
        """What the script has done so far, and has logged.

        Tensors that were logged are read here, which waits for their device.
        """
        logged, self._logged = self._logged, {}
        for name, each in list(logged.items()):
            if each.count:  # else it was being noted just now
                self._metrics[name] = (float(each.total) / each.count, each.step)
        activity, since_s = self.activity, self._since_s
        seconds = list(self._seconds)
        # What is under way counts too, or a long wait would be seen at its end only.
        activity_s = max(0.0, time.perf_counter() - since_s) if activity else 0.0
        seconds[activity] += activity_s
        return WorkDone(
            step_count=self.step_count,
            sample_count=self.sample_count,
            seconds=tuple(seconds),
            activity=activity,
            activity_s=activity_s,
            metrics=dict(self._metrics),
            round_step_count=self.round_step_count,
            steps_since_push=self.steps_since_push,
            fragment_under_way=self.fragment_under_way,
        )


_OF_STEPS: Final = (Activity.SENDING, Activity.WAITING)

NOT_A_NUMBER: Final = "it is logged as a number, or as a tensor of one element"


def _checked(name: str, value: object) -> LogValue:
    """What is added up of a value.

    Raises:
        ConfigurationError: It can't be logged.
    """
    if problem := metric_name_problem(name):
        raise ConfigurationError(
            f"ps.log() takes no value under the name {name[:64]!r}: it {problem}"
        )
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ConfigurationError(
                f"ps.log({name}=...) got a tensor of shape {tuple(value.shape)} and "
                f"type {value.dtype}: {NOT_A_NUMBER}, so log its mean"
            )
        if value.is_meta:
            raise ConfigurationError(
                f"ps.log({name}=...) got a tensor on the meta device, which has no "
                "value: log it where the model is computed"
            )
        # On its device and in order with what that does: nobody waits for it here.
        return value.detach().reshape(()).float()
    try:
        return float(cast("float", value))
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(
            f"ps.log({name}=...) got a {type(value).__qualname__}: {NOT_A_NUMBER}"
        ) from None
