"""Applies what a shard has recorded, by its own arithmetic and without a job."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch

from psserver.shard.core.push import PushId
from psserver.shard.host.chunk_updates import apply_update
from psserver.shard.host.recorded_effects import (
    check_line,
    check_update,
    load_tensors,
    load_update,
)
from psserver.shard.host.recorder import PULLED, arithmetic_text, values_digest
from psserver.shard.host.recording import (
    SUFFIX,
    Entry,
    RecordingError,
    RecordingReader,
)
from psserver.shard.host.shard_model import shard_model
from psserver.shard.tensors.chunk_image import ChunkImage, HeldState
from psserver.shard.tensors.sent_values import SentValues
from psserver.shard.tensors.shard_image import elements_of
from psserver.shard.tensors.shard_optimizers import check_optimizer
from pswire.checkpoint.errors import UNREADABLE, DamagedError
from pswire.checkpoint.parts import PartKey
from pswire.clipping import is_clip_norm
from pswire.job_terms_codec import load_settings, load_terms
from pswire.limits import CHUNK_BYTES_MIN, SHARD_COUNT_MAX
from pswire.membership import WorkerKey
from pswire.membership_codec import read_settings, settings_message
from pswire.names import check_name, printable
from pswire.placement import Chunk, shard_bytes_min
from pswire.reasons import Refusal
from pswire.schema_codec import checked_terms
from pswire.torch_types import TORCH_DTYPES, buffer_of

if TYPE_CHECKING:
    from pswire.job_settings import JobSettings
    from pswire.job_terms import JobTerms
    from pswire.optimizer_states import StateKey

_CLOCK: Final = "clock:"

_NAME: Final = re.compile(rf"shard-([0-9]{{1,9}})-([0-9]{{1,9}}){re.escape(SUFFIX)}")

_ADVANCES: Final = ("record", "done", "cut")
"""Entries that say which version and clock the shard has come to."""

_REASON_LENGTH_MAX: Final = 512
"""Characters of why a recording has ended, as it says."""

UpdateKey = tuple[object, ...]
"""Of an update of the whole model, the same on all shards: a push or a clock."""


class Until(NamedTuple):
    """Where a replay ends; without either at the end of the recording.

    Attributes:
        version: Steps in the values.
        clock: Clock that every member has reached.
    """

    version: int | None = None
    clock: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `VERSION` or `clock:CLOCK`.

        Raises:
            ValueError: It is neither.
        """
        number = text.removeprefix(_CLOCK)
        if not (number.isascii() and number.isdigit()):
            raise ValueError(f"{text!r} is neither a version, as 120, nor clock:30")
        if text.startswith(_CLOCK):
            return cls(clock=int(number))
        return cls(version=int(number))

    def is_reached(self, version: int, clock: int) -> bool:
        """Whether a shard at this version and clock is there."""
        if self.version is not None:
            return version >= self.version
        return self.clock is not None and clock >= self.clock


@dataclass(slots=True)
class ReplayedPush:
    """One push on one shard.

    Attributes:
        push: Whose, and its sequence number.
        clock: Its clock, as its worker knew it; None, as what follows, for one that was
            dropped before its trailer was there.
        weight: Samples behind its gradient.
        gradient_norm: L2 norm of its whole gradient; None if that is not finite.
        update: Which update it is part of; None before there is one.
        staleness: Updates between the values that it came from and it.
        outcome: What became of it; empty while it is not done.
        version: Of the shard when it was done.
    """

    push: PushId
    clock: int | None = None
    weight: float | None = None
    gradient_norm: float | None = None
    update: UpdateKey | None = None
    staleness: int = 0
    outcome: str = ""
    version: int = 0


@dataclass(slots=True)
class ReplayedUpdate:
    """A push that is applied by itself, or a clock, on one shard.

    Attributes:
        pushes: Whose gradients it has.
        clock: Its clock.
        square: Of the L2 norm of the change of the shard's values.
        nonfinite: Tensors that are not finite after it, and were before.
    """

    pushes: list[PushId]
    clock: int
    square: float = 0.0
    nonfinite: list[str] = field(default_factory=list)


