"""Real messages and files, from which the fuzzing begins: `make fuzz-seeds`."""

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from google.protobuf.message import Message
from safetensors.torch import save
from torch.utils.data import RandomSampler

from psctl.tls import AUTHORITY, CA_FILE, CERTIFICATE_FILE, init, subjects_of
from psserver.edge.cut_codec import cut_request, part_request
from psserver.edge.cut_report import CutReport, PartReport
from psserver.edge.fence_codec import fence_request
from psserver.edge.fence_report import FenceReport, WorkerHolding
from psserver.shard.core.core_image import CoreImage, WindowImage
from psserver.shard.core.effects import ApplyChunk, LoadState, StagedContribution
from psserver.shard.core.push import PushId, Trailer
from psserver.shard.host.recorder import Recorder
from psserver.shard.host.recording import RecordingReader
from psserver.shard.host.shard_model import shard_model
from psserver.shard.tensors.compressed_gradients import CompressedGradients
from psserver.shard.tensors.contribution import SparsePayload
from psserver.shard.tensors.sent_values import SentValues
from pswire.checkpoint.folder import Owner
from pswire.checkpoint.parts import PartKey, write_part
from pswire.checkpoint.registered_state import encode_states
from pswire.encodings.change import digest_of, pack_change
from pswire.encodings.codec import added
from pswire.encodings.known import ENCODINGS
from pswire.error_details import DETAILS_KEY, trailing_metadata
from pswire.failpoints import FAILPOINTS
from pswire.frames import (
    ENCODING_CHANGE,
    ENCODING_SPARSE_ROWS,
    REQUEST_CHUNK_FIELD,
    REQUEST_HEADER_FIELD,
    REQUEST_TRAILER_FIELD,
    bits_to_bytes,
    encode_chunk,
    encode_shared_chunk,
    join_fields,
)
from pswire.job_settings import JobSettings
from pswire.leased_data import DataRange, DataReport, EpochReport, RecordedSplit
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import Mode, Outcome
from pswire.membership_codec import (
    choice_message,
    epoch_message,
    identity_message,
    range_messages,
    record_message,
    report_fields,
    settings_message,
    split_message,
)
from pswire.optimizer_states import StateKey, encode_state
from pswire.reasons import ErrorReason, Refusal
from pswire.schema_codec import optimizer_to_message, terms_fields
from pswire.security.roles import Identity, Role
from pswire.security.token_store import TokenEntry, TokenStore
from pswire.security.tokens import digest_of as token_digest
from pswire.shared_memory.segments import SegmentHeader, SegmentKind, SharedRun
from pswire.slice_rows import SliceRows, pack_rows
from pswire.torch_types import buffer_of
from pswire.v1 import coordinator_service_pb2 as control
from pswire.v1 import membership_pb2, parameter_service_pb2, push_pb2, schema_pb2
from psworker.backends.host.messages import (
    Answer,
    Attempt,
    Enter,
    Offered,
    ProcessId,
    Reduce,
    StepPart,
    View,
)
from psworker.backends.host.rendezvous import MESSAGES, Hello
from psworker.data.origin import take_origin
from tests.doubles.checkpoints import TERMS as SAVED_TERMS
from tests.doubles.core_values import TERMS, choice, departure, key, record
from tests.doubles.made_histories import good
from tests.fuzz.files import FACTS, PART, new_state
from tests.fuzz.local import SPLIT
from tests.fuzz.wire import PLACEMENT
from tests.unit.psserver.coordinator.storage.test_saved_job import made, pending

CORPUS: Final = Path(__file__).with_name("corpus")

