"""Whatever a shard applies, in whatever order, a replay of its recording ends with it.

Drawn updates by threads that work on different chunks at once: gradients as they are
and encoded, by one push and by a clock, late ones, values, state that is loaded.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import torch

from psserver.config import RECORD_GIB_DEFAULT
from psserver.shard.core.effects import (
    ApplyChunk,
    BufferAverage,
    LoadState,
    StagedContribution,
)
from psserver.shard.core.push import PushId, Trailer
from psserver.shard.host.recorder import Recorder
from psserver.shard.host.recording import (
    MAGIC,
    RecordingError,
    RecordingReader,
    _entry,
)
from psserver.shard.host.replaying import (
    ReplayedPush,
    ShardReplay,
    Until,
    newest_recordings,
)
from psserver.shard.host.shard_model import shard_model
from psserver.shard.tensors.aggregate import NormLimit
from psserver.shard.tensors.compressed_gradients import CompressedPayload
from psserver.shard.tensors.sent_values import SentValues
from pswire.encodings.known import ENCODINGS
from pswire.job_settings import JobSettings
from pswire.membership import Outcome
from pswire.placement import Chunk
from pswire.schema import ElementType
from pswire.torch_types import TORCH_DTYPES, buffer_of
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.core_values import key
from tests.property.test_pending_images import OPTIMIZERS, bits, one_shard

SCHEDULE_COUNT: Final = 6
NAMES: Final = ("w0", "w1", "w2")

Update = tuple[list[PushId], ApplyChunk, SentValues | None, NormLimit | None]
"""What `Recorder.apply` takes, in this order, but for the engine."""

small_chunks = cut_into(64, 256)


class Recorded:
    """A shard that records drawn updates."""

    def __init__(
        self, seed: int, folder: Path, gib_max: float = RECORD_GIB_DEFAULT
    ) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.shards = one_shard(self.generator)
        settings = JobSettings(
            job_id="job",
            shard_count=1,
            delay_compensation=self.rng.choice([0.0, 0.3]),
            is_staleness_scaled=self.rng.random() < 0.5,
        )
        self.model = shard_model(self.shards.terms, settings=settings, shard_index=0)
        self.engine = self.model.engine
        self.recorder = Recorder.open(
            folder, shard_index=0, incarnation=1, settings=settings, gib_max=gib_max
        )
        self.recorder.begin(self.model)
        self.engine.begin_seed()
        for chunk in self.model.chunks:
            _, data = self.shards.gather(chunk, self.shards.first_values)
            self.engine.write_seed(chunk.index, data)
        self.engine.commit_seed()
        self.sequences = dict.fromkeys(NAMES, 0)
        self.pushes: list[PushId] = []

    def push(self) -> PushId:
        name = self.rng.choice(NAMES)
        self.sequences[name] += 1
        push = PushId(key(name), self.sequences[name])
        trailer = Trailer(optimizer="", weight=1.0, gradient_norm=2.0)
        self.recorder.pushed(push, push.sequence, trailer)
        self.pushes.append(push)
        return push

    def contribution(self, chunk: Chunk, name: str, optimizer: str) -> object:
        members = OPTIMIZERS[optimizer]
        presence = tuple(
            piece.entry_index in members and self.rng.random() < 0.8
            for piece in chunk.slices
        )
        count = sum(
            piece.element_count
            for piece, present in zip(chunk.slices, presence, strict=True)
            if present
        )
        values = torch.randn(count, generator=self.generator)
        values = values.to(TORCH_DTYPES[chunk.element_type])
        payload: object = buffer_of(values)
        if chunk.element_type is ElementType.FLOAT32 and self.rng.random() < 0.5:
            encoding = ENCODINGS[self.rng.choice(["bf16", "int8", "topk"])]
            payload = CompressedPayload(
                data=memoryview(encoding.codec().encode(values, seed=1)),
                encoding=encoding,
                parameter_count=count,
                buffer_bytes=0,
                element_type=chunk.element_type,
                chunk_bytes=chunk.byte_count,
            )
        return StagedContribution(
            worker_id=name,
            weight=self.rng.choice([1.0, 0.1, 7.0]),
            presence=presence,
            payload=payload,
            loss_scale=self.rng.choice([1.0, 1.0, 8.0]),
            factor=self.rng.choice([1.0, 3.0, 0.3]),  # clipped, or made longer
        )

    def update(self, chunk: Chunk) -> Update:
        optimizer = self.rng.choice(list(OPTIMIZERS))
        is_clock = self.rng.random() < 0.4
        pushes = [self.push() for _ in range(3 if is_clock else 1)]
        pushes = list({push.worker: push for push in pushes}.values())
        parts = [
            self.contribution(chunk, push.worker.worker_id, optimizer)
            for push in sorted(pushes)
        ]
        sent = None
        if not is_clock:
            sent = SentValues()
            values = torch.randn(chunk.element_count, generator=self.generator)
            sent.copies = {chunk.index: values.to(TORCH_DTYPES[chunk.element_type])}
        staged = [part for part in parts if isinstance(part, StagedContribution)]
        effect = ApplyChunk(
            clock=pushes[0].sequence,
            chunk_index=chunk.index,
            optimizer=optimizer,
            contributions=tuple(staged),
            total_weight=sum(part.weight for part in staged),
            hyperparameters=tuple(map(tuple, self.shards.hyperparameters(optimizer))),
            pusher=None if is_clock else pushes[0].worker,
            staleness=self.rng.randrange(4),
            average=None if is_clock else BufferAverage(frozenset(), len(NAMES)),
            gradient_scale=self.rng.choice([1.0, 0.37]),
        )
        is_limited = not is_clock and self.rng.random() < 0.3
        limit = NormLimit(self.rng.choice([0.1, 9.0]), is_exact=True)
        return pushes, effect, sent, limit if is_limited else None

    def apply_some(self) -> None:
        """Chunks at once, each in its own order."""
        drawn = [
            (chunk, [self.update(chunk) for _ in range(self.rng.randrange(6))])
            for chunk in self.model.chunks
        ]

        def work(chunk: Chunk, updates: list[Update]) -> None:
            if self.is_early[chunk.index]:
                self.recorder.record_first_values(self.engine, chunk.index)
            for pushes, effect, sent, limit in updates:
                self.recorder.apply(pushes, self.engine, effect, sent, limit)
            self.recorder.record_first_values(self.engine, chunk.index)

        self.is_early = {chunk.index: self.rng.random() < 0.5 for chunk, _ in drawn}
        with ThreadPoolExecutor(3) as threads:
            for each in [threads.submit(work, *item) for item in drawn]:
                each.result()

    def load(self) -> None:
        name = self.rng.choice(list(OPTIMIZERS))
        states = {
            chunk.index: self.engine.export_state(name, chunk.index)
            for chunk in self.rng.sample(self.model.chunks, 3)
        }
        effect = LoadState(push=self.push(), optimizer=name)
        self.recorder.load_state(self.engine, effect, states)

    def run(self) -> Path:
        for _ in range(3):
            self.apply_some()
            if self.rng.random() < 0.6:
                self.load()
            for push in self.pushes:
                self.recorder.done(self.model.core, push, Outcome.APPLIED)
            self.pushes.clear()
        self.recorder.close()
        return self.recorder.path

    def bits(self) -> dict[str, object]:
        return bits({c.index: self.engine.image_of(c.index) for c in self.model.chunks})


def bits_of(replay: ShardReplay) -> dict[str, object]:
    engine = replay.model.engine
    return bits({c.index: engine.image_of(c.index) for c in replay.model.chunks})


@pytest.mark.parametrize("seed", range(SCHEDULE_COUNT))
def test_a_replay_ends_with_all_bits(seed: int, tmp_path: Path) -> None:
    shard = Recorded(seed, tmp_path)
    path = shard.run()

    replay = ShardReplay(path)
    replay.run(Until())

    assert (replay.difference, replay.damage, replay.error) == ("", "", "")
    assert replay.ending == "to the end"
    assert replay.chunk_update_count > 20
    assert bits_of(replay) == shard.bits()


@pytest.mark.parametrize("seed", range(SCHEDULE_COUNT // 2))
def test_one_that_is_cut_anywhere_ends_with_its_last_whole_update(
    seed: int, tmp_path: Path
) -> None:
    path = Recorded(seed, tmp_path).run()
    whole = path.read_bytes()
    entries = list(RecordingReader(path).entries())
    first = next(i for i, each in enumerate(entries) if each.kind == "done")
    for entry in random.Random(seed).sample(entries[first:], 4):
        path.write_bytes(whole[: entry.place + random.Random(seed).randrange(1, 24)])

        replay = ShardReplay(path)
        replay.run(Until())

        before = entries[: entry.number - 1]
        assert replay.chunk_update_count == sum(e.kind == "update" for e in before)
        assert f"inside entry {entry.number}, at byte {entry.place}" in replay.ending
        assert (replay.difference, replay.damage) == ("", "")


def test_an_update_that_fails_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the job: what went into it is what one wants to see."""
    shard = Recorded(0, tmp_path)
    shard.apply_some()
    update = shard.update(shard.model.chunks[0])

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("psserver.shard.host.recorder.apply_update", fail)
        pushes, effect, *others = update
        with pytest.raises(RuntimeError, match="no memory"):
            shard.recorder.apply(pushes, shard.engine, effect, *others)  # type: ignore[arg-type]
    shard.recorder.close()

    replay = ShardReplay(shard.recorder.path)
    replay.run(Until())

    assert replay.error == "update of chunk 0: RuntimeError: no memory"
    assert bits_of(replay) == shard.bits()


