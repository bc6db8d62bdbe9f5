"""What a shard with Adam writes and reads of a checkpoint, beside safetensors' own.

`python -m psserver.bench.checkpoint NAME RANK SETTINGS`: see `psctl bench all`.
`python -m psserver.bench.checkpoint write FOLDER MIB`, and `read FOLDER`, each in a
process of its own: prints a JSON object with what it took for a model of that size.
"""

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from xxhash import xxh3_128

from psserver.bench.apply import ShardApply
from psserver.coordinator.storage.job_codec import dump_record
from psserver.shard.core.core_image import CoreImage
from psserver.shard.host.checkpoint_parts import written_part
from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.saved_images import SavedImages
from psserver.shard.tensors.shard_image import ShardImage
from psserver.shard.tensors.supported_optimizers import load_optimizers
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import Manifest, part_name
from pswire.checkpoint.parts import write_part
from pswire.checkpoint.place import CheckpointPlace
from pswire.membership import FenceKind, Mode, Record
from pswire.process_memory import keep_freed_memory
from pswire.torch_types import buffer_of

_NAME: Final = "step-000000000001"
_PART: Final = part_name(0, 1)
_RECORD: Final = Record(
    fence_number=1, generation=1, kind=FenceKind.MEMBERSHIP, members=()
)
_MIB: Final = 1 << 20


def trained_shard(element_count: int) -> ShardApply:
    """A shard that has made a step of Adam, and so has state three times as large."""
    hyperparameters = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    shard = ShardApply(torch.ones(element_count), hyperparameters)
    shard.apply(torch.randn(element_count, generator=torch.Generator().manual_seed(1)))
    return shard


def copied(shard: ShardApply) -> ShardImage:
    """What a shard copies at a cut."""
    core = CoreImage(version=1, applied_clock=1, frontier=1, windows=(), used={})
    return ShardImage(
        core,
        {
            chunk.index: shard.engine.image_of(chunk.index)
            for chunk in shard.placement.chunks
        },
    )


def write(shard: ShardApply, image: ShardImage, folder: Path) -> int:
    """Writes a checkpoint of one shard; its bytes."""
    place = CheckpointPlace(str(folder), _NAME)
    part, is_finite = written_part(image, place, _PART)
    CheckpointFolder(str(folder)).commit(
        Manifest(
            name=_NAME,
            job_id="bench",
            release="bench",
            created_unix_s=0.0,
            version=1,
            clock=1,
            mode=Mode.BSP,
            shard_count=1,
            chunk_bytes=0,
            is_finite=is_finite,
            parts=(part,),
            terms=shard.terms,
            job={
                "seed": 0,
                "record": json.loads(dump_record(_RECORD)),
                "sequences": [],
                "incarnations": {},
                "epochs": [],
                "splits": [],
            },
        )
    )
    return part.byte_count


def read(folder: Path) -> ApplyEngine:
    """Reads and checks a checkpoint, as a shard does that begins from it."""
    keep_freed_memory()
    manifest = CheckpointFolder(str(folder)).manifest(_NAME)
    placement = manifest.placement()
    engine = ApplyEngine(manifest.terms, placement, 0)
    engine.begin_seed()
    place = CheckpointPlace(str(folder), _NAME)
    with SavedImages(place, manifest.terms.schema, engine.declared) as saved:
        for chunk in placement.chunks:
            engine.write_seed_image(chunk.index, saved.image(chunk))
    engine.commit_seed()
    return engine


def digest_of(engine: ApplyEngine, chunk_count: int) -> str:
    """Of all that a shard holds."""
    digest = xxh3_128()
    for index in range(chunk_count):
        for name, tensor in engine.image_of(index).named(index):
            digest.update(name.encode())
            digest.update(buffer_of(tensor))
    return digest.hexdigest()