WORKER: Final = identity_message(key("a"))
RANGES: Final = (DataRange("loader", 0, 0, 8), DataRange("loader", 0, 8, 12))
GROUPS: Final = [schema_pb2.GroupHyperparameters(values=(0.1, 0.9))]
ADDRESS: Final = membership_pb2.ShardAddress(address="host:1", incarnation=1)
RECORD: Final = record_message(
    record(
        {"a": 0, "b": 2},
        generation=2,
        departures=(departure("c", last_clock=2, evicted=True),),
        mode=Mode.SSP,
        staleness_bound=3,
        commit=choice(3, "a"),
    )
)
SETTINGS: Final = settings_message(
    JobSettings(
        job_id="job",
        shard_count=1,
        mode=Mode.SSP,
        staleness_bound=3,
        workers_min=1,
        lease_ttl_ms=5000,
    )
)
EPOCH: Final = epoch_message(
    EpochReport(
        loader="loader",
        epoch=1,
        count=12,
        seen_once=8,
        seen_again=0,
        torn=0,
        dropped=4,
        skipped=0,
        never=0,
        left_out=0,
        is_over=True,
    )
)
SPLIT_RECORD: Final = split_message(
    RecordedSplit(name="split", digest="0" * 64, item_count=12, recipe="{}")
)
WAITING: Final = push_pb2.Waiting(
    clock=3,
    waited_ms=5000,
    reason="pushes of clock 3",
    awaited=[push_pb2.Awaited(name="b", clock=2)],
)
VALUES: Final = np.linspace(-1, 1, 41, dtype=np.float32)


def write_seeds() -> int:
    """Writes all seeds beside what was found; returns how many."""
    count = 0
    for name, seeds in all_seeds():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("seed-*"):
            old.unlink()
        for number, seed in enumerate(seeds):
            (folder / f"seed-{number:02d}").write_bytes(seed)
            count += 1
    return count


def all_seeds() -> Iterator[tuple[str, Iterable[bytes]]]:
    """Seeds of each target, by its name."""
    yield from _wire_seeds()
    yield "join", _join_seeds()
    for name, messages in (*_request_seeds(), *_answer_seeds()):
        yield name, [each.SerializeToString() for each in messages]
    yield from _file_seeds()
    yield "recording", _recording_seeds()
    yield from _credential_seeds()
    yield from _local_seeds()


def _recording_seeds() -> Iterator[bytes]:
    """One as a file, and one as text that is sealed before it is read."""
    with TemporaryDirectory() as folder:
        path = _recorded(Path(folder))
        yield path.read_bytes()
        yield b"".join(
            json.dumps({"kind": each.kind, **each.line}).encode()
            + b"\n%s\n" % each.data.hex().encode()
            for each in RecordingReader(path).entries()
        )


def _recorded(folder: Path) -> Path:
    """A job of one chunk, of which each gradient comes in another way."""
    (plain,) = SAVED_TERMS.optimizers
    names = plain.hyperparameter_names
    used = tuple({"lr": 0.1, "momentum": 0.9}.get(name, 0.0) for name in names)
    groups = tuple(replace(each, hyperparameters=used) for each in plain.groups)
    terms = replace(SAVED_TERMS, optimizers=(replace(plain, groups=groups),))
    settings = JobSettings(
        job_id="job", shard_count=1, mode=Mode.ASP, delay_compensation=0.1
    )
    model = shard_model(terms, settings=settings, shard_index=0)
    engine, (chunk,) = model.engine, model.chunks
    recorder = Recorder.open(folder, shard_index=0, incarnation=1, settings=settings)
    recorder.begin(model)
    engine.begin_seed()
    engine.write_seed(0, buffer_of(torch.arange(13.0)))
    engine.commit_seed()
    recorder.record_first_values(engine, 0)
    recorder.installed(model.core, record({"a": 0, "b": 0}))
    values, int8 = torch.linspace(-1, 1, 13), ENCODINGS["int8"]
    rows = SliceRows(chunk.slices[0], 4, np.array([0, 2]))
    sparse = SparsePayload(buffer_of(values[:9]), (rows, None), chunk.byte_count)
    encoded = CompressedGradients(int8, ()).payload(
        chunk, (True, True), int8.number, memoryview(int8.codec().encode(values))
    )
    pulled = SentValues()
    pulled.copies = {0: torch.arange(13.0)}
    plain_bytes = buffer_of(values)
    updates: list[list[object]] = [
        [plain_bytes],
        [sparse],
        [encoded],
        [plain_bytes, sparse],
    ]
    for sequence, payloads in enumerate(updates, start=1):
        workers = [key(name) for name, _ in zip("ab", payloads, strict=False)]
        pushes = [PushId(worker, sequence) for worker in workers]
        trailer = Trailer(optimizer="optimizer", weight=8.0, gradient_norm=2.5)
        for push in pushes:
            recorder.pushed(push, sequence, trailer)
        effect = ApplyChunk(
            clock=sequence,
            chunk_index=0,
            optimizer="optimizer",
            contributions=tuple(
                StagedContribution(
                    worker_id=worker.worker_id,
                    weight=8.0,
                    presence=(True, True),
                    payload=payload,
                )
                for worker, payload in zip(workers, payloads, strict=True)
            ),
            total_weight=8.0 * len(payloads),
            hyperparameters=tuple(each.hyperparameters for each in groups),
            pusher=workers[0] if len(workers) == 1 else None,
        )
        recorder.apply(pushes, engine, effect, pulled, None)
        for push in pushes:
            recorder.done(model.core, push, Outcome.APPLIED)
    states = {0: engine.export_state("optimizer", 0)}
    loaded = LoadState(push=PushId(key("a"), 5), optimizer="optimizer")
    recorder.load_state(engine, loaded, states)
    recorder.declared(terms)
    recorder.close()
    return recorder.path


