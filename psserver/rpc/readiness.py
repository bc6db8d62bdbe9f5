"""Calls that are ahead of what the shard has heard from the coordinator."""

from psserver.host.shard_host import ShardHost
from pswire.limits import WAITING_INTERVAL_MS
from pswire.reasons import ErrorReason, Refusal


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
            f"the shard has not heard of generation {generation} yet",
        )


async def declaration_known(host: ShardHost, optimizer: str, digest: str) -> None:
    """Holds a call by a later declaration of an optimizer until the shard has it.

    Raises:
        Refusal: `RECOVERING` when it does not come, `OPTIMIZER_MISMATCH` when the job
            has no such optimizer, `SHARD_LOST` after the job's end.
    """
    host.model.engine.check_optimizer(optimizer)

    def has_it() -> bool:
        return bool(host.end_reason) or host.model.engine.has_declared(
            optimizer, digest
        )

    await host.changes.wait_until(has_it, WAITING_INTERVAL_MS / 1000)
    host.check_open()
    if not has_it():
        raise Refusal(
            ErrorReason.RECOVERING,
            f"the shard waits for the coordinator to tell of the parameter groups "
            f"that {optimizer[:64]!r} has now ({digest[:64]!r})",
        )


async def model_known(host: ShardHost) -> None:
    """Holds a call until the coordinator has told what the job trains."""
    await host.changes.wait_until(
        lambda: host.has_model or bool(host.end_reason), WAITING_INTERVAL_MS / 1000
    )
