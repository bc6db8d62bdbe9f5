"""What a shard records for `psctl replay`; see `docs/replay.md`.

Without `--record` there is no recorder.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import torch
from xxhash import xxh3_64_intdigest

from psserver.config import RECORD_GIB_DEFAULT
from psserver.edge.record_history import record_values
from psserver.shard.core.effects import ApplyChunk, LoadState
from psserver.shard.core.push import PushId, Trailer
from psserver.shard.core.shard import ShardCore
from psserver.shard.core.shard_fence import Cut
from psserver.shard.host.chunk_updates import apply_update
from psserver.shard.host.recorded_effects import dump_tensors, dump_update
from psserver.shard.host.recording import RecordingFile
from psserver.shard.host.shard_model import ShardModel
from psserver.shard.tensors.aggregate import NormLimit
from psserver.shard.tensors.apply_engine import AppliedChunk, ApplyEngine
from psserver.shard.tensors.sent_values import SentValues
from pswire.checkpoint.parts import PartKey
from pswire.job_settings import JobSettings
from pswire.job_terms import JobTerms
from pswire.job_terms_codec import dump_settings, dump_terms
from pswire.membership import Outcome, Record
from pswire.optimizer_states import ChunkState
from pswire.torch_types import buffer_of

PULLED: Final = "pulled"
"""Name of the values that delay compensation compares with."""


def arithmetic_text() -> str:
    """What the bits of an update depend on, beside what goes into it."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def values_digest(engine: ApplyEngine, chunk_index: int) -> int:
    """XXH3-64 of the values of a chunk, which nobody changes now."""
    return xxh3_64_intdigest(buffer_of(engine.vectors.view(chunk_index)))


