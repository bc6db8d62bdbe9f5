"""Applies what a shard has recorded, by its own arithmetic and without a job."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch

from psserver.shard.core.push import PushId
from psserver.shard.host.chunk_updates import apply_update
from psserver.shard.host.recorded_effects import load_tensors, load_update
from psserver.shard.host.recorder import PULLED, arithmetic_text, values_digest
from psserver.shard.host.recording import (
    SUFFIX,
    Entry,
    RecordingError,
    RecordingReader,
)
from psserver.shard.host.shard_model import ShardModel, shard_model
from psserver.shard.tensors.chunk_image import ChunkImage, HeldState
from psserver.shard.tensors.sent_values import SentValues
from pswire.checkpoint.errors import UNREADABLE, CheckpointError
from pswire.checkpoint.parts import PartKey
from pswire.job_terms_codec import load_settings, load_terms
from pswire.membership import Outcome, WorkerKey
from pswire.placement import Chunk
from pswire.torch_types import buffer_of

if TYPE_CHECKING:
    from pswire.job_settings import JobSettings
    from pswire.optimizer_states import StateKey

_CLOCK: Final = "clock:"

_NAME: Final = re.compile(rf"shard-([0-9]{{1,9}})-([0-9]{{1,9}}){re.escape(SUFFIX)}")

_ADVANCES: Final = ("record", "done", "cut")
"""Entries that say which version and clock the shard has come to."""

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
        self._lacking: set[int] | None = None
        reader = RecordingReader(path)
        for entry in _decoded(reader, self._begin_with):
            if entry is None:
                break
        else:
            why = reader.cut_text or self.ending
            raise RecordingError(
                f"{path} ends before all first values are in it{why and ', '}{why}: "
                "nothing can be replayed"
            )
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
                    reason = entry.line.get("reason")
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
        if entry.kind == "begin":
            self.settings: JobSettings = load_settings(line["settings"])
            if not isinstance(self.settings.job_id, str):
                raise TypeError("its job's id is no text")
            self.shard_index: int = index(line["shard"])
            self.incarnation: int = index(line["incarnation"])
            self._arithmetic: str = line["arithmetic"]
            self.model: ShardModel = shard_model(
                load_terms(line["terms"]),
                settings=self.settings,
                shard_index=self.shard_index,
            )
            self._lacking = {chunk.index for chunk in self.model.chunks}
            self.model.engine.begin_seed()
        elif entry.kind == "end":
            self.ending = line.get("reason", "")
        elif entry.kind == "values":
            assert self._lacking is not None, "values come after the beginning"
            image = _image(line, entry.data)
            self._finite[line["chunk"]] = image.is_finite
            self.model.engine.write_seed_image(line["chunk"], image)
            self._lacking.discard(line["chunk"])
        elif entry.kind == "terms":
            self.model.declare(load_terms(line["terms"]))
        return None if self._lacking == set() else entry

    def _take(self, entry: Entry) -> Entry:
        line = entry.line
        match entry.kind:
            case "update":
                self._apply(entry)
            case "state":
                self._load_state(line, entry.data)
            case "terms":
                self.model.declare(load_terms(line["terms"]))
            case "push":
                push = _push(line["push"])
                norm = line["gradient_norm"]
                sent = (
                    index(line["clock"]),
                    float(line["weight"]),
                    None if norm is None else float(norm),
                )
                # It comes again where a call broke.
                self._open.setdefault(push, ReplayedPush(push, *sent))
            case "done":
                push = _push(line["push"])
                known = self._open.pop(push, ReplayedPush(push))
                known.outcome = Outcome.labelled(line["outcome"]).label
                known.version = index(line["version"])
                self.pushes.append(known)
        if entry.kind in _ADVANCES:
            self.version, self.clock = index(line["version"]), index(line["clock"])
        return entry

    def _apply(self, entry: Entry) -> None:
        line = entry.line
        chunk = self.model.placement.chunks[line["chunk_index"]]
        row_lengths = [each.row_length for each in self.model.terms.schema.entries]
        effect, rest = load_update(line, entry.data, chunk, row_lengths)
        pushes = list(map(_push, line["pushes"]))
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
        pulled = None
        if line["pulled"]:
            pulled = SentValues()
            pulled.copies = {chunk.index: load_tensors(line["pulled"], rest)[PULLED]}
        before = self.values(chunk).clone()
        applied = apply_update(self.model.engine, effect, pulled)
        self._look_at(update, chunk, before)
        is_same = values_digest(self.model.engine, chunk.index) == line["digest"]
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
            assert key.state is not None
            states.setdefault(key.chunk_index, {})[key.state] = tensor
        self.model.engine.load_state(
            line["optimizer"], states, spec_digest=line["spec_digest"]
        )


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
            made = take(entry)
        except (*UNREADABLE, CheckpointError, AssertionError, RuntimeError) as error:
            # torch raises the last one, of shapes that do not fit.
            raise reader.damaged(
                entry.number, entry.place, f"{type(error).__name__}, {error}"
            ) from error
        yield made


def _image(line: Mapping[str, Any], data: memoryview) -> ChunkImage:
    index = line["chunk"]
    values = master = None
    states: dict[str, dict[StateKey, torch.Tensor]] = {}
    for name, tensor in load_tensors(line["tensors"], data).items():
        key = PartKey.parse(name)
        if key.state is not None:
            states.setdefault(key.optimizer, {})[key.state] = tensor
        elif key == PartKey.master(index):
            master = tensor
        else:
            values = tensor
    assert values is not None
    digests = line["spec_digests"]
    held = {name: HeldState(digests[name], state) for name, state in states.items()}
    return ChunkImage(values=values, master=master, states=held)


def _push(values: Sequence[Any]) -> PushId:
    worker_id, incarnation, sequence = values
    if not isinstance(worker_id, str):
        raise TypeError(f"the worker of a push is {worker_id!r:.80}")
    return PushId(WorkerKey(worker_id, index(incarnation)), index(sequence))
