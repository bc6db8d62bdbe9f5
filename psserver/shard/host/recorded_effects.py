"""What a recording says of updates and tensors: a line of JSON, and bytes beside it.

Gradients are as they were received: compressed ones in their encoding, sparse ones with
their rows. Numbers of Python's floats go through JSON unchanged. Whoever can write a
file can write any line: what is read is checked before anything is made of it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields as fields_of
from itertools import compress
from typing import TYPE_CHECKING, Any, Final

import torch

from psserver.shard.core.effects import ApplyChunk, BufferAverage, StagedContribution
from psserver.shard.tensors.compressed_gradients import (
    CompressedGradients,
    CompressedPayload,
    raw_byte_count,
)
from psserver.shard.tensors.contribution import SparsePayload
from pswire.checkpoint.errors import DamagedError
from pswire.checkpoint.json_shape import (
    Shape,
    anything,
    fields,
    flag,
    names_of,
    number,
    one_of,
    optional,
    real,
    row,
    rows,
    text,
)
from pswire.encodings.known import ENCODINGS
from pswire.limits import NUMBER_MAX, PUSH_WEIGHT_MAX, SHARD_COUNT_MAX
from pswire.membership import Outcome, WorkerKey
from pswire.names import printable
from pswire.placement import Chunk
from pswire.schema import ElementType
from pswire.slice_rows import pack_rows, unpack_rows
from pswire.torch_types import buffer_of, element_type_of, tensor_from_buffer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from psserver.shard.tensors.apply_engine import ApplyEngine

Line = dict[str, Any]

_NAMES: Final[Mapping[type, tuple[str, ...]]] = {
    kind: tuple(each.name for each in fields_of(kind))
    for kind in (ApplyChunk, StagedContribution)
}
"""All fields: one that is added and is a number or a text is recorded, too."""


_PLACE: Final = number(-NUMBER_MAX - 1)
"""A version or a clock, of which some are below 0 before the first one."""
_REACHED: Final = {"version": _PLACE, "clock": _PLACE}
_PUSH: Final = row(text, number(), number())
_TENSORS: Final = rows(row(text, one_of(tuple(ElementType)), rows(number())))

_CONTRIBUTION: Final = fields(
    {
        "worker_id": text,
        "weight": real,
        "presence": text,
        "loss_scale": real,
        "factor": real,
        "value_entries": rows(number()),
        "is_source": flag,
        "bytes": rows(number()),
        "encoding": text,
        "chunk_bytes": number(),
    },
    added=("encoding", "chunk_bytes"),
)

_LINES: Final[Mapping[str, Shape]] = {
    "begin": fields(
        {
            "shard": number(0, SHARD_COUNT_MAX - 1),
            "incarnation": number(),
            "settings": names_of(anything),
            "terms": names_of(anything),
            "arithmetic": text,
        }
    ),
    "values": fields(
        {"chunk": number(), "tensors": _TENSORS, "spec_digests": names_of(text)}
    ),
    "terms": fields({"terms": names_of(anything)}),
    "update": fields(
        {
            "clock": _PLACE,
            "chunk_index": number(),
            "optimizer": text,
            "contributions": rows(_CONTRIBUTION),
            "total_weight": real,
            "hyperparameters": rows(rows(real)),
            "spec_digest": text,
            "pusher": optional(row(text, number())),
            "staleness": number(),
            "average": optional(row(rows(number()), number(1))),
            "gradient_scale": real,
            "pushes": rows(_PUSH),
            "pulled": _TENSORS,
            "applied": flag,
            "torn": rows(text),
            "error": text,
            "digest": number(0, (1 << 64) - 1),
        }
    ),
    "state": fields(
        {"push": _PUSH, "optimizer": text, "spec_digest": text, "tensors": _TENSORS}
    ),
    "push": fields(
        {
            "push": _PUSH,
            "clock": _PLACE,
            "weight": real,
            "gradient_norm": optional(real),
        }
    ),
    "done": fields({"push": _PUSH, "outcome": text, **_REACHED}),
    "record": fields({"record": anything, **_REACHED}),
    "cut": fields({"snapshot": number(), **_REACHED}),
    "end": fields({"reason": text}, added=["reason"]),
}
"""Of each kind of entry what its line is like."""


def check_line(kind: str, line: Mapping[str, Any]) -> None:
    """Checks what an entry says, as far as that needs no model.

    Raises:
        DamagedError: No shard writes it so; the text names the field.
    """
    if kind not in _LINES:
        raise DamagedError(f"its kind is {printable(kind)[:64]!r}, which is none")
    _LINES[kind](line, kind)
    if kind == "done" and line["outcome"] not in Outcome.labels():
        raise DamagedError(
            f"its outcome is {printable(line['outcome'])[:64]!r}, which is none"
        )


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
    buffer_entries: Collection[int],
) -> tuple[ApplyChunk, memoryview]:
    """Reads what `dump_update` wrote.

    Args:
        line: The line, checked by `check_line`.
        data: Its bytes, and more behind them perhaps.
        chunk: The chunk that it is of.
        row_lengths: Elements of a row of each tensor of the schema.
        buffer_entries: Tensors of the schema that are buffers.

    Returns:
        The update, and the bytes behind it.

    Raises:
        DamagedError: No shard writes it so.
        Refusal: Encoded elements or numbers of rows are none of this chunk.
    """
    contributions = []
    for part in line["contributions"]:
        pieces = []
        for byte_count in part["bytes"]:
            pieces.append(data[:byte_count])
            data = data[byte_count:]
        contributions.append(
            _load_part(part, pieces, chunk, row_lengths, buffer_entries)
        )
    average, pusher = line["average"], line["pusher"]
    effect: Line = {
        **_known(ApplyChunk, line),
        "contributions": tuple(contributions),
        "hyperparameters": tuple(map(tuple, line["hyperparameters"])),
        "pusher": pusher and WorkerKey(*pusher),
        "average": average and BufferAverage(frozenset(average[0]), average[1]),
    }
    return ApplyChunk(**effect), data


def check_update(engine: "ApplyEngine", effect: ApplyChunk, chunk: Chunk) -> None:
    """Checks an update as a shard has checked its pushes as they came.

    Raises:
        DamagedError: No shard makes it.
        Refusal: No shard would have taken one of its pushes.
    """
    engine.declared.check_hyperparameters(
        effect.optimizer, effect.hyperparameters, spec_digest=effect.spec_digest
    )
    weights = [each.weight for each in effect.contributions]
    numbers = {
        "total_weight": (effect.total_weight, max(weights, default=0.0), math.inf),
        "gradient_scale": (effect.gradient_scale, 0.0, 1.0),
    }
    for each in effect.contributions:
        numbers |= {
            "weight": (each.weight, 0.0, PUSH_WEIGHT_MAX),
            "loss_scale": (each.loss_scale, 0.0, math.inf),
            "factor": (each.factor, 0.0, math.inf),  # by radial also above 1
        }
        for name, (value, least, most) in numbers.items():
            if not (math.isfinite(value) and least <= value <= most):
                raise DamagedError(f"its {name} is {value}, not in {least} to {most}")
        payload, presence = each.payload, each.presence
        byte_count, row_indices = raw_byte_count(chunk, presence), None
        if isinstance(payload, SparsePayload):
            byte_count = len(payload.data)
            packed = pack_rows(list(compress(payload.rows, presence)))
            row_indices = memoryview(packed)
        elif isinstance(payload, memoryview):
            byte_count = len(payload)
        engine.check_chunk(
            chunk.index,
            presence,
            byte_count,
            optimizer=effect.optimizer,
            row_indices=row_indices,
            value_entries=each.value_entries,
        )


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
    """Reads what `dump_tensors` wrote, into memory of its own.

    Raises:
        DamagedError: It has fewer bytes than its tensors, or dimensions that are none.
    """
    tensors = {}
    for name, number_of_type, shape in rows:
        element_type = ElementType(number_of_type)
        byte_count = math.prod(shape) * element_type.byte_count
        if byte_count > len(data) or (not byte_count and sum(shape)):
            raise DamagedError(
                f"its tensor {printable(name)[:64]!r} has shape {shape!a:.64}, and "
                f"{len(data)} bytes are there"
            )
        taken, data = data[:byte_count], data[byte_count:]
        flat = tensor_from_buffer(memoryview(bytearray(taken)), element_type)
        tensors[name] = flat.reshape(shape)
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
        line["encoding"] = payload.encoding.name
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
    buffer_entries: Collection[int],
) -> StagedContribution:
    presence = tuple(each == "1" for each in line["presence"])
    if len(presence) != len(chunk.slices):
        raise DamagedError(
            f"it has bits of {len(presence)} slices, and chunk {chunk.index} has "
            f"{len(chunk.slices)}"
        )
    if len(pieces) != 1 + ("chunk_bytes" in line):
        raise DamagedError(f"it has a gradient in {len(pieces)} pieces")
    if max(line["value_entries"], default=0) >= len(row_lengths):
        raise DamagedError("it has values of a tensor that is not there")
    *_, data = pieces
    payload: object = data
    if "encoding" in line:
        encoding = ENCODINGS.get(line["encoding"])
        if encoding is None:
            raise DamagedError(f"it is encoded as {line['encoding']!a:.64}")
        reader = CompressedGradients(encoding, buffer_entries)
        payload = reader.payload(chunk, presence, encoding.number, data)
    elif "chunk_bytes" in line:
        slices = unpack_rows(pieces[0], chunk, presence, row_lengths)
        payload = SparsePayload(data, slices, line["chunk_bytes"])
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
