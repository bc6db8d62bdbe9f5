"""Where a snapshot may be written, and how: whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ENDING: Final = ".safetensors"

_WRITERS: Final = {
    **dict.fromkeys(
        (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"), "torch.save()"
    ),
    **dict.fromkeys((".npy", ".npz"), "NumPy"),
    **dict.fromkeys((".h5", ".hdf5", ".keras"), "HDF5"),
    **dict.fromkeys((".zip", ".tar", ".gz", ".tgz", ".xz", ".zst"), "an archive"),
    ".onnx": "ONNX",
    ".gguf": "GGUF",
    ".msgpack": "MessagePack",
    ".json": "JSON",
    ".csv": "CSV",
}
"""Endings by which readers take a file for something else, and what that is."""


def refusal_text(path: Path) -> str:
    """Why no snapshot is written there, and what to do; empty where one is."""
    if path.exists() and not path.is_file() and not path.is_dir():
        # It would be replaced. Of a folder the system says so by itself.
        return f"{path} is no file on a disk: name one, as in model{ENDING}"
    other = _WRITERS.get(path.suffix.lower())
    if other is None:
        return ""
    named = path.with_suffix(ENDING).name
    text = (
        f"{path} is named like a file of {other}, and snapshots are written as "
        f"safetensors, which what reads such files can't read: name it {named}"
    )
    if other == "torch.save()":
        text += (
            ". To have the other one as well, then: "
            f"torch.save(safetensors.torch.load_file({named!r}), {path.name!r})"
        )
    return text


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields where to write; what is there in the end is moved to the path.

    It is made durable first. A file at the path is replaced, a folder only if it is
    empty. On an error nothing is left.
    """
    # Beside the target, since a rename is atomic within one file system only.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        # A folder last, after what is in it.
        for written in (*partial.rglob("*"), partial):
            _sync(written)
        partial.replace(path)
        _sync(path.absolute().parent)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