def _measure(
    contenders: Sequence[tuple[str, Callable[[], object]]],
    byte_count: int,
    settings: Mapping[str, Any],
    *,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Prints seconds of a MiB."""
    repetition_count = settings["sizes"]["repetition_count"]
    for repetition in range(-settings["warm_up_count"], repetition_count):
        # Each comes first equally often, as in `psctl.bench`.
        start = repetition % len(contenders)
        for name, run in (*contenders[start:], *contenders[:start]):
            began = time.perf_counter()
            run()
            seconds = (time.perf_counter() - began) * _MIB / byte_count
            after()
            if repetition >= 0:
                print(json.dumps({"contender": name, "seconds": seconds}), flush=True)


def measure_saving(settings: Mapping[str, Any], folder: Path) -> None:
    """The same tensors into files of the same disk, with and without syncing them."""
    shard = trained_shard(settings["sizes"]["parameter_count"])
    image = copied(shard)
    tensors, metadata = image.tensors(), image.metadata()
    file = folder / "file"

    def save_synced() -> None:
        save_file(tensors, file)
        for each, flags in ((file, os.O_RDONLY), (folder, os.O_DIRECTORY)):
            opened = os.open(each, flags)
            os.fsync(opened)
            os.close(opened)

    def clear() -> None:
        """Deletes what was written, so that nothing is overwritten."""
        shutil.rmtree(folder / _NAME, ignore_errors=True)
        file.unlink(missing_ok=True)

    byte_count = write(shard, image, folder)
    clear()
    _measure(
        [
            ("shard_synced", lambda: write(shard, image, folder)),
            ("save_file_synced", save_synced),
            ("shard", lambda: write_part(file, tensors, metadata)),
            ("save_file", lambda: save_file(tensors, file)),
        ],
        byte_count,
        settings,
        after=clear,
    )


def measure_restoring(settings: Mapping[str, Any], folder: Path) -> None:
    """The same file, which is in the page cache, into memory of its own.

    Raises:
        AssertionError: What is read is not what was written.
    """
    shard = trained_shard(settings["sizes"]["parameter_count"])
    byte_count = write(shard, copied(shard), folder)
    file = folder / _NAME / _PART
    _measure(
        [
            ("shard", lambda: read(folder)),
            # It maps the file; a copy is what reads it.
            ("load_file", lambda: [each.clone() for each in load_file(file).values()]),
        ],
        byte_count,
        settings,
    )
    chunk_count = len(shard.placement.chunks)
    if digest_of(read(folder), chunk_count) != digest_of(shard.engine, chunk_count):
        raise AssertionError("what is read is not what was written, which is a bug")


def measure_writing_once(folder: Path, mebibyte_count: int) -> dict[str, object]:
    """Trains, copies and writes a model."""
    shard = trained_shard(mebibyte_count * _MIB // 4)
    engine = shard.engine
    began = time.perf_counter()
    image = copied(shard)
    copied_s = time.perf_counter() - began
    byte_count = write(shard, image, folder)
    return {
        "byte_count": byte_count,
        "copied_s": copied_s,
        "written_s": time.perf_counter() - began - copied_s,
        "digest": digest_of(engine, len(shard.placement.chunks)),
    }


def measure_reading_once(folder: Path) -> dict[str, object]:
    """Reads what was written, and says how much memory that took."""
    load_optimizers()
    began, before = time.perf_counter(), _peak_bytes()
    engine = read(folder)
    read_s, peak = time.perf_counter() - began, _peak_bytes()
    manifest = CheckpointFolder(str(folder)).manifest(_NAME)
    own = manifest.terms.byte_count + engine.state_byte_count
    return {
        "byte_count": manifest.byte_count,
        "read_s": read_s,
        "own_byte_count": own,
        "beyond_byte_count": peak - before - own,
        "digest": digest_of(engine, len(manifest.placement().chunks)),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main(what: str, *arguments: str) -> None:
    """Measures as `psctl bench` asks."""
    match what:
        case "write":
            folder, mebibyte_count = arguments
            print(json.dumps(measure_writing_once(Path(folder), int(mebibyte_count))))
        case "read":
            print(json.dumps(measure_reading_once(Path(*arguments))))
        case _:
            measure = {"save": measure_saving, "restore": measure_restoring}[what]
            with TemporaryDirectory() as scratch:
                measure(json.loads(arguments[1]), Path(scratch))


if __name__ == "__main__":
    torch.set_num_threads(1)  # as a shard
    main(*sys.argv[1:])