class Recorder:
    """Records what changes the values of one shard, in the order of the changes.

    Threads apply updates of different chunks at once. A lock for each chunk keeps its
    changes and their entries in one order.

    Attributes:
        path: The file.
    """

    def __init__(
        self, file: RecordingFile, shard_index: int, incarnation: int, job: JobSettings
    ) -> None:
        self._file = file
        self.path = file.path
        self._place = {"shard": shard_index, "incarnation": incarnation}
        self._settings = job
        self._locks: dict[int, threading.Lock] = {}
        self._has_values: set[int] = set()

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        shard_index: int,
        incarnation: int,
        settings: JobSettings,
        gib_max: float = RECORD_GIB_DEFAULT,
    ) -> Self:
        """Makes the file of a shard's start, which ends at a size.

        Raises:
            ConfigurationError: It can't be made.
        """
        file = RecordingFile(
            folder, shard_index=shard_index, incarnation=incarnation, gib_max=gib_max
        )
        return cls(file, shard_index, incarnation, settings)

    @property
    def end_text(self) -> str:
        """Why it has ended while the shard goes on, in words; empty if it has not."""
        return self._file.end_text

    def close(self) -> None:
        """Ends the recording, as one that is whole."""
        self._file.write("end", {})
        self._file.close()

    def begin(self, model: ShardModel) -> None:
        """The shard is about to get its first record."""
        self._locks = {chunk.index: threading.Lock() for chunk in model.chunks}
        self._file.write(
            "begin",
            {
                **self._place,
                "settings": dump_settings(self._settings),
                "terms": dump_terms(model.terms),
                "arithmetic": arithmetic_text(),
            },
        )

    def record_first_values(self, engine: ApplyEngine, chunk_index: int) -> None:
        """Records what a chunk began with, unless that is done already."""
        with self._locks[chunk_index]:
            self._record_first_values(engine, chunk_index)

    def apply(
        self,
        pushes: Sequence[PushId],
        engine: ApplyEngine,
        effect: ApplyChunk,
        pulled: SentValues | None,
        limit: NormLimit | None,
    ) -> AppliedChunk:
        """Applies an update, and records it before anybody hears of it."""
        chunk_index = effect.chunk_index
        with self._locks[chunk_index]:
            if not self._file.is_open:
                return apply_update(engine, effect, pulled, limit)
            self._record_first_values(engine, chunk_index)
            # A copy, since the worker may pull again meanwhile.
            copy = None if pulled is None else pulled.copy_of(chunk_index)
            if copy is not None:
                pulled = SentValues()
                pulled.copies = {chunk_index: copy.clone()}
            error = ""
            applied = AppliedChunk((), ())
            try:
                applied = apply_update(engine, effect, pulled, limit)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
                raise
            finally:
                self._record_update(
                    pushes, engine, effect, pulled, applied, error=error
                )
        return applied

    def load_state(
        self,
        engine: ApplyEngine,
        effect: LoadState,
        states: Mapping[int, ChunkState],
    ) -> None:
        """Replaces an optimizer's state, and records it."""
        held = sorted(self._locks)
        for chunk_index in held:
            self._locks[chunk_index].acquire()
        try:
            for chunk_index in held:
                self._record_first_values(engine, chunk_index)
            rows, data = dump_tensors(
                {
                    PartKey.state_of(effect.optimizer, index, key).text: tensor
                    for index, state in states.items()
                    for key, tensor in state.items()
                }
            )
            self._file.write(
                "state",
                {
                    "push": _push(effect.push),
                    "optimizer": effect.optimizer,
                    "spec_digest": effect.spec_digest,
                    "tensors": rows,
                },
                data,
            )
            engine.load_state(effect.optimizer, states, spec_digest=effect.spec_digest)
        finally:
            for chunk_index in held:
                self._locks[chunk_index].release()

    def declared(self, terms: JobTerms) -> None:
        """Something was declared of the optimizers."""
        self._file.write("terms", {"terms": dump_terms(terms)})

    def pushed(self, push: PushId, clock: int, trailer: Trailer) -> None:
        """A push's trailer is here."""
        self._file.write(
            "push",
            {
                "push": _push(push),
                "clock": clock,
                "weight": trailer.weight,
                "gradient_norm": trailer.gradient_norm if trailer.finite else None,
            },
        )

    def done(self, core: ShardCore, push: PushId, outcome: Outcome) -> None:
        """Everything of a push is done."""
        line = {"push": _push(push), "outcome": outcome.label}
        self._file.write("done", line | _reached(core))

    def installed(self, core: ShardCore, record: Record) -> None:
        """The shard goes on under a record."""
        line = {"record": record_values(record)}
        self._file.write("record", line | _reached(core))

    def copying(self, core: ShardCore, cut: Cut) -> None:
        """The image of a cut is made."""
        self._file.write("cut", {"snapshot": cut.snapshot_id} | _reached(core))

    def _record_first_values(self, engine: ApplyEngine, chunk_index: int) -> None:
        if chunk_index in self._has_values or not self._file.is_open:
            return
        self._has_values.add(chunk_index)
        image = engine.image_of(chunk_index)
        rows, data = dump_tensors(dict(image.named(chunk_index)))
        digests = {name: held.spec_digest for name, held in image.states.items()}
        line = {"chunk": chunk_index, "tensors": rows, "spec_digests": digests}
        self._file.write("values", line, data)

    def _record_update(
        self,
        pushes: Sequence[PushId],
        engine: ApplyEngine,
        effect: ApplyChunk,
        pulled: SentValues | None,
        applied: AppliedChunk,
        *,
        error: str,
    ) -> None:
        chunk_index = effect.chunk_index
        copy = None if pulled is None else pulled.copy_of(chunk_index)
        line, data = dump_update(effect)
        rows, copies = dump_tensors({} if copy is None else {PULLED: copy})
        self._file.write(
            "update",
            {
                **line,
                "pushes": list(map(_push, pushes)),
                "pulled": rows,
                "applied": any(applied.presence),
                "torn": applied.torn_worker_ids,
                "error": error,
                "digest": values_digest(engine, chunk_index),
            },
            [*data, *copies],
        )


def _reached(core: ShardCore) -> dict[str, object]:
    """How far the shard has come."""
    return {"version": core.clocks.version, "clock": core.clocks.frontier}


def _push(push: PushId) -> list[object]:
    return [*push.worker, push.sequence]
