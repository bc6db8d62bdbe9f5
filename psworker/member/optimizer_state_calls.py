"""Calls for optimizer state, to all shards at once. On the event loop."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from pswire.reasons import ErrorReason
from psworker.errors import StepTimeoutError, WaitTimeoutError
from psworker.member.shard_reach import ShardReach, ShardSilence
from psworker.transport.calls import CallError, all_or_none, now, until_decided
from psworker.transport.values import OptimizerSettings, Waiting

StatePart = tuple[int, bytes]
"""Index of a chunk, and a safetensors file with some of its state."""

StateAnswer = tuple[list[StatePart], OptimizerSettings]


class ShardStateCalls:
    """Reads and stages the state of one optimizer."""

    def __init__(self, reach: ShardReach) -> None:
        self._reach = reach
        self._clients = reach.clients
        self._membership = reach.membership

    async def pull(
        self,
        optimizer: str,
        clock: int,
        *,
        spec_digest: str,
        only_settings: bool,
        on_waiting: Callable[[Waiting], None],
        timeout_s: float,
    ) -> Sequence[StateAnswer]:
        """Reads an optimizer's state and its newest settings as of a clock.

        Args:
            optimizer: Its name.
            clock: The clock.
            spec_digest: The declaration of it that shards must know.
            only_settings: Whether no state is wanted.
            on_waiting: Takes whom shards wait for.
            timeout_s: Longest time for all of it.

        Returns:
            The answer of each shard.

        Raises:
            EvictedError: This worker is no member any more.
            WaitTimeoutError: It took longer; the text names who was waited for.
            PsError: A shard refused.
        """
        deadline = now() + timeout_s
        generation = self._membership.generation
        silence = ShardSilence(self._reach, clock, on_waiting)

        async def pull_one(shard_index: int) -> StateAnswer:
            async def attempt(timeout_s: float) -> StateAnswer:
                client = await self._clients.of(shard_index)
                return await client.pull_optimizer_state(
                    optimizer,
                    generation,
                    clock,
                    spec_digest=spec_digest,
                    only_settings=only_settings,
                    on_waiting=silence.waiting_of(shard_index),
                    timeout_s=timeout_s,
                )

            answer = await until_decided(
                attempt, deadline, on_failure=partial(silence.failed, shard_index)
            )
            silence.answered(shard_index)
            return answer

        try:
            with silence:
                return await self._membership.unless_failed(
                    all_or_none(map(pull_one, range(len(self._membership.shards))))
                )
        except CallError as error:
            if not error.is_retryable:
                raise error.to_ps_error() from None
            what = "settings" if only_settings else "state"
            raise WaitTimeoutError(
                f"the {what} of {optimizer} at clock {clock} was not there within "
                f"{timeout_s:g} s: {silence.awaited(error)}",
                reason=ErrorReason.WAIT_TIMEOUT,
            ) from None

    async def stage(
        self,
        optimizer: str,
        sequence: int,
        parts_of: Callable[[int], Iterable[StatePart]],
        *,
        spec_digest: str,
        timeout_s: float,
    ) -> None:
        """Stages state on all shards, for this worker's next push.

        Args:
            optimizer: Its name.
            sequence: The push.
            parts_of: Parts of a shard's chunks.
            spec_digest: Declaration of the optimizer, empty for the first.
            timeout_s: Longest time for all of it.

        Raises:
            EvictedError: This worker is no member any more.
            HyperparameterError: The state is none that the optimizer can go on from.
            StepTimeoutError: A shard did not take it in time.
            PsError: A shard refused.
        """
        deadline = now() + timeout_s
        generation = self._membership.generation

        async def stage_one(shard_index: int) -> None:
            async def attempt(timeout_s: float) -> None:
                client = await self._clients.of(shard_index)
                await client.stage_optimizer_state(
                    optimizer,
                    generation,
                    sequence,
                    parts_of(shard_index),
                    spec_digest=spec_digest,
                    timeout_s=timeout_s,
                )

            await until_decided(attempt, deadline)

        try:
            await self._membership.unless_failed(
                all_or_none(map(stage_one, range(len(self._membership.shards))))
            )
        except CallError as error:
            if not error.is_retryable:
                raise error.to_ps_error() from None
            raise StepTimeoutError(
                f"the shards have not taken the state loaded into {optimizer} within "
                f"{timeout_s:g} s: {error}; step() again sends it again",
                reason=ErrorReason.WAIT_TIMEOUT,
            ) from None
