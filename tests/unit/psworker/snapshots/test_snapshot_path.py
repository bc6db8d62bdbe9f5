"""A file's name does not promise another format than what is in it."""

import os
from pathlib import Path

import pytest

from psworker.snapshots.snapshot_path import refusal_text


@pytest.mark.parametrize(
    "name",
    ["m.safetensors", "m.SAFETENSORS", "m", "m.v2", "m.pt.safetensors", "pt", ".pt"],
)
def test_a_name_that_promises_nothing_else_is_taken(tmp_path: Path, name: str) -> None:
    assert refusal_text(tmp_path / name) == ""


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("m.pt", "torch.save()"),
        ("m.PTH", "torch.save()"),
        ("m.bin", "torch.save()"),
        ("m.safetensors.ckpt", "torch.save()"),
        ("m.npz", "NumPy"),
        ("m.zip", "an archive"),
        ("m.onnx", "ONNX"),
    ],
)
def test_a_name_of_another_format_is_refused(
    tmp_path: Path, name: str, what: str
) -> None:
    text = refusal_text(tmp_path / name)
    assert f"like a file of {what}" in text
    assert text.count(".safetensors")
    assert ("torch.save(safetensors.torch.load_file(" in text) == (
        what == "torch.save()"
    )


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "is no file on a disk" in refusal_text(Path(os.devnull))
    (tmp_path / "old").write_text("")
    assert refusal_text(tmp_path / "old") == ""