def test_a_push_may_be_dropped_before_its_trailer_is_there(tmp_path: Path) -> None:
    shard = Recorded(0, tmp_path)
    shard.apply_some()
    push = PushId(key("w9"), 4)
    shard.recorder.done(shard.model.core, push, Outcome.DROPPED)
    shard.recorder.close()

    replay = ShardReplay(shard.recorder.path)
    replay.run(Until())

    assert replay.damage == ""
    assert replay.pushes[0] == ReplayedPush(push, outcome="dropped")


def test_a_recording_that_has_its_limit_is_replayed_up_to_there(tmp_path: Path) -> None:
    size = Recorded(0, tmp_path / "whole").run().stat().st_size
    recorded = Recorded(0, tmp_path / "part", gib_max=0.8 * size / 2**30)
    path = recorded.run()
    assert recorded.recorder.end_text

    replay = ShardReplay(path)
    replay.run(Until())

    assert replay.ending.startswith("to the end, before that of its shard: it has the ")
    assert (replay.damage, replay.difference) == ("", "")
    assert replay.chunk_update_count
    for number, share in enumerate((0.0001, 0.02)):  # not even its head, and that
        recorded = Recorded(0, tmp_path / str(number), gib_max=share * size / 2**30)
        with pytest.raises(RecordingError, match="first values are in it, it has the "):
            ShardReplay(recorded.run())


