"""State of optimizers to workers and from them."""

from collections.abc import AsyncIterator

import torch

from psserver.edge.decoding import decode, decoded, parsed, worker_key
from psserver.edge.staging_calls import StagingCall
from psserver.shard.host.hosted_members import MEMBERS_ONLY, check_next
from psserver.shard.host.shard_host import ShardHost
from psserver.shard.rpc.push_codec import (
    check_caller,
    checked_clock,
    push_id,
)
from psserver.shard.rpc.readiness import (
    catch_up,
    clock_reached,
    declaration_known,
    slot_free,
)
from pswire.optimizer_states import TENSOR_COUNT_MAX, StateKey, decode_state
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import parameter_service_pb2 as messages
from pswire.v1 import push_pb2, schema_pb2

HEADER_BYTES_MAX = 16 << 10
"""Longest first message of a call that stages. It has three names."""

PART_COUNT_MAX = 16
"""Most parts of one chunk of few slices: no optimizer has so much state. Each is a
message."""

STATE_SIZE_MAX = 8
"""Tensors of a state, at most: it takes no more than so many times its chunk."""

NAMES_BYTES_MAX = 1024
"""Bytes that the names of a slice's tensors take at most."""


class StateParts:
    """State that comes in parts, until it can be checked as a whole."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, int], int] = {}
        self._states: dict[str, dict[int, dict[StateKey, torch.Tensor]]] = {}
        self._part_counts: dict[tuple[str, int], int] = {}

    async def take(self, host: ShardHost, part: push_pb2.OptimizerStatePart) -> None:
        """Reads a part.

        Raises:
            Refusal: `MALFORMED_MESSAGE`, `LIMIT_EXCEEDED`, `OPTIMIZER_MISMATCH` or
                `CHUNK_INVALID`.
        """
        engine = host.model.engine
        engine.declared.spec(part.optimizer)
        chunk = engine.vectors.chunk(part.chunk_index)
        place = (part.optimizer, part.chunk_index)
        self._sizes[place] = self._sizes.get(place, 0) + len(part.tensors)
        name_bytes = NAMES_BYTES_MAX * (len(chunk.slices) + 1)
        limit = STATE_SIZE_MAX * (8 * chunk.element_count + name_bytes)
        if self._sizes[place] > limit:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the optimizer state of chunk {part.chunk_index} takes more than "
                f"{limit} bytes, which no optimizer has",
            )
        self._part_counts[place] = self._part_counts.get(place, 0) + 1
        tensor_count_max = STATE_SIZE_MAX * len(chunk.slices)
        part_count_max = PART_COUNT_MAX + tensor_count_max // TENSOR_COUNT_MAX
        if self._part_counts[place] > part_count_max:
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the optimizer state of chunk {part.chunk_index} comes in more than "
                f"{part_count_max} parts",
            )
        tensors = part.tensors
        state = await parsed(len(tensors), lambda: decode_state(tensors))
        chunks = self._states.setdefault(part.optimizer, {})
        chunks.setdefault(part.chunk_index, {}).update(state)

    def take_checked(
        self, host: ShardHost, spec_digest: str = ""
    ) -> dict[str, dict[int, dict[StateKey, torch.Tensor]]]:
        """What has come, by optimizer and chunk, once.

        Raises:
            Refusal: `CHUNK_INVALID`, `HYPERPARAMETER_INVALID` or
                `OPTIMIZER_MISMATCH`.
        """
        states, self._states = self._states, {}
        for optimizer, chunks in states.items():
            for chunk_index, state in chunks.items():
                host.model.engine.check_state(
                    optimizer, chunk_index, state, spec_digest=spec_digest
                )
        return states


async def pull(
    host: ShardHost, request: messages.PullOptimizerStateRequest
) -> AsyncIterator[messages.PullOptimizerStateResponse]:
    """Sends an optimizer's state once it has reached a clock.

    Raises:
        Refusal: The caller is no member, or the job has no such optimizer.
    """
    check_caller(host, request)
    worker = worker_key(request.worker)
    clock = checked_clock(request.clock)
    await catch_up(host, request.generation)
    await declaration_known(host, request.optimizer, request.optimizer_digest)
    async for waiting in clock_reached(host, worker, clock, otherwise=MEMBERS_ONLY):
        yield messages.PullOptimizerStateResponse(waiting=waiting)
    async for waiting in slot_free(host, host.pull_answers, worker):
        yield messages.PullOptimizerStateResponse(waiting=waiting)
    with host.pull_answers.taken(worker):
        if not request.only_settings:
            for chunk in host.model.chunks:
                for part in await host.state_messages(
                    request.optimizer, chunk.index, request.optimizer_digest
                ):
                    yield messages.PullOptimizerStateResponse(
                        part=push_pb2.OptimizerStatePart(
                            chunk_index=chunk.index,
                            optimizer=request.optimizer,
                            tensors=part,
                        )
                    )
    yield messages.PullOptimizerStateResponse(
        settings=_settings(host, request.optimizer)
    )


async def stage(
    host: ShardHost, requests: AsyncIterator[bytes]
) -> messages.StageOptimizerStateResponse:
    """Takes state that the caller's next push will load.

    Raises:
        Refusal: Of the header with nothing read; of a part with nothing staged.
    """
    call = StagingCall(requests, host.limits.message_s)
    header = _header(await call.next())
    check_caller(host, header)
    await catch_up(host, header.generation)
    await declaration_known(host, header.optimizer, header.optimizer_digest)
    push = push_id(header.worker, header.sequence)
    check_next(host.model.core, push)
    parts = StateParts()
    with host.staging.admitted(push.worker, call):
        async for data in call.rest():
            message = await decoded(messages.StageOptimizerStateRequest, data)
            if message.HasField("part"):
                _check_part(header, message.part)
                await parts.take(host, message.part)
    states = parts.take_checked(host, header.optimizer_digest)
    own = states.get(header.optimizer, {})
    host.members.of(push.worker).stage_state(
        host.model.core, push.sequence, header.optimizer, own
    )
    return messages.StageOptimizerStateResponse(shard_incarnation=host.incarnation)


def check_header_alone(first: bytes, what: str) -> None:
    """Refuses a first message of more than a header.

    It is kept while its sender's turn is awaited, and has not been admitted by then.

    Raises:
        Refusal: `LIMIT_EXCEEDED`.
    """
    if len(first) > HEADER_BYTES_MAX:
        raise Refusal(
            ErrorReason.LIMIT_EXCEEDED,
            f"the first message of a {what} has {len(first)} bytes: it is its header "
            f"alone, which has {HEADER_BYTES_MAX} at most",
        )


def _header(first: bytes | None) -> messages.StageOptimizerStateHeader:
    if first is not None:
        check_header_alone(first, "state")
        message = decode(messages.StageOptimizerStateRequest, first)
        if message.HasField("header"):
            return message.header
        if message.HasField("part"):
            raise _without_header(message.part)
    raise Refusal(ErrorReason.MALFORMED_MESSAGE, "the state has no header")


def _check_part(
    header: messages.StageOptimizerStateHeader, part: push_pb2.OptimizerStatePart
) -> None:
    if part.optimizer != header.optimizer:
        raise _without_header(part)


def _without_header(part: push_pb2.OptimizerStatePart) -> Refusal:
    return Refusal(
        ErrorReason.MALFORMED_MESSAGE,
        f"a part of the state of {part.optimizer[:64]!r} comes before a header that "
        "names it",
    )


def _settings(host: ShardHost, optimizer: str) -> messages.OptimizerSettings:
    state = host.model.core.state
    used = state.used.get(optimizer)
    if used is None:
        return messages.OptimizerSettings()
    return messages.OptimizerSettings(
        groups=[
            schema_pb2.GroupHyperparameters(values=values)
            for values in used.hyperparameters
        ],
        scheduler_steps=used.scheduler_steps,
        next_scheduler_steps=state.settings_of_next()[optimizer].scheduler_steps,
    )