def _wire_seeds() -> Iterator[tuple[str, Iterable[bytes]]]:
    (chunk,) = PLACEMENT.chunks
    slices = [SliceRows(chunk.slices[0], 4, np.array([1, 7])), None]
    rows = pack_rows(slices)
    raw = _chunk(data=VALUES.data)
    sparse = _chunk(
        data=VALUES[:13].data, encoding=ENCODING_SPARSE_ROWS, row_indices=rows
    )
    shared = encode_shared_chunk(
        index=0, presence=b"\3", digest=7, shared=SharedRun(5, 164, 2)
    )
    values = torch.from_numpy(VALUES)
    encoded = {each: each.codec().encode(values, seed=1) for each in ENCODINGS.values()}
    chunks = [_chunk(data=data, encoding=e.number) for e, data in encoded.items()]
    fields = _push_fields()
    state = {
        StateKey(0, 1, "step"): torch.tensor(3.0),
        StateKey(0, 2, "exp_avg"): torch.arange(4.0),
    }
    refusals = (
        Refusal(ErrorReason.CHUNK_INVALID, "chunk 3 is too long", chunk_index=3),
        Refusal(ErrorReason.LIMIT_EXCEEDED, "too many", cure="send fewer"),
        Refusal(ErrorReason.BUSY, "this process is full"),
    )
    bits = bits_to_bytes((True, False, True) * 3 + (True,) * 2)
    yield "chunks", [raw, sparse, shared, shared + shared, *chunks]
    yield "push", [fields + raw, fields + shared + shared, fields, sparse]
    yield "bits", [b"\x0b\x00" + bits]
    one, none = pack_rows(slices[:1]), pack_rows([None])
    yield "rows", [b"\3" + rows, b"\1" + one, b"\2" + none]
    heads = (bytes((number, len(VALUES), 0)) for number in range(len(encoded)))
    yield "encodings", map(bytes.__add__, heads, encoded.values())
    yield "change", [pack_change(1, 2, each) + b"data" for each in encoded]
    yield "snapshot_chunks", [raw]
    yield "values", [raw, _changed_values(), *chunks]
    yield "optimizer_state", list(encode_state(state))
    yield (
        "error_details",
        [dict(trailing_metadata(each))[DETAILS_KEY] for each in refusals],
    )


def _changed_values() -> bytes:
    """Zeros, and what they change by."""
    int8, values = ENCODINGS["int8"], torch.from_numpy(VALUES)
    data = int8.codec().encode(values)
    after = added(torch.zeros(len(VALUES)), int8.codec().decode(memoryview(data), 41))
    head = pack_change(digest_of(torch.zeros(41)), digest_of(after), int8)
    return _chunk(data=head + data, encoding=ENCODING_CHANGE)