class ShardReplay:
    """One recording, applied.

    Attributes:
        path: The file.
        settings: Of the job.
        model: What the shard holds.
        shard_index: Its place.
        incarnation: Count of its starts.
        version: Steps in its values.
        clock: Clock that every member has reached.
        pushes: In the order in which they were done, then those that were not.
        updates: In the order of their beginnings.
        chunk_update_count: Updates of single chunks.
        ending: How far it was replayed, in words.
        damage: What is wrong with the recording; empty if nothing.
        difference: Where values are not those that the shard had; empty if they are.
        error: With what the shard's last update failed, in words; empty if none did.
    """

    def __init__(self, path: Path) -> None:
        """Reads what the recording is of, and its first values.

        Raises:
            RecordingError: Not all of that is there, or is damaged.
            OSError: The file can't be read.
        """
        self.path = path
        self.version = self.clock = 0
        self.pushes: list[ReplayedPush] = []
        self.updates: dict[UpdateKey, ReplayedUpdate] = {}
        self.chunk_update_count = 0
        self.ending = self.damage = self.difference = self.error = ""
        self._open: dict[PushId, ReplayedPush] = {}
        self._finite: dict[int, bool] = {}
        self._own: dict[int, Chunk] = {}
        self._lacking: set[int] | None = None
        reader = RecordingReader(path)
        for entry in _decoded(reader, self._begin_with):
            if entry is None:
                break
        else:
            why = reader.cut_text or self.ending
            raise RecordingError(self._beginning_text(why))
        self.model.engine.commit_seed()

    def run(self, until: Until) -> None:
        """Applies everything up to a point.

        Raises:
            OSError: The file can't be read.
        """
        reader = RecordingReader(self.path)
        self.ending = "to the last entry, and its shard still runs or was killed"
        try:
            for entry in _decoded(reader, self._take):
                if entry is None:
                    continue
                if entry.kind in _ADVANCES and until.is_reached(
                    self.version, self.clock
                ):
                    self.ending = f"up to --until, entry {entry.number}"
                    break
                if entry.kind == "end":
                    reason = _reason(entry.line)
                    early = f", before that of its shard: {reason}"
                    self.ending = f"to the end{early if reason else ''}"
        except RecordingError as error:
            self.damage = str(error)
            self.ending = "up to the damage"
        if reader.cut_text:
            self.ending = f"to the last whole entry; the file ends {reader.cut_text}"
        self.pushes += self._open.values()

    @property
    def push_count(self) -> int:
        """Pushes that were done."""
        return len(self.pushes) - len(self._open)

    @property
    def digest(self) -> str:
        """SHA-256 of the values of all chunks, in schema order."""
        found = hashlib.sha256()
        for chunk in self.model.chunks:
            found.update(buffer_of(self.values(chunk)))
        return found.hexdigest()

    def values(self, chunk: Chunk) -> torch.Tensor:
        """Elements of a chunk, 1-D, shared."""
        return self.model.engine.vectors.view(chunk.index)

    # What entries say

    def _begin_with(self, entry: Entry) -> Entry | None:
        """Takes what comes before all updates; None once it has all of it."""
        line = entry.line
        match entry.kind:
            case "begin" if self._lacking is None:
                self._begin(line)
            case "end":
                self.ending = _reason(line)
            case "values":
                self._begin_chunk(line, entry.data)
            case "terms":
                self._declare(line)
        return None if self._lacking == set() else entry

    def _begin(self, line: Mapping[str, Any]) -> None:
        settings, terms = _settings(line["settings"]), _terms(line["terms"])
        if line["shard"] >= settings.shard_count:
            raise DamagedError(
                f"it is of shard {line['shard']}, of {settings.shard_count}"
            )
        for spec in terms.optimizers:
            check_optimizer(spec)
        if problem := terms.problem(settings.update_rules(terms.clip_grad_norm)):
            raise DamagedError(f"no job has these rules: {problem}")
        # Else a short file could name a model whose chunks alone would fill the memory.
        size, shards = self.path.stat().st_size, settings.shard_count
        least = shard_bytes_min(terms.schema, shards, terms.chunk_bytes(settings))
        if least <= size:
            placement = terms.placement(settings)
            least = placement.byte_count_of_shard(line["shard"])
        if least > size:
            raise RecordingError(self._beginning_text())
        self.settings, self._arithmetic = settings, line["arithmetic"]
        self.shard_index, self.incarnation = line["shard"], line["incarnation"]
        self.model = shard_model(terms, settings=settings, shard_index=self.shard_index)
        self._own = {chunk.index: chunk for chunk in self.model.chunks}
        self._lacking = set(self._own)
        self.model.engine.begin_seed()

    def _begin_chunk(self, line: Mapping[str, Any], data: memoryview) -> None:
        chunk = self._chunk(line["chunk"])
        assert self._lacking is not None, "of what has begun there are chunks"
        image = _image(line, data, chunk)
        self._finite[chunk.index] = image.is_finite
        self.model.engine.write_seed_image(chunk.index, image)
        self._lacking.discard(chunk.index)

    def _beginning_text(self, why: str = "") -> str:
        return (
            f"{self.path} ends before all first values are in it{why and ', '}{why}: "
            "nothing can be replayed"
        )

    def _chunk(self, chunk_index: int) -> Chunk:
        """A chunk of this shard.

        Raises:
            DamagedError: It is of none, or the recording has not begun.
        """
        if chunk_index not in self._own:
            raise DamagedError(f"it is of chunk {chunk_index}, which the shard has not")
        return self._own[chunk_index]

    def _declare(self, line: Mapping[str, Any]) -> None:
        terms = _terms(line["terms"])
        if not self._own or terms.schema != self.model.terms.schema:
            raise DamagedError("it declares optimizers of another model")
        self.model.declare(terms)

    def _take(self, entry: Entry) -> Entry:
        line = entry.line
        match entry.kind:
            case "update":
                self._apply(entry)
            case "state":
                self._load_state(line, entry.data)
            case "terms":
                self._declare(line)
            case "push":
                push = _push(line["push"])
                sent = (line["clock"], line["weight"], line["gradient_norm"])
                # It comes again where a call broke.
                self._open.setdefault(push, ReplayedPush(push, *sent))
            case "done":
                push = _push(line["push"])
                known = self._open.pop(push, ReplayedPush(push))
                known.outcome, known.version = line["outcome"], line["version"]
                self.pushes.append(known)
        if entry.kind in _ADVANCES:
            self.version, self.clock = line["version"], line["clock"]
        return entry

    def _apply(self, entry: Entry) -> None:
        line = entry.line
        chunk, engine = self._chunk(line["chunk_index"]), self.model.engine
        row_lengths = [each.row_length for each in self.model.terms.schema.entries]
        effect, rest = load_update(
            line, entry.data, chunk, row_lengths, engine.buffer_entries
        )
        pushes = list(map(_push, line["pushes"]))
        if unknown := set(pushes) - set(self._open):
            raise DamagedError(f"it is of {min(unknown)}, which is not under way")
        key: UpdateKey = (effect.clock,) if effect.pusher is None else (*pushes,)
        update = self.updates.setdefault(key, ReplayedUpdate(pushes, effect.clock))
        for push in pushes:
            known = self._open[push]
            known.update = key
            known.staleness = max(known.staleness, effect.staleness)
            if push not in update.pushes:
                update.pushes.append(push)
        if line["error"]:
            self.error = f"update of chunk {chunk.index}: {line['error']}"
            return
        self.chunk_update_count += 1
        if not line["applied"]:
            return
        check_update(engine, effect, chunk)
        pulled = _pulled(line["pulled"], rest, chunk)
        before = self.values(chunk).clone()
        applied = apply_update(engine, effect, pulled)
        self._look_at(update, chunk, before)
        is_same = values_digest(engine, chunk.index) == line["digest"]
        is_same &= list(applied.torn_worker_ids) == line["torn"]
        if not (is_same or self.difference):
            self.difference = (
                f"chunk {chunk.index} differs from the one that the shard had after "
                f"entry {entry.number}; recorded with {self._arithmetic}, replayed "
                f"with {arithmetic_text()}"
            )

    def _look_at(
        self, update: ReplayedUpdate, chunk: Chunk, before: torch.Tensor
    ) -> None:
        """Measures what an update has changed."""
        after = self.values(chunk)
        if not after.is_floating_point():
            return
        change = (after.double() - before.double()).norm().item()
        update.square += change * change
        if not math.isfinite(change) and self._finite[chunk.index]:
            self._finite[chunk.index] = False
            names = [each.name for each in self.model.terms.schema.entries]
            sizes = [piece.element_count for piece in chunk.slices]
            update.nonfinite += [
                names[piece.entry_index]
                for piece, part in zip(chunk.slices, after.split(sizes), strict=True)
                if not part.isfinite().all()
            ]

    def _load_state(self, line: Mapping[str, Any], data: memoryview) -> None:
        states: dict[int, dict[StateKey, torch.Tensor]] = {}
        for name, tensor in load_tensors(line["tensors"], data).items():
            key = PartKey.parse(name)
            if key.state is None or key.optimizer != line["optimizer"]:
                raise DamagedError(
                    f"its tensor {printable(name)[:64]} is no such state"
                )
            chunk = self._chunk(key.chunk_index)
            states.setdefault(chunk.index, {})[key.state] = tensor
        optimizer, digest = line["optimizer"], line["spec_digest"]
        engine = self.model.engine
        for chunk_index, state in states.items():
            engine.check_state(optimizer, chunk_index, state, spec_digest=digest)
        engine.load_state(optimizer, states, spec_digest=digest)


