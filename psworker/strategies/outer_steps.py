"""The outer steps of a worker: what it pushes, and takes once the job has answered."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from pswire.activity import Activity
from pswire.leased_data import DataRange
from pswire.membership import Mode
from pswire.number_range import NumberRange
from psworker.backends.backend import Backend
from psworker.errors import ConfigurationError, StepTimeoutError, refuse_numbers
from psworker.optim.push_result import PushResult
from psworker.optim.step_contents import RoundPush
from psworker.strategies.anchors import Anchors
from psworker.strategies.inner_state import InnerStates
from psworker.strategies.pace import Timing
from psworker.strategies.rounds import (
    Progress,
    Rounds,
    fragment_drawn,
    fragment_in_turn,
)
from psworker.strategies.sender import Sender
from psworker.strategies.strategy import (
    Strategy,
    Turn,
    answer_of,
    check_outer,
    mode_problem,
    weight_of,
)
from psworker.transport.values import DrawnData

logger: Final = logging.getLogger("psworker")

_FINITE: Final = NumberRange(-1e30, 1e30)


LAST_MISSED_COUNT_MAX: Final = 3
"""Times that a worker without further data pushes a fragment in vain. After the first
one mode quorum has waited for it: the others would be late for the same reason."""

LATE_TEXT: Final = (
    f"{LAST_MISSED_COUNT_MAX} times the job closed its clock before the push was "
    "there, though it waits for a last one; the link of this worker is too slow for "
    "the job: send fewer bytes (compression, fragments), or push less often (more "
    "local steps)"
)


class OuterSteps:
    """Those of a worker that has joined, one under way at a time.

    In the script's thread. An outer step is a push within the local step that ends a
    round; or it begins there and goes on beside the local steps to come, if the
    strategy takes what comes back so many later. Where a push raises, the next local
    step makes it again first.

    Attributes:
        rounds: The worker's.
        timing: What local steps and pushes take.
        has_data: Whether the script takes further local steps, as far as loaders have
            said. What these wait for the job goes into the worker's history.
    """

    def __init__(
        self,
        strategy: Strategy,
        backend: Backend,
        anchors: Anchors,
        inner: InnerStates,
        optimizers: Sequence[Any],
        kinds: Sequence[type[Optimizer]],
        now: Callable[[], float],
    ) -> None:
        """Begins with the job's values.

        Args:
            strategy: What to push and take.
            backend: What trains the twins.
            anchors: The twins.
            inner: State of the inner optimizers.
            optimizers: The outer ones, as the backend steps them, one a fragment.
            kinds: Their classes, as the strategy has made them.
            now: A clock that only goes on, in seconds.
        """
        self._strategy = strategy
        self._backend = backend
        self._worker = backend.between_pushes
        self.rounds = Rounds(strategy.fragment_count, strategy.taken_after)
        self.timing = Timing(now)
        self._anchors = anchors
        self._inner = inner
        self._optimizers = optimizers
        self._kinds = kinds
        self._sender = Sender()
        self._mode = backend.place.mode
        self._clock = 0  # of the push under way
        self._weight = 0.0
        self._push_before: PushResult | None = None
        self.has_data = True
        self.start_over()

    def start_over(self) -> None:
        """The worker has joined, or joined anew: it goes on from the job's values."""
        self._sender.drop()
        self._rejoin_count = self._worker.rejoin_count
        self.rounds.start_over()
        self._anchors.start_over()

    def has_rejoined(self) -> bool:
        """Whether the worker has joined anew, and begins again from the anchor."""
        count = self._worker.rejoin_count
        if count == self._rejoin_count:
            return False
        self.start_over()
        return True

    def end(self) -> None:
        """Nothing is pushed any more."""
        self._sender.close()

    @property
    def is_sending(self) -> bool:
        """Whether a push is under way beside the script."""
        return self._sender.is_open

    # Where the worker stands

    @property
    def turn(self) -> Turn:
        """The round that begins, and the worker's place in it."""
        clock = self._backend.place.clock + 1
        return Turn(clock, *self._worker.place_at(clock))

    @property
    def progress(self) -> Progress:
        """What is behind the next push."""
        rounds, place = self.rounds, self._backend.place
        fragment = self._next_fragment
        return Progress(
            fragment=fragment,
            work=rounds.work_behind(fragment),
            steps_since_push=rounds.steps_since_push,
            total_step_count=rounds.total_step_count,
            push_count=rounds.push_count,
            clock=place.clock + 1,
            rank=place.rank or 0,
            worker_count=self._worker.place_at(place.clock + 1)[1],
            compute_s=self.timing.compute_s,
            exchange_s=self.timing.exchange_s,
        )

    @property
    def _next_fragment(self) -> int:
        clock, count = self._backend.place.clock + 1, len(self._anchors.fragments)
        if self._strategy.fragments_are_drawn:
            return fragment_drawn(clock, count)
        return fragment_in_turn(clock, count)

    @property
    def _never_waits(self) -> bool:
        """Whether a local step goes on without an answer that is not there yet."""
        is_beside = self._strategy.taken_after > 0
        return is_beside and self._backend.place.mode == Mode.QUORUM.label

    # Pushes

    def push(self, *, is_beside: bool) -> None:
        """Pushes the next fragment, and takes what comes back.

        Args:
            is_beside: Whether it only begins: the script goes on meanwhile.
        """
        self._anchors.look()
        if new := self._anchors.take_up():
            self._optimizers[-1].add_param_group({"params": new})
        progress = self.progress
        self._look_at_mode(progress.clock)
        fragment = self._anchors.fragments[progress.fragment]
        if self._strategy.pulls_first:
            self._worker.pull()
            if self.has_rejoined():
                return
        weight = weight_of(self._strategy, progress)
        self._set_hyperparameters(progress)
        with torch.no_grad():
            pushed = self._strategy.push(fragment.anchor, fragment.local, progress)
            self._inner.send()
        fragment.set_gradients(pushed)
        if self._strategy.keeps_trained:
            fragment.keep_sent()
        self._anchors.send_followed()
        if self._worker.may_miss:
            self._anchors.keep()
        self._clock = progress.clock
        self._push_before = self._backend.place.last_push
        self._weight = weight
        self.rounds.begin(progress.fragment)
        self._send(is_beside=is_beside)
        if not is_beside:
            self.finish()

    def push_rest(self) -> bool:
        """Pushes what was trained, of a worker without further data.

        Mode quorum waits for such pushes, within a limit.

        Returns:
            Whether all of it has counted.
        """
        self.has_data = False
        self.finish()
        missed_count = 0
        while not self.rounds.is_clean and missed_count < LAST_MISSED_COUNT_MAX:
            self.push(is_beside=False)
            missed_count = missed_count + 1 if self.rounds.was_missed else 0
        return self.rounds.is_clean

    def give_up(self) -> tuple[int, tuple[DataRange, ...]]:
        """Goes on from the job's values; what was trained and not pushed is lost.

        Returns:
            The local steps, and their data, which counts as dropped.
        """
        lost = self.rounds.unsent_step_count, self.rounds.give_up()
        self._worker.drop(lost[1])
        self._anchors.start_over()
        return lost

    def push_nothing(self, push: Callable[[], None] | None = None) -> None:
        """Takes what the others have done in a clock, without a part in it.

        Args:
            push: Makes a push of weight 0; by default of the next fragment.
        """
        self.rounds.takes_part = False
        fragment = self._next_fragment
        if self._worker.may_miss:
            self._anchors.keep()
        if push is None:
            push = self._optimizers[fragment].push_nothing
        push()
        if not self.has_rejoined():
            self._follow(fragment, self._backend.place.last_push)
            self._anchors.fragments[fragment].forget_sent()
            self._take(fragment)

    def go_on(self) -> None:
        """Looks at what is under way, without waiting for it.

        Raises:
            PsError: As the push raised that is under way.
        """
        if self._sender.is_answered():
            try:
                self._sender.finish()
            except StepTimeoutError as error:
                if not self._never_waits:
                    raise
                logger.warning("%s; the local steps go on meanwhile", error)
                self._send(is_beside=True)
            else:
                self._settle()
        elif not self._sender.is_open:
            is_open = not (self._strategy.taken_after and self.rounds.is_settled)
            if self.rounds.sent is not None and is_open:
                self.finish()  # an error has ended it, or what came after it
            self.has_rejoined()

    def take_ripe(self) -> None:
        """Takes what a push beside the script has brought, if it is time."""
        if self._sender.is_answered():
            self.go_on()
        if self.rounds.is_ripe and not (self._sender.is_open and self._never_waits):
            self.finish()

    def finish(self) -> None:
        """Returns once a push that is under way is done, and what it brings is taken.

        One that an error has ended is made again.
        """
        rounds = self.rounds
        if self._sender.is_open:
            before = self._backend.work.enter(Activity.WAITING)
            try:
                self._wait_for(self._sender.finish)
            finally:
                self._backend.work.enter(before)
            self._settle()
        elif rounds.sent is not None and not rounds.is_settled:
            self._send(is_beside=False)
        if rounds.sent is not None and rounds.is_settled:
            self._take(rounds.sent.fragment)
            # Ctrl-C may come before, and it is taken again then.
            self._anchors.fragments[rounds.take()].forget_sent()

    def _set_hyperparameters(self, progress: Progress) -> None:
        """Sets what the strategy says of the optimizer of the next push.

        Raises:
            ConfigurationError: It is none of the optimizer, or no number; nothing was
                changed.
        """
        values: object = answer_of(self._strategy.outer_hyperparameters, progress)
        groups = self._optimizers[progress.fragment].param_groups
        known = groups[0].keys() - {"params"}
        owner = f"{type(self._strategy).__name__}.outer_hyperparameters()"
        if not isinstance(values, Mapping) or values.keys() - known:
            raise ConfigurationError(
                f"{owner} returned {values!r}: have it return a dict of numbers, by "
                f"their names in the outer optimizer: {', '.join(sorted(known))}"
            )
        refuse_numbers(_FINITE, owner, **values)
        if values:
            kind = self._kinds[progress.fragment]
            check_outer(self._strategy, kind, {**groups[0], **values})
        for group in groups:
            group.update(values)

    def _look_at_mode(self, clock: int) -> None:
        """Warns where the job was changed to a mode that the strategy is not for."""
        before, self._mode = self._mode, self._backend.place.mode
        problem = mode_problem(self._strategy, self._mode)
        if problem and before != self._mode:
            logger.warning("from clock %d on, training goes on so: %s", clock, problem)

    def _send(self, *, is_beside: bool) -> None:
        """Makes the push that was begun, perhaps again after an error."""
        sent, timing = self.rounds.sent, self.timing
        assert sent is not None, "it was begun"
        slack_s = self._strategy.taken_after * timing.compute_s
        of_round = RoundPush(
            drawn=DrawnData(round(sent.new_work.sample_count), sent.ranges),
            clock=self._clock,
            rejoin_count=self._rejoin_count,
            is_beside=is_beside,
            slack_ms=round(1000 * slack_s) if is_beside else None,
            is_last=not self.has_data,
        )
        optimizer, weight = self._optimizers[sent.fragment], self._weight

        def push() -> None:
            begun_at = timing.now()
            optimizer.step(weight=weight, of_round=of_round)
            timing.push_s = timing.now() - begun_at

        if is_beside:
            self._worker.keep_script_state()
            self._sender.send(push, self._anchors.devices)
        else:
            self._wait_for(push)
            self._settle()

    def _wait_for(self, push: Callable[[], None]) -> None:
        """Returns once the job has answered a push; notes how long the script waits."""
        begun_at = self.timing.now()
        try:
            push()
        finally:
            wait_s = self.timing.end_wait() - begun_at
            if self.has_data:
                self._worker.note_wait(self._clock, wait_s)

    def _settle(self) -> None:
        """The job has answered the push: what has become of it."""
        sent = self.rounds.sent
        if sent is None or self.has_rejoined():
            return  # a handler that has called `ps.close()` meanwhile has seen to it
        result = self._backend.place.last_push
        has_counted = False
        if result is not None and result is not self._push_before:  # it was pushed
            has_counted = not result.missed
            self.timing.note_push(result.peer_wait_s)
            self._follow(sent.fragment, result)
            if result.skipped or result.dropped:
                self._recover(result)
        if has_counted:  # else a strategy may go on with what is in them
            self._anchors.fragments[sent.fragment].clear_gradients()
        self.rounds.settle(has_counted=has_counted)

    def _recover(self, result: PushResult) -> None:
        """Has a worker that has diverged begin again from the job's values.

        What is no number stays none in all local steps to come, and each push of it
        would be thrown away.
        """
        worker_id = self._backend.place.worker_id
        if worker_id in result.nonfinite_worker_ids or not self._anchors.are_finite:
            logger.warning(
                "the local steps of worker %s before clock %d have led to values that "
                "are not finite or too large, and count for nothing: it goes on from "
                "the job's values, and its optimizers begin without state; give them a "
                "lower learning rate, or clip gradients, if this comes again",
                worker_id,
                result.clock,
            )
            self._anchors.give_up()
            self._inner.reset()

    def _follow(self, fragment: int, result: PushResult | None) -> None:
        """Takes up what the job did in a clock that has closed without this worker.

        All of the anchor is new then. Of the fragment of a push that is of no use later
        the worker takes the job's values; the others move as the anchor has moved.
        """
        if result is None:
            return
        if result.dropped:
            self._anchors.forget(fragment)
        if result.dropped or result.missed:
            self._anchors.follow_job()

    def _take(self, fragment: int) -> None:
        taken = self._anchors.fragments[fragment]
        self._anchors.forget(fragment)
        with torch.no_grad():
            with taken.with_trained():
                self._strategy.take(taken.local, taken.anchor)
            self._inner.take(taken.local)
        self._anchors.take_followed()
