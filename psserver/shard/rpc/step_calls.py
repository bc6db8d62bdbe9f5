"""Calls of workers beside their pushes: two-phase steps, no data, shared memory.

Those of a step are held while the shard is frozen. The push that one goes with is held
too, and says on its own stream whom it waits for.
"""

import secrets

from psserver.edge.decoding import worker_key
from psserver.edge.monotonic import now_ms
from psserver.shard.core.push import PushId
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc.push_codec import check_caller, push_id, worker_choice
from psserver.shard.rpc.readiness import catch_up
from pswire.membership import ClockChoice, Member, WorkerKey
from pswire.membership_codec import choice_message
from pswire.reasons import ErrorReason, Refusal
from pswire.shared_memory.handshake import TOKEN_BYTES
from pswire.shared_memory.segments import boot_id
from pswire.v1 import parameter_service_pb2 as messages


async def commit(
    host: ShardHost, request: messages.CommitRequest
) -> messages.CommitResponse:
    """Applies a clock, or a push, of which every shard holds all.

    Raises:
        Refusal: With no state changed.
    """
    check_caller(host, request)
    worker = worker_key(request.worker)
    choice = worker_choice(request.choice)
    await catch_up(host, request.generation)
    core = host.model.core
    # What is closed may have been so in a mode before.
    is_open = choice.clock > core.clocks.applied_clock
    if is_open and not core.state.is_two_phase(choice.clock):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            "steps of this job have one phase: there is nothing to commit",
        )
    await _thawed(host, worker)
    is_committed = core.commit(worker, choice)
    host.pump()
    return messages.CommitResponse(committed=is_committed)


async def ready(
    host: ShardHost, request: messages.ReadyRequest
) -> messages.ReadyResponse:
    """Takes word that every shard holds a push; answers with those that count.

    Raises:
        Refusal: With no state changed.
    """
    check_caller(host, request)
    push = push_id(request.worker, request.sequence)
    if host.shard_index:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            "only shard 0 chooses whose pushes count",
        )
    await catch_up(host, request.generation)
    _check_ready(host, push, request)
    await _thawed(host, push.worker)
    core = host.model.core
    core.ready(push.worker, push.sequence, now_ms())
    host.pump()
    choice: ClockChoice | None = None

    def is_over() -> bool:
        """Whether it is chosen, or the caller has ended and will never know."""
        nonlocal choice
        if host.end_reason or core.clocks.member_of(push.worker) is None:
            return True
        choice = core.choice_for(push.worker, push.sequence)
        return choice is not None

    await host.changes.wait_until(is_over)
    host.check_open()
    _member(host, push.worker)
    assert choice is not None, "the worker is a member"
    return messages.ReadyResponse(choice=choice_message(choice))


async def await_contribution(
    host: ShardHost, request: messages.AwaitContributionRequest
) -> messages.AwaitContributionResponse:
    """Returns once a clock waits only for workers without data.

    Raises:
        Refusal: With no state changed.
    """
    check_caller(host, request)
    push = push_id(request.worker, request.sequence)
    await catch_up(host, request.generation)
    awaited = await host.await_contribution(push.worker, push.sequence)
    return messages.AwaitContributionResponse(
        clock=awaited.clock, optimizer=awaited.optimizer
    )


async def open_segments(
    host: ShardHost, request: messages.OpenSegmentsRequest
) -> messages.OpenSegmentsResponse:
    """Says where a member hands segments over, or why it shall not.

    Raises:
        Refusal: `WORKER_INCARNATION_STALE` for one that is no member; see
            `check_caller` and `catch_up`.
    """
    check_caller(host, request)
    worker = worker_key(request.worker)
    await catch_up(host, request.generation)
    if host.model.core.clocks.member_of(worker) is None:
        raise Refusal(
            ErrorReason.WORKER_INCARNATION_STALE,
            f"{worker} is no member, and shares no memory",
        )
    if declined := _declined(host, request.boot_id):
        return messages.OpenSegmentsResponse(declined=declined)
    token = secrets.token_bytes(TOKEN_BYTES)
    host.shared.expect(token, worker, host.model.placement, host.shard_index)
    return messages.OpenSegmentsResponse(
        socket_name=host.shared.socket_name, token=token
    )


def _declined(host: ShardHost, worker_boot_id: str) -> str:
    if not host.shared.is_wanted:
        return "it is switched off there, or its system lacks it"
    if not worker_boot_id or worker_boot_id != boot_id():
        return "it runs on another machine"
    if not host.model.terms.compression.is_none:
        return "the job compresses what is sent"
    if not host.shared.socket_name or host.model.engine.vectors.shared is None:
        return "its system lacks what it takes"
    return ""


async def _thawed(host: ShardHost, worker: WorkerKey) -> None:
    """Waits until the shard may commit, on behalf of a member."""
    core = host.model.core
    await host.changes.wait_until(
        lambda: (
            not core.is_frozen
            or bool(host.end_reason)
            or core.clocks.member_of(worker) is None
        )
    )
    host.check_open()
    _member(host, worker)


def _member(host: ShardHost, worker: WorkerKey) -> Member:
    clocks = host.model.core.clocks
    member = clocks.member_of(worker)
    if member is None or clocks.record is None:
        raise Refusal(
            ErrorReason.WORKER_INCARNATION_STALE,
            f"{worker} is no member any more, and drives no commit",
        )
    return member


def _check_ready(host: ShardHost, push: PushId, request: messages.ReadyRequest) -> None:
    """Refuses a push that is not there, or of another clock than is said."""
    core = host.model.core
    member = _member(host, push.worker)
    record = core.clocks.record
    assert record is not None
    expected = member.clock_of(push.sequence)
    if request.generation == record.generation and request.clock != expected:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"push {push.sequence} of {push.worker} is of clock {expected}, the call "
            f"says {request.clock}",
        )
    done = core.closed_sequence(push.worker)
    if push.sequence > done + 1:
        raise Refusal(
            ErrorReason.SEQUENCE_GAP,
            f"push {push.sequence} of {push.worker} is ready after push {done}",
            sequence=push.sequence,
            sequence_done_max=done,
        )