def test_of_a_folder_the_newest_start_counts_that_has_begun(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="no recording in which a shard has begun"):
        newest_recordings([tmp_path])
    settings = JobSettings(job_id="job", shard_count=1)
    for number in (2, 10):
        path = Recorded(number, tmp_path / str(number)).run()
        path.rename(tmp_path / f"shard-0-{number}.recording")
    # One that waits for its first values, and one that ended while it did.
    waiting, ended = (
        Recorder.open(tmp_path, shard_index=0, incarnation=number, settings=settings)
        for number in (11, 12)
    )
    ended.close()
    # What is older or no recording is not even looked into.
    for name in ("0-2", "0-²", "0-12-3", "x-1", "0-13.old"):
        (tmp_path / f"shard-{name}.recording").write_bytes(b"damaged")

    assert newest_recordings([tmp_path]) == [tmp_path / "shard-0-10.recording"]
    assert newest_recordings([waiting.path]) == [waiting.path]
    with pytest.raises(RecordingError, match="ends before all first values are in it"):
        ShardReplay(waiting.path)
    waiting.close()


@pytest.mark.parametrize("seed", range(2))
def test_values_that_come_out_differently_are_noticed(
    seed: int, tmp_path: Path
) -> None:
    path = Recorded(seed, tmp_path).run()
    replay = ShardReplay(path)
    # Of 16 bits, values would be made from the masters again.
    chunk, *_ = (
        each for each in replay.model.chunks if each.element_type is ElementType.FLOAT32
    )
    replay.model.engine.vectors.view(chunk.index).add_(1)

    replay.run(Until())

    assert f"chunk {chunk.index} differs" in replay.difference
    assert torch.__version__ in replay.difference


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("begin", {"incarnation": []}),
        ("begin", {"settings": {"job_id": {}, "shard_count": 1}}),
        ("values", {"chunk": "\ud800"}),
        ("push", {"weight": "x"}),
        ("push", {"gradient_norm": 10**400}),
        ("push", {"push": [["a"], 1, 1]}),
        ("push", {"clock": {}}),
        ("done", {"outcome": []}),
        ("done", {"version": None}),
        ("done", {"clock": "1"}),
        ("state", {"tensors": [["0/momentum_buffer", 1, [-1]]]}),
        ("state", {"optimizer": "nobody's"}),
        ("done", {"kind": "fit"}),
        ("update", {"chunk_index": 99_999}),
        ("update", {"contributions": [{}]}),
        ("update", {"total_weight": 0.0}),
        ("update", {"gradient_scale": float("nan")}),
        ("update", {"hyperparameters": [[-1.0]]}),
        ("update", {"pulled": [["pulled", 1, [1 << 40]]]}),
        ("update", {"pushes": [["w9", 1, 1]]}),
    ],
)
def test_what_no_release_writes_is_damage_though_its_digests_are_right(
    kind: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """It is found before anything is made of it, and not by what would fail then."""
    path = Recorded(1, tmp_path).run()
    pieces = [MAGIC]
    for each in RecordingReader(path).entries():
        line = {**each.line, **(changes if each.kind == kind else {})}
        written = str(line.pop("kind", each.kind))
        pieces += map(bytes, _entry(written, line, [each.data]))
    path.write_bytes(b"".join(pieces))
    try:
        replay = ShardReplay(path)
        replay.run(Until())
        said = replay.damage
    except RecordingError as error:
        said = str(error)
    assert b"is damaged: " in said.encode()


def test_a_short_file_of_a_large_model_takes_no_memory(tmp_path: Path) -> None:
    path = Recorded(1, tmp_path).run()
    first = next(RecordingReader(path).entries())
    line = dict(first.line)
    line["terms"]["schema"]["entries"][0]["shape"] = [1 << 39]
    data = b"".join(map(bytes, _entry("begin", line, [])))
    path.write_bytes(MAGIC + data)
    with pytest.raises(RecordingError, match="ends before all first values are in it"):
        ShardReplay(path)
