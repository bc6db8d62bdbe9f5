"""Files as safetensors' own readers read them; the command's test has the rest."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pswire.torch_types import TORCH_DTYPES
from psworker.snapshots.huggingface import INDEX, write_huggingface

TENSORS = {
    f"généré.{dtype}": torch.arange(6).reshape(2, 3).to(dtype)
    for dtype in TORCH_DTYPES.values()
} | {"scale": torch.tensor(7.0), "empty": torch.zeros(0, 3)}


def write(
    path: Path, tensors: dict[str, torch.Tensor], file_bytes_max: int | None = None
) -> tuple[str, ...]:
    return write_huggingface(
        path,
        tensors,
        lambda name: iter(tensors[name].reshape(-1).split(4)),
        metadata={"note": "of us"},
        file_bytes_max=file_bytes_max,
    )


def test_all_types_and_shapes_are_read_by_safetensors(tmp_path: Path) -> None:
    out = tmp_path / "out"

    assert write(out, TENSORS) == ("model.safetensors",)

    read = load_file(out / "model.safetensors")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "of us"}


def test_a_tensor_begins_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(1).double()}
    write(tmp_path / "out", tensors)

    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length])["b"]["data_offsets"] == [0, 8]


def test_a_file_is_as_full_as_may_be_and_a_larger_tensor_is_alone(
    tmp_path: Path,
) -> None:
    sizes = {"a": 3, "b": 2, "c": 9, "d": 5, "e": 1}
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    tensors["tied"] = tensors["c"]

    files = write(tmp_path / "out", tensors, 24)

    assert len(files) == 4
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 80}
    numbers = {name: int(file[6:11]) for name, file in index["weight_map"].items()}
    assert numbers == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 3}


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail(name: str) -> list[torch.Tensor]:
        raise OSError(name)

    with pytest.raises(OSError, match="scale"):
        write_huggingface(tmp_path / "out", {"scale": torch.ones(1)}, fail, metadata={})
    assert list(tmp_path.iterdir()) == []


def test_transformers_reads_a_folder_with_tied_parameters(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="comes with `make integrations`"
    )
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50)
    model = transformers.GPT2LMHeadModel(config)
    tensors = dict(model.state_dict(keep_vars=True))

    files = write(tmp_path / "out", tensors, 4096)

    config.save_pretrained(tmp_path / "out")
    assert len(files) > 2
    read, found = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(found.values()), found
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
