"""Parts: what is read is what was written, or an error that names the tensor."""

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from xxhash import xxh3_128_hexdigest

from pswire.checkpoint.errors import DamagedError
from pswire.checkpoint.manifest import FilePart
from pswire.checkpoint.part_head import check_contents
from pswire.checkpoint.parts import PartKey, PartReader, write_part
from pswire.optimizer_states import StateKey
from pswire.torch_types import TORCH_DTYPES
from tests.doubles.full_disk import file_size_limit

VECTOR = torch.arange(20.0)
TENSORS = {
    PartKey.value(0).text: VECTOR[:12],
    PartKey.value(1).text: VECTOR[12:],
    PartKey.master(7).text: torch.tensor([1.5, float("nan")]),
    PartKey.state_of("a/b", 3, StateKey(0, 2, "step")).text: torch.tensor(3.0),
    PartKey.state_of("", 3, StateKey(0, 2, "exp_avg")).text: torch.zeros(0),
    **{
        f"value/{100 + number}": torch.ones(3, dtype=dtype)
        for number, dtype in enumerate(TORCH_DTYPES.values())
    },
}
METADATA = {"core": '{"clock": 3}', "é": "\n"}


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = tmp_path / "part"
    write_part(path, TENSORS, METADATA)
    return path


def part_of(data: bytes) -> FilePart:
    """What a manifest says of it."""
    head = data[: 8 + int.from_bytes(data[:8], "little")]
    return FilePart("part", len(data), xxh3_128_hexdigest(head))


def reader_of(data: bytes, part: FilePart | None = None) -> PartReader:
    file = io.BytesIO(data)
    return PartReader(file, part or part_of(data), "the part")  # type: ignore[arg-type]


def test_all_tensors_come_back_bit_by_bit(part: Path) -> None:
    data = part.read_bytes()
    with reader_of(data) as reader:
        assert sorted(reader.keys()) == sorted(TENSORS)
        assert reader.metadata == METADATA
        for key, tensor in TENSORS.items():
            found = reader.tensor(key)
            assert found.dtype == tensor.dtype
            assert torch.equal(found.nan_to_num(7), tensor.nan_to_num(7))
            assert found.shape == tensor.shape


def test_it_is_a_safetensors_file_as_others_read_it(part: Path) -> None:
    found = load_file(part)

    assert found.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert torch.equal(found[key].nan_to_num(7), tensor.nan_to_num(7))
    with safe_open(part, "pt") as file:
        assert METADATA.items() <= file.metadata().items()


def test_what_is_said_of_it_is_what_is_in_it(tmp_path: Path) -> None:
    stored = write_part(tmp_path / "part", TENSORS, METADATA)
    assert FilePart("part", *stored) == part_of((tmp_path / "part").read_bytes())


def test_a_tensor_that_is_not_there_is_named(part: Path) -> None:
    with reader_of(part.read_bytes()) as reader, pytest.raises(KeyError, match="v/9"):
        reader.tensor("v/9")


@pytest.mark.parametrize(
    "key",
    [
        PartKey.value(0),
        PartKey.master(12),
        PartKey.state_of("optimizer", 3, StateKey(0, 9, "exp_avg_sq")),
        PartKey.state_of("a/b/../c", 3, StateKey(4, 5, "step")),
        PartKey.state_of("", 0, StateKey(0, 1, "")),
    ],
    ids=lambda key: key.text,
)
def test_names_of_tensors_are_read_back(key: PartKey) -> None:
    assert PartKey.parse(key.text) == key


@pytest.mark.parametrize(
    "text",
    ["", "value", "value/", "value/-0", "value/1/2", "value/01", "what/1",
     "state/1/0-2/step", "state/a/1/2/step", "state/a/x/0-2/step", "state/a/1/0-02/s"],
)  # fmt: skip
def test_other_names_are_damage(text: str) -> None:
    with pytest.raises(DamagedError, match="a tensor has the name"):
        PartKey.parse(text)


