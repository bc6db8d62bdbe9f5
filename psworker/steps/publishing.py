"""Values that a script makes those of the job, by a push of their own."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import torch

from pswire.frames import bits_to_bytes
from psworker.errors import (
    EvictedError,
    OptimizerMismatchError,
)
from psworker.member.catch_up import pull_values
from psworker.member.core import Pull
from psworker.optim.published import Published, published_entries
from psworker.optim.push_result import PushResult, combine
from psworker.optim.step_contents import OptimizerStep, StateLoad, StepContents
from psworker.steps.pushes import MemberPushes
from psworker.tensors.value_store import same_bytes

logger: Final = logging.getLogger("psworker")

Values = Sequence[torch.Tensor | None]
"""Of each entry of the schema its value, `None` where it is not published."""


class Publisher(MemberPushes):
    """Publishes values, with the state of an optimizer where that was loaded too."""

    # Values that were loaded with optimizer state, until both count.
    _loaded: Values | None = None

    def publish(self, wanted: OptimizerStep, what: Sequence[Published]) -> PushResult:
        """Makes the values of these, of all models by default, those of the job.

        By a push of its own, which is no step: what comes back is written as after
        one. Again as a new start where this worker was evicted meanwhile.

        Raises:
            ConfigurationError: A tensor belongs to no prepared model.
            OptimizerMismatchError: Another worker steps in the same clock.
            StepTimeoutError: Some worker or shard did not come in time; the values
                are kept, and go with the next call.
        """
        self._refuse_closed()
        self._settle()
        self._look()
        entry_indexes = published_entries(what, self._store.tensors)
        if self._is_late:
            return self._keep_values("published")
        values = self._values_of(entry_indexes)
        if self._loaded is not None:
            # What an earlier call has left open is another push, and has its own state.
            if self._unfinished is not None:
                self._settle_unfinished(self._unfinished)
            wanted = replace(wanted, load=None)
        if wanted.load is not None:
            return self._publish_loaded(wanted, wanted.load, values)
        return self._published(wanted, values)

    def _with_loaded_values(
        self, wanted: OptimizerStep, load: StateLoad
    ) -> OptimizerStep:
        """Publishes what was loaded into the models together with optimizer state.

        A script that loads after `prepare` loads both, and both are to count or none:
        the state goes with the values, before the step. Buffers that a forward pass
        has changed since are this worker's still, and go with the step as always.

        What an error leaves open goes on with the next step, values and state.

        Returns:
            What is left to go with the step.

        Raises:
            OptimizerMismatchError: The worker whose values count has stepped instead.
        """
        self._refuse_closed()
        was_begun = self._loaded is not None
        self._settle()
        if was_begun and self._loaded is None:
            return replace(wanted, load=None)  # it has just counted
        if not was_begun and not self._guard.has_writes:
            return wanted
        if self._is_late:
            self._keep_values("loaded")
            self._loaded = None
            load.on_loaded()
            return replace(wanted, load=None)
        store = self._store
        values = self._loaded
        if values is None:
            self._look()
            values = self._values_of(range(len(store.tensors)))
        self._publish_loaded(wanted, load, values)
        with torch.no_grad():
            for index in self._buffers.policies:
                value = values[index]
                if value is not None and not same_bytes(
                    value, store.tensors[index].detach()
                ):
                    store.tensors[index].copy_(value)
        return replace(wanted, load=None)

    def _publish_loaded(
        self, wanted: OptimizerStep, load: StateLoad, values: Values
    ) -> PushResult:
        """Publishes values with optimizer state; keeps them until both count.

        Raises:
            OptimizerMismatchError: The worker whose values count has stepped instead.
        """
        if self._loaded is None and self._unfinished is not None:
            self._settle_unfinished(self._unfinished)  # a push without this state
        self._loaded = values

        def note_loaded() -> None:
            self._loaded = None
            load.on_loaded()

        carried = StateLoad(load.states, note_loaded)
        result = self._published(replace(wanted, load=carried), values)
        if result.dropped:
            raise OptimizerMismatchError(
                "the values and optimizer state that this worker has loaded are not "
                "used: in the same clock the worker that is longest in the job has "
                "stepped, since the two are at different places of the script. Load "
                "in all workers at the same place; the next step() sends both again"
            )
        return result

    def _keep_values(self, verb: str) -> PushResult:
        """Goes on with the job's values, in a worker that has just joined it late.

        Its script begins where those of the others were long ago: what it sets then
        would undo what the job has trained since. A gradient that was computed of that
        is thrown away by the next step.
        """

        def pull(clock: int) -> PushResult:
            pull = Pull(self.generation, clock)
            deadline = time.monotonic() + self._timeout_s
            replies = pull_values(
                self._loop, self._session, self._taken_back(), pull, deadline
            )
            return combine(replies)

        self._has_stale_gradient |= self.has_gradient
        result = self._as_member(pull)
        self._guard.note()
        self._buffers.note_written(self._store)
        logger.warning(
            "this worker has joined a job that trains already: what its script has %s "
            "before its first step is not used, and the job's values stay",
            verb,
        )
        return result

    def _values_of(self, entry_indexes: Iterable[int]) -> Values:
        """Copies: what has to be settled before is written into the user's own."""
        values: list[torch.Tensor | None] = [None] * len(self._store.tensors)
        for index in entry_indexes:
            if index not in self._buffers.local:
                values[index] = self._store.tensors[index].detach().clone()
        return values

    def _published(self, wanted: OptimizerStep, values: Values) -> PushResult:
        while True:
            unfinished = self._unfinished
            if unfinished is None or not unfinished.contents.trailer.publishes:
                self._guard.note()  # what the script has edited is what it publishes
                if self._open(wanted, takes_data=False) is not None:
                    continue  # an earlier step is settled, or this is a new start
                self._shadow = None  # older than what is published
                try:
                    unfinished = self._begin(self._with_values(wanted, values))
                except EvictedError:
                    self._lose(None)
                    continue
            result = self._finish(unfinished, self._store)
            if not result.dropped:
                self._tell_counted(values)
                return result
            if not result.rejoined:
                logger.warning(
                    "what this worker has published is not used: in the same clock the "
                    "worker that is longest in the job has stepped, since the two are "
                    "at different places of the script; the job's values stay"
                )
                return result

    def _tell_counted(self, values: Values) -> None:
        """Says so where what has come is not what this worker has published."""
        record = self._session.membership.record
        longest = record.longest if record is not None else None
        if longest is None or longest.worker == self._session.worker:
            return
        if self._store.base.is_rounded:
            return
        names = [
            f"{entry.name!r} of {entry.model}"
            for entry, published, now in zip(
                self._buffers.entries, values, self._store.tensors, strict=True
            )
            if published is not None and not same_bytes(published, now.detach())
        ]
        if names:
            logger.warning(
                "what this worker has published of %s%s is not what counts: those of "
                "worker %s do, which is longest in the job; have all workers publish "
                "the same at the same place, such as with the same seed",
                names[0],
                f" and {len(names) - 1} more" if len(names) > 1 else "",
                longest.worker.worker_id,
            )

    def _with_values(self, wanted: OptimizerStep, values: Values) -> StepContents:
        """Values that replace those of the job."""
        nothing = self._without_gradient(wanted)
        return replace(
            nothing,
            tensors=values,
            value_entries=bits_to_bytes([each is not None for each in values]),
            # What a script sets after a step goes with it.
            trailer=replace(
                nothing.trailer, weight=1.0, publishes=True, continues_batch=True
            ),
        )