def newest_recordings(paths: Sequence[Path]) -> list[Path]:
    """The recordings that are named, and of a folder of each shard the newest begun.

    Raises:
        RecordingError: A folder has none.
        OSError: A folder can't be read.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        newest: dict[int, Path] = {}
        for (shard, _), file in sorted(_recordings_in(path), reverse=True):
            # An older one that is damaged is no matter.
            if shard not in newest and _is_begun(file):
                newest[shard] = file
        if not newest:
            raise RecordingError(
                f"{path} has no recording in which a shard has begun: start the shards "
                "with --record FOLDER first"
            )
        found += [newest[shard] for shard in sorted(newest)]
    return found


def _recordings_in(folder: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    """Files with names of recordings: shard and start of each, and where it is."""
    for file in folder.iterdir():
        if numbers := _NAME.fullmatch(file.name):
            yield (int(numbers[1]), int(numbers[2])), file


def _is_begun(path: Path) -> bool:
    """Whether a shard has come to its values; one that waits for them has not."""
    first = next(RecordingReader(path).entries(), None)
    return first is not None and first.kind == "begin"


def _decoded(reader: RecordingReader, take: Any) -> Iterator[Any]:  # noqa: ANN401
    """What is made of each entry; one that makes no sense is a damaged one."""
    for entry in reader.entries():
        try:
            check_line(entry.kind, entry.line)
            made = take(entry)
        except (DamagedError, Refusal) as error:
            what = error.message if isinstance(error, Refusal) else str(error)
            raise reader.damaged(entry.number, entry.place, what) from error
        yield made


def _settings(data: Mapping[str, Any]) -> "JobSettings":
    """Settings, checked as those that a coordinator sends."""
    try:
        settings = read_settings(settings_message(load_settings(data)))
        check_name("job", settings.job_id)
    except UNREADABLE as error:
        raise DamagedError(f"its settings are none: {_text_of(error)}") from error
    if not 1 <= settings.shard_count <= SHARD_COUNT_MAX:
        raise DamagedError(f"its job has {settings.shard_count} shards")
    if settings.chunk_bytes < 0 or 0 < settings.chunk_bytes < CHUNK_BYTES_MIN:
        raise DamagedError(f"its chunks have {settings.chunk_bytes} bytes")
    for value in (settings.delay_compensation, settings.gradient_norm_max):
        if not (math.isfinite(value) and value >= 0):
            raise DamagedError(f"its settings have the number {value}")
    return settings


def _terms(data: Mapping[str, Any]) -> "JobTerms":
    """Terms, checked as those that a worker sends."""
    try:
        terms = checked_terms(load_terms(data))
        terms.schema.validate()
    except UNREADABLE as error:
        raise DamagedError(f"its terms are none: {_text_of(error)}") from error
    if terms.clip_grad_norm and not is_clip_norm(terms.clip_grad_norm):
        raise DamagedError(f"it clips gradients to {terms.clip_grad_norm}")
    return terms


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}, {printable(str(error))[:128]}"


def _image(line: Mapping[str, Any], data: memoryview, chunk: Chunk) -> ChunkImage:
    """The first values of a chunk; its state is still to be checked."""
    value, master = PartKey.value(chunk.index), PartKey.master(chunk.index)
    elements: dict[PartKey, torch.Tensor] = {}
    states: dict[str, dict[StateKey, torch.Tensor]] = {}
    for name, tensor in load_tensors(line["tensors"], data).items():
        key = PartKey.parse(name)
        if key.state is not None and key.chunk_index == chunk.index:
            states.setdefault(key.optimizer, {})[key.state] = tensor
        elif key == value:
            dtype = TORCH_DTYPES[chunk.element_type]
            elements[key] = elements_of(tensor, key, chunk, dtype)
        elif key == master:
            elements[key] = elements_of(tensor, key, chunk, torch.float32)
        else:
            raise DamagedError(
                f"its tensor {printable(name)[:64]} is none of the chunk"
            )
    digests = line["spec_digests"]
    if value not in elements or set(digests) != set(states):
        raise DamagedError("it lacks the values, or the declaration of some state")
    held = {name: HeldState(digests[name], state) for name, state in states.items()}
    return ChunkImage(elements[value], elements.get(master), held)


def _pulled(rows: Sequence[Any], data: memoryview, chunk: Chunk) -> SentValues | None:
    """What the pusher of an update was sent of a chunk; None if nothing is known."""
    tensors = load_tensors(rows, data)
    if not tensors:
        return None
    copy = tensors.get(PULLED)
    if copy is None or len(tensors) > 1 or tuple(copy.shape) != (chunk.element_count,):
        raise DamagedError("what its worker had pulled are no values of the chunk")
    pulled = SentValues()
    pulled.copies = {chunk.index: copy}
    return pulled


def _push(values: Sequence[Any]) -> PushId:
    worker_id, incarnation, sequence = values
    return PushId(WorkerKey(worker_id, incarnation), sequence)


def _reason(line: Mapping[str, Any]) -> str:
    """Why a recording has ended before its shard; empty if it has not."""
    return printable(line.get("reason", ""))[:_REASON_LENGTH_MAX]