def _chunk(**fields: Any) -> bytes:  # noqa: ANN401, as they are
    return encode_chunk(REQUEST_CHUNK_FIELD, index=0, presence=b"\3", **fields)


def _push_fields() -> bytes:
    header = push_pb2.PushHeader(
        protocol_version=PROTOCOL_VERSION,
        job_id="job",
        optimizer="optimizer",
        worker=WORKER,
        shard_incarnation=1,
        generation=1,
        sequence=3,
        sequence_unacknowledged_min=2,
        clock=3,
    )
    trailer = push_pb2.PushTrailer(
        weight=8.0,
        groups=GROUPS,
        finite=True,
        loss_scale=1.0,
        chunk_bitmap=bits_to_bytes((True,)),
        gradient_norm=2.5,
        ranges=range_messages(RANGES),
    )
    return join_fields(
        (REQUEST_HEADER_FIELD, header.SerializeToString()),
        (REQUEST_TRAILER_FIELD, trailer.SerializeToString()),
    )


def _request_seeds() -> Iterator[tuple[str, Iterable[Message]]]:
    holding = WorkerHolding(
        worker=key("a"),
        complete_sequence=3,
        trailer_sequence=4,
        touched_sequence=4,
        ranges=((3, RANGES[0]), (4, RANGES[1])),
    )
    report = FenceReport(
        fence_number=2,
        holdings=(holding,),
        trailer_clock_max=4,
        touched_clock_max=4,
        applied_clock=3,
        skip_clocks=(3,),
        frontier=3,
        committed=choice(3, "a", "b"),
        chosen=choice(4, "a"),
    )
    parts = (
        PartReport(3, made(pending()).parts[0]),
        PartReport(3, failure="the disk is full"),
    )
    yield (
        "optimizer",
        [
            control.DeclareOptimizerRequest(optimizer=optimizer_to_message(spec))
            for spec in (*TERMS.optimizers, *SAVED_TERMS.optimizers)
        ],
    )
    data = report_fields(DataReport(RANGES, RANGES[:1], 0, RANGES[1:]))
    yield "data_report", [control.LeaseDataRequest(loader="loader", **data)]
    yield "fence_report", [fence_request(report)]
    yield "cut_report", [cut_request(CutReport(3, "", (holding,)))]
    yield "part_report", map(part_request, parts)
    yield "worker_choice", [choice_message(choice(3, "a", "b"))]
    yield "worker_key", [WORKER]


def _answer_seeds() -> Iterator[tuple[str, Iterable[Message]]]:
    difference = push_pb2.HyperparameterDifference(
        worker_id="a", optimizer="optimizer", names=["lr"], used=[0.1], own=[0.2]
    )
    reply = push_pb2.PushReply(
        outcome=push_pb2.Outcome.ValueType(Outcome.APPLIED),
        shard_incarnation=1,
        generation=1,
        version=6,
        frontier=3,
        clock=3,
        mode=membership_pb2.MODE_BSP,
        grad_norm=1.5,
        hyperparameter_difference=difference,
    )
    staged = parameter_service_pb2.SessionChunk(
        state=parameter_service_pb2.CHUNK_STATE_STAGED
    )
    push = parameter_service_pb2.SessionPush(sequence=3, chunks=[staged])
    session = parameter_service_pb2.GetSessionResponse(
        sequence_done_max=2, pushes=[push]
    )
    settings = parameter_service_pb2.OptimizerSettings(
        groups=GROUPS, scheduler_steps=[3]
    )
    snapshot = control.RequestSnapshotResponse(
        job_id="job",
        snapshot_id=1,
        version=6,
        clock=3,
        shards=[ADDRESS],
        schema=terms_fields(TERMS)["schema"],
    )
    status = control.GetStatusResponse(
        settings=SETTINGS,
        mode=membership_pb2.MODE_SSP,
        workers=[control.WorkerStatus(worker=WORKER, state="member")],
        shards=[control.ShardStatus(shard=ADDRESS, waiting=WAITING)],
        splits=[SPLIT_RECORD],
        epochs=[EPOCH],
    )
    view = control.ShardView(**terms_fields(TERMS), record=RECORD)
    yield "split", [SPLIT_RECORD]
    yield "epoch_report", [EPOCH]
    yield "record", [RECORD, record_message(record({"a": 0}))]
    yield "settings", [SETTINGS]
    yield "reply", [reply]
    yield "session", [session]
    yield "settings_used", [settings]
    yield "worker_watch", _watched()
    yield "shard_watch", [control.WatchShardResponse(view=view)]
    yield "snapshot", [snapshot]
    yield "status", [status]


