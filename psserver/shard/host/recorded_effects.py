"""What a recording says of updates and tensors: a line of JSON, and bytes beside it.

Gradients are as they were received: compressed ones in their encoding, sparse ones with
their rows. Numbers of Python's floats go through JSON unchanged.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from psserver.shard.core.effects import ApplyChunk, BufferAverage, StagedContribution
from psserver.shard.tensors.compressed_gradients import CompressedPayload
from psserver.shard.tensors.contribution import SparsePayload
from pswire.encodings.known import ENCODINGS
from pswire.membership import WorkerKey
from pswire.placement import Chunk
from pswire.schema import ElementType
from pswire.slice_rows import pack_rows, unpack_rows
from pswire.torch_types import TORCH_DTYPES, buffer_of, element_type_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

Line = dict[str, Any]


def dump_update(effect: ApplyChunk) -> "tuple[Line, list[Buffer]]":
    """An update's line and its contributions' bytes."""
    average = effect.average
    parts, data = [], []
    for each in effect.contributions:
        part, pieces = _dump_part(each)
        parts.append(part | {"bytes": [memoryview(piece).nbytes for piece in pieces]})
        data += pieces
    return {
        "clock": effect.clock,
        "chunk": effect.chunk_index,
        "optimizer": effect.optimizer,
        "contributions": parts,
        "total_weight": effect.total_weight,
        "hyperparameters": effect.hyperparameters,
        "spec_digest": effect.spec_digest,
        "pusher": effect.pusher,
        "staleness": effect.staleness,
        "average": average and [sorted(average.entry_indexes), average.member_count],
        "gradient_scale": effect.gradient_scale,
    }, data


def load_update(
    line: Mapping[str, Any],
    data: memoryview,
    chunk: Chunk,
    row_lengths: Sequence[int],
) -> tuple[ApplyChunk, memoryview]:
    """Reads what `dump_update` wrote.

    Args:
        line: The line.
        data: Its bytes, and more behind them perhaps.
        chunk: The chunk that it is of.
        row_lengths: Elements of a row of each tensor of the schema.

    Returns:
        The update, and the bytes behind it.
    """
    contributions = []
    for part in line["contributions"]:
        pieces = []
        for byte_count in part["bytes"]:
            pieces.append(data[:byte_count])
            data = data[byte_count:]
        contributions.append(_load_part(part, pieces, chunk, row_lengths))
    average, pusher = line["average"], line["pusher"]
    effect = ApplyChunk(
        clock=line["clock"],
        chunk_index=line["chunk"],
        optimizer=line["optimizer"],
        contributions=tuple(contributions),
        total_weight=line["total_weight"],
        hyperparameters=tuple(map(tuple, line["hyperparameters"])),
        spec_digest=line["spec_digest"],
        pusher=pusher and WorkerKey(*pusher),
        staleness=line["staleness"],
        average=average and BufferAverage(frozenset(average[0]), average[1]),
        gradient_scale=line["gradient_scale"],
    )
    return effect, data


def dump_tensors(
    tensors: Mapping[str, torch.Tensor],
) -> "tuple[list[Any], list[Buffer]]":
    """Names, types and shapes of tensors, and their bytes."""
    rows = [
        [name, element_type_of(tensor.dtype), list(tensor.shape)]
        for name, tensor in tensors.items()
    ]
    return rows, [buffer_of(tensor.contiguous()) for tensor in tensors.values()]


def load_tensors(rows: Sequence[Any], data: memoryview) -> dict[str, torch.Tensor]:
    """Reads what `dump_tensors` wrote, into memory of its own."""
    tensors = {}
    for name, element_type, shape in rows:
        tensor = torch.empty(shape, dtype=TORCH_DTYPES[ElementType(element_type)])
        view = buffer_of(tensor)
        if view:  # that of no element is read-only
            view[:], data = data[: len(view)], data[len(view) :]
        tensors[name] = tensor
    return tensors


def _dump_part(part: StagedContribution) -> "tuple[Line, list[Buffer]]":
    payload = part.payload
    line: Line = {
        "worker": part.worker_id,
        "weight": part.weight,
        "presence": _bits_text(part.presence),
        "loss_scale": part.loss_scale,
        "factor": part.factor,
        "value_entries": sorted(part.value_entries),
        "is_source": part.is_source,
    }
    if isinstance(payload, CompressedPayload):
        line["encoded"] = [
            payload.encoding.name,
            payload.parameter_count,
            payload.buffer_bytes,
            payload.element_type,
            payload.chunk_bytes,
        ]
        return line, [payload.data]
    if isinstance(payload, SparsePayload):
        line["chunk_bytes"] = payload.chunk_bytes
        return line, [
            pack_rows(list(compress(payload.rows, part.presence))),
            payload.data,
        ]
    assert isinstance(payload, memoryview)
    return line, [payload]


def _load_part(
    line: Mapping[str, Any],
    pieces: Sequence[memoryview],
    chunk: Chunk,
    row_lengths: Sequence[int],
) -> StagedContribution:
    presence = tuple(each == "1" for each in line["presence"])
    *_, data = pieces
    payload: object = data
    if "encoded" in line:
        name, parameter_count, buffer_bytes, element_type, chunk_bytes = line["encoded"]
        payload = CompressedPayload(
            data=data,
            encoding=ENCODINGS[name],
            parameter_count=parameter_count,
            buffer_bytes=buffer_bytes,
            element_type=ElementType(element_type),
            chunk_bytes=chunk_bytes,
        )
    elif "chunk_bytes" in line:
        rows = unpack_rows(pieces[0], chunk, presence, row_lengths)
        payload = SparsePayload(data, rows, line["chunk_bytes"])
    return StagedContribution(
        worker_id=line["worker"],
        weight=line["weight"],
        presence=presence,
        payload=payload,
        loss_scale=line["loss_scale"],
        factor=line["factor"],
        value_entries=frozenset(line["value_entries"]),
        is_source=line["is_source"],
    )


def _bits_text(bits: Sequence[bool]) -> str:
    return "".join("01"[bit] for bit in bits)
