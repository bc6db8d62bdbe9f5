"""How a process gets an identity from the coordinator.

On the event loop. A worker id belongs to one living process. One that died a moment ago
still has it until the coordinator knows: a replacement waits for that.
"""

import logging
import uuid
from functools import partial
from typing import Final

from pswire.job_settings import JobSettings
from pswire.membership import WorkerKey
from pswire.reasons import ErrorReason
from psworker.transport.calls import CallError, left_s, now, pause, until_decided
from psworker.transport.ports import CoordinatorPort
from psworker.transport.waiting_log import WaitingLog, saying_whom

logger: Final = logging.getLogger("psworker")

_PATIENCE_S: Final = 1.5
"""Beyond a lease, the time until a lost process is out: the grace (half a second) and
a fence."""

_ANSWER_S: Final = 1.0
"""Least time to answer, while it waits for a holder. Mere rest of the wait, the last
attempt's would be 10 ms, and who still has the id would be lost in a deadline."""


async def register(
    control: CoordinatorPort,
    worker_id: str,
    *,
    timeout_s: float,
    waits_for_holder: bool = True,
    process_id: str = "",
) -> tuple[WorkerKey, JobSettings]:
    """Registers, when need be once the last holder of the worker id is known as lost.

    Args:
        control: The coordinator.
        worker_id: Wanted id, empty for one of the coordinator's choice.
        timeout_s: Longest wait for the coordinator. For another holder of the id it
            waits at least a lease and a bit: until then nobody knows that it is gone.
        waits_for_holder: Whether it waits for another holder of the id at all.
        process_id: Under which several processes are the same worker, one after the
            other; by default one of its own.

    Raises:
        CallError: There is no coordinator there, or it refused.
    """
    process_id = process_id or uuid.uuid4().hex
    deadline = now() + timeout_s
    log = WaitingLog()
    awaited = f"{control.peer} to answer"
    is_extended = False
    attempt = 0
    while True:
        answer_s = max(left_s(deadline), _ANSWER_S if is_extended else 0)
        try:
            return await saying_whom(
                partial(
                    control.register_worker, process_id, worker_id, timeout_s=answer_s
                ),
                awaited,
                log,
            )
        except CallError as error:
            holder = taken_by(error)
            if holder and not waits_for_holder:
                raise
            if holder and not is_extended:
                lease_s = await _lease_s(control, deadline)
                deadline = max(deadline, now() + lease_s + _PATIENCE_S)
                is_extended = True
                logger.warning(
                    "%s: waiting for it to be gone, at most %.0f s",
                    holder,
                    left_s(deadline),
                )
                awaited = f"worker id {worker_id[:64]!r} to be free"
            if not error.is_retryable or now() >= deadline:
                raise
            log.remind(awaited)
        await pause(attempt)
        attempt += 1


def taken_by(error: CallError) -> str:
    """Who has the wanted id, in words; empty when that is not the trouble."""
    refusal = error.refusal
    if refusal is None or refusal.reason != ErrorReason.WORKER_ID_TAKEN:
        return ""
    return refusal.message


async def _lease_s(control: CoordinatorPort, deadline: float) -> float:
    async def attempt(timeout_s: float) -> int:
        return await control.lease_ttl_ms(timeout_s=timeout_s)

    return await until_decided(attempt, deadline) / 1000