def test_no_byte_of_a_part_changes_unnoticed(part: Path) -> None:
    data = part.read_bytes()
    written = part_of(data)
    check_all(data, written)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        for check in (read_all, check_all):
            with pytest.raises(DamagedError):
                check(bytes(changed), written)


@pytest.mark.parametrize("read_bytes", [1, 7, 64, 1 << 20])
def test_all_of_it_is_checked_in_any_steps(
    part: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr("pswire.checkpoint.part_head._READ_BYTES", read_bytes)
    data = part.read_bytes()
    written = part_of(data)

    check_all(data, written)

    with pytest.raises(DamagedError, match="from byte"):
        check_all(data[:-1] + b"?", written)
    cut_off = io.BytesIO(data[:-1])
    with pytest.raises(DamagedError, match="from byte"):
        check_contents(cut_off, written)  # type: ignore[arg-type]


def read_all(data: bytes, part: FilePart) -> None:
    reader = reader_of(data, part)
    for key in reader.keys():  # noqa: SIM118, it is no dict
        reader.tensor(key)


def check_all(data: bytes, part: FilePart) -> None:
    check_contents(io.BytesIO(data), part)  # type: ignore[arg-type]


def test_changed_bytes_are_named_with_their_place(part: Path) -> None:
    written = part_of(part.read_bytes())
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    said = r"the part is damaged: the \d+ bytes of tensor \S+ from byte \d+ on are not"

    with pytest.raises(DamagedError, match=said):
        read_all(bytes(data), written)


def headed(head: object, data: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object, shape: object, *offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


HOSTILE = {
    "empty": b"",
    "short": b"\1\2\3",
    "huge_head": (1 << 60).to_bytes(8, "little") + b"{}",
    "head_beyond_file": (100).to_bytes(8, "little") + b"{}",
    "pickle": pickle.dumps({"weight": [1.0] * 100}),
    "no_json": headed(b"\x80\x81"),
    "deep": headed(b"[" * 100_000),
    "many": headed(b"{" * 2_000_001),
    "list": headed([]),
    "metadata": headed({"__metadata__": {"a": 1}}),
    "metadata_list": headed({"__metadata__": [1]}),
    "type": headed({"a": entry("F8_E4M3", [1], 0, 1)}, b"1"),
    "type_list": headed({"a": entry([], [1], 0, 1)}, b"1"),
    "shape": headed({"a": entry("F32", [2], 0, 4)}, b"1234"),
    "negative": headed({"a": entry("F32", [-1], 4, 0)}, b"1234"),
    "huge": headed({"a": entry("U8", [1 << 62], 0, 1 << 62)}, b"1234"),
    "text": headed({"a": entry("U8", ["4"], 0, 4)}, b"1234"),
    "true": headed({"a": entry("U8", [True], 0, True)}, b"1"),
    "dimensions": headed({"a": entry("U8", [1] * 65, 0, 1)}, b"1"),
    "gap": headed({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"123"),
    "overlap": headed(
        {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123"
    ),
    "rest": headed({"a": entry("U8", [1], 0, 1)}, b"12"),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_damage(data: bytes) -> None:
    with pytest.raises(DamagedError) as caught:
        reader_of(data)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def without_digests(path: Path) -> None:
    save_file({"value/0": VECTOR}, path)


def with_fewer_digests(path: Path) -> None:
    save_file({"value/0": VECTOR}, path, {"paramserver.digests": '{"": "0"}'})


def with_a_list(path: Path) -> None:
    save_file({"value/0": VECTOR}, path, {"paramserver.digests": "[1]"})


@pytest.mark.parametrize("write", [without_digests, with_fewer_digests, with_a_list])
def test_files_of_others_are_damage(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path / "file")
    with pytest.raises(DamagedError, match="digests"):
        reader_of((tmp_path / "file").read_bytes())


def test_a_full_disk_is_said_to_be_full(tmp_path: Path) -> None:
    with (
        file_size_limit(1000),
        pytest.raises(OSError, match=r"File too large|No space left"),
    ):
        write_part(tmp_path / "part", {"value/0": torch.zeros(10_000)}, {})
