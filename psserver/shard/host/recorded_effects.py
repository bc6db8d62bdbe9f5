"""What a recording says of updates and tensors: a line of JSON, and bytes beside it.

Gradients are as they were received: compressed ones in their encoding, sparse ones with
their rows. Numbers of Python's floats go through JSON unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import compress
from typing import TYPE_CHECKING, Any, Final

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

_NAMES: Final[Mapping[type, tuple[str, ...]]] = {
    kind: tuple(each.name for each in fields(kind))
    for kind in (ApplyChunk, StagedContribution)
}
"""All fields: one that is added and is a number or a text is recorded, too."""


def dump_update(effect: ApplyChunk) -> "tuple[Line, list[Buffer]]":
    """An update's line and its contributions' bytes."""
    average = effect.average
    parts, data = [], []
    for each in effect.contributions:
        part, pieces = _dump_part(each)
        parts.append(part | {"bytes": [memoryview(piece).nbytes for piece in pieces]})
        data += pieces
    return {
        **_fields_of(effect),
        "contributions": parts,
        "average": average and [sorted(average.entry_indexes), average.member_count],
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
    effect: Line = {
        **_known(ApplyChunk, line),
        "contributions": tuple(contributions),
        "hyperparameters": tuple(map(tuple, line["hyperparameters"])),
        "pusher": pusher and WorkerKey(*pusher),
        "average": average and BufferAverage(frozenset(average[0]), average[1]),
    }
    return ApplyChunk(**effect), data


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
        **_fields_of(part),
        "presence": "".join("01"[bit] for bit in part.presence),
        "value_entries": sorted(part.value_entries),
    }
    del line["payload"]
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
    found: Line = {
        **_known(StagedContribution, line),
        "presence": presence,
        "payload": payload,
        "value_entries": frozenset(line["value_entries"]),
    }
    return StagedContribution(**found)


def _fields_of(effect: ApplyChunk | StagedContribution) -> Line:
    return {name: getattr(effect, name) for name in _NAMES[type(effect)]}


def _known(
    kind: type[ApplyChunk | StagedContribution], line: Mapping[str, Any]
) -> Line:
    """What a line has of the fields of a class."""
    return {name: value for name, value in line.items() if name in _NAMES[kind]}
