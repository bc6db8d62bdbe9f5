"""Calls that are ahead of what the shard has heard from the coordinator."""

from collections.abc import AsyncIterator

from psserver.edge.answer_slots import AnswerSlots
from psserver.edge.monotonic import now_ms
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc.push_codec import waiting_message
from pswire.limits import WAITING_INTERVAL_MS
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import push_pb2


async def catch_up(host: ShardHost, generation: int) -> None:
    """Holds a call from a newer generation until the shard has its record.

    Raises:
        Refusal: `RECOVERING` when it does not come, `SHARD_LOST` after the job's end.
    """

    def has_it() -> bool:
        if host.end_reason:
            return True
        record = host.model.core.clocks.record if host.has_model else None
        return record is not None and record.generation >= generation

    await host.changes.wait_until(has_it, WAITING_INTERVAL_MS / 1000)
    host.check_open()
    if not has_it():
        raise Refusal(
            ErrorReason.RECOVERING,
            f"the shard has not received generation {generation} yet",
        )


async def declaration_known(host: ShardHost, optimizer: str, digest: str) -> None:
    """Holds a call by a later declaration of an optimizer until the shard has it.

    Raises:
        Refusal: `RECOVERING` when it does not come, `OPTIMIZER_MISMATCH` when the job
            has no such optimizer, `SHARD_LOST` after the job's end.
    """
    declared = host.model.engine.declared
    declared.spec(optimizer)

    def has_it() -> bool:
        return bool(host.end_reason) or declared.has(optimizer, digest)

    await host.changes.wait_until(has_it, WAITING_INTERVAL_MS / 1000)
    host.check_open()
    if not has_it():
        raise Refusal(
            ErrorReason.RECOVERING,
            f"the shard waits for the coordinator to send the parameter groups "
            f"that {optimizer[:64]!r} has now ({digest[:64]!r})",
        )


async def model_known(host: ShardHost) -> None:
    """Holds a call until the coordinator has sent what the job trains."""
    await host.changes.wait_until(
        lambda: host.has_model or bool(host.end_reason), WAITING_INTERVAL_MS / 1000
    )


async def clock_reached(
    host: ShardHost, worker: WorkerKey, clock: int, *, otherwise: str
) -> AsyncIterator[push_pb2.Waiting]:
    """Holds a member's call until it may read what the shard has at a clock.

    Args:
        host: The shard, which has a model.
        worker: Who calls.
        clock: The clock.
        otherwise: For the text, what is there for others than members.

    Yields:
        Whom it waits for, every now and then.

    Raises:
        Refusal: `WORKER_INCARNATION_STALE` for one that is no member, or no longer;
            `SHARD_LOST` after the job's end.
    """
    core = host.model.core
    started_ms = now_ms()

    def is_member() -> bool:
        return core.clocks.member_of(worker) is not None

    def is_over() -> bool:
        """Whether there is nothing to wait for, be it that it will never come."""
        has_ended = bool(host.end_reason) or not is_member()
        return has_ended or core.admits_pull(worker, clock)

    while not await host.changes.wait_until(is_over, WAITING_INTERVAL_MS / 1000):
        yield waiting_message(host, now_ms() - started_ms)
    host.check_open()
    if not is_member():
        raise Refusal(
            ErrorReason.WORKER_INCARNATION_STALE,
            f"{worker} is no member; {otherwise}",
        )


async def slot_free(
    host: ShardHost, slots: AnswerSlots, worker: WorkerKey
) -> AsyncIterator[push_pb2.Waiting]:
    """Holds a member's call until fewer answers to it are under way.

    Args:
        host: The shard.
        slots: Of answers of this kind.
        worker: Who calls.

    Yields:
        What it waits for, every now and then.

    Raises:
        Refusal: `SHARD_LOST` after the job's end.
    """
    started_ms = now_ms()
    while not await slots.is_free(worker, WAITING_INTERVAL_MS / 1000):
        host.check_open()
        yield push_pb2.Waiting(
            waited_ms=now_ms() - started_ms,
            reason=f"{worker} to read {slots.count(worker)} earlier answers",
        )