def _watched() -> Iterator[Message]:
    watch = control.WatchWorkerResponse
    first = control.FirstValues(worker_id="a", values_digest=1)
    yield watch(
        view=control.WorkerView(record=RECORD, shards=[ADDRESS], first_values=first)
    )
    yield watch(record=RECORD)
    yield watch(seed=control.SeedOrder(fence_number=1, shards=[ADDRESS]))
    yield watch(waiting=WAITING)
    epochs = [control.LoaderEpoch(loader="loader", epoch=1)]
    yield watch(
        state_wanted=control.StateWanted(snapshot_id=1, sequence=3, epochs=epochs)
    )


def _join_seeds() -> Iterator[bytes]:
    """A message with a model and one without, after the length of the first."""
    later = control.JoinRequest(loaders=["other"]).SerializeToString()
    for terms in (TERMS, SAVED_TERMS):
        fields = terms_fields(terms)
        join = control.JoinRequest(worker=WORKER, loaders=["loader"], **fields)
        first = join.SerializeToString()
        yield len(first).to_bytes(2, "little") + first + later


def _file_seeds() -> Iterator[tuple[str, Iterable[bytes]]]:
    core = CoreImage(
        version=6,
        applied_clock=3,
        frontier=3,
        windows=(
            WindowImage(
                worker=key("a"),
                done_sequence=3,
                outcomes=((3, Outcome.APPLIED),),
                ranges=((3, RANGES[0]),),
            ),
        ),
        used={
            "optimizer": Trailer(
                optimizer="optimizer",
                weight=0.0,
                hyperparameters=(TERMS.optimizers[0].groups[0].hyperparameters,),
                scheduler_steps=(3,),
            )
        },
        paces={"optimizer": (1,)},
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / PART
        tensors = {PartKey.value(0).text: torch.arange(13.0)}
        state = StateKey(0, 2, "momentum_buffer")
        kept = {PartKey.state_of("optimizer", 0, state).text: torch.arange(13.0)}
        metadata = {"core": core.to_json(), "declared": "{}", "dropped": "[]"}
        parts = []
        for each in (tensors, tensors | kept):
            write_part(path, each, metadata)
            parts.append(path.read_bytes())
        new_state(Path(folder) / "state")
        database = (Path(folder) / "state" / "job.sqlite").read_bytes()
    yield "part", parts
    yield "head", [*parts, save({"weight": torch.ones(3)}, {"format": "pt"})]
    whole = json.loads(made(pending()).to_json())["manifest"]
    yield "manifest", [json.dumps(whole).encode()]
    owner = Owner("job", "token", ("step-000000000500",), ("step-000000000600-2",))
    yield "owner", [json.dumps(asdict(owner)).encode()]
    yield "checkpoint_name", [b"step-000000000500", b"step-000000000500-2"]
    yield "core_image", [core.to_json().encode()]
    states = {
        "scheduler": {
            "last_epoch": 3,
            "base_lrs": [0.1],
            "best": float("inf"),
            "milestones": (1, 2),
            "raw": b"\0\1",
            "mean": torch.arange(3.0),
        }
    }
    yield "registered_state", [encode_states(states), encode_states({"a": None})]
    rows = list(_rows(database))
    yield "state_folder", [bytes((FACTS.index(n),)) + v.encode() for n, v in rows]
    histories = good().files.values()
    lines = [line for lines in histories for line in lines]
    yield "history", ["".join(json.dumps(each) + "\n" for each in lines).encode()]


def _credential_seeds() -> Iterator[tuple[str, Iterable[bytes]]]:
    created = datetime(2026, 1, 1, tzinfo=UTC)
    entries = (
        TokenEntry(
            token_id="a1b2",
            identity=Identity(Role.WORKER, "w0", "token a1b2"),
            digest=token_digest("a"),
            created=created,
            expires=created + timedelta(days=1),
        ),
        TokenEntry(
            token_id="c3",
            identity=Identity(Role.ADMIN, "", "token c3"),
            digest=token_digest("c"),
            created=created,
        ),
    )
    yield "tokens", [TokenStore(entries).to_bytes()]
    yield "token_file", [b"pst_" + b"0123456789" * 4 + b"\n"]
    workers = [Identity(Role.WORKER, "généré/1"), Identity(Role.READER)]
    yield "identity", [each.uri.encode() for each in workers]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tls"
        init(path, subjects_of(["ps0,10.0.0.7"], ["w0"]), 30)
        found = [path / AUTHORITY / CA_FILE, *sorted(path.rglob(CERTIFICATE_FILE))]
        yield "certificate", [each.read_bytes() for each in found[:3]]


def _rows(database: bytes) -> Iterator[tuple[str, str]]:
    """Facts of a state folder and their values."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(database)
        yield from db.execute("SELECT name, value FROM facts ORDER BY name")
        for table in ("epochs", "splits"):
            for (value,) in db.execute(f"SELECT value FROM {table}"):
                yield table, value


def _local_seeds() -> Iterator[tuple[str, Iterable[bytes]]]:
    segment = SegmentHeader(SegmentKind.GRADIENT, 7, 128)
    yield "segment", [b"\6" + segment.pack() + bytes(96), b"\0" + segment.pack()]
    yield "offer", [b"\1" + struct.pack("<16sQQ", bytes(range(16)), 7, 128)]
    yield "answer", [b"\1" + struct.pack("<BQQ", 1, 7, 128), b"\0\0it is not known"]
    yield (
        "environment",
        [
            b"PS_COORDINATOR=host:1\nPS_SHARED_MEMORY=0",
            b"PS_HOST_GROUP=g\nPS_LOCAL_RANK=1\nPS_LOCAL_SIZE=2\nPS_RESTART_COUNT=1",
            b"RANK=1\nWORLD_SIZE=2\nTORCHELASTIC_RUN_ID=x\nSLURM_STEP_NUM_TASKS=2",
        ],
    )
    yield (
        "failpoints",
        [f"{next(iter(FAILPOINTS))}=delay(20)@3; worker.step=kill".encode()],
    )
    rules = (b"mean", b"trimmed-mean:0.25", b"krum:f=2", b"multi-krum:f=2,m=4")
    yield "aggregation", rules
    yield "limits", [b"connections=64 step-s=2.5", b"tensors=1000"]
    yield "address", [b"host:1", b"[::1]:7070", b"127.0.0.1:0"]
    yield "compression", [b"push=topk pull=int8 ratio=0.01", b""]
    yield "recipe", [SPLIT.recipe.to_json().encode()]
    first, second = ProcessId(0, 7), ProcessId(1, 9)
    part = StepPart(weight=8.0, presence=(True, False), groups=((0.1,),), ranges=RANGES)
    state = {0: {"momentum_buffer": torch.arange(3.0)}}
    messages: tuple[object, ...] = (
        View(2, first, (first, second), first),
        Offered(3, part),
        Reduce(attempt=Attempt(3, 2, 1), parts={first: part, second: part}),
        Enter(frozenset({second})),
        Answer(1, state),
        Answer(2, b"origin"),
        Hello(first, "0" * 16, 2, segment),
        "it has prepared other models",
    )
    yield "group_message", [MESSAGES.encode(each) for each in messages]
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(5)
    samplers = (
        RandomSampler(range(12)),
        RandomSampler(range(12), generator=generator),
    )
    yield "origin", [b"", *map(take_origin, samplers)]
