"""`psctl checkpoint`, and snapshots of checkpoints: no job runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from typer.testing import CliRunner, Result

from psctl.__main__ import app
from psctl.failures import exit_code_of
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.manifest import Manifest, part_name
from pswire.checkpoint.parts import PartKey
from pswire.exit_codes import ExitCode
from pswire.job_terms import JobTerms
from pswire.membership import Mode
from pswire.placement import place
from pswire.schema import ElementType, ModelSchema, SchemaEntry
from tests.doubles.checkpoints import job_of, save

OLD, NEW = "step-000000000100", "step-000000000500"


def psctl(*arguments: str) -> tuple[int, Result, str]:
    """The exit code and the error's text of a command, as `main` would report it."""
    ended = CliRunner().invoke(app, arguments)
    error = ended.exception
    if error is None or isinstance(error, SystemExit):
        return ended.exit_code, ended, ended.stderr
    return exit_code_of(error), ended, str(error)


def json_of(*arguments: str) -> dict[str, Any]:
    code, ended, said = psctl(*arguments, "--json")
    assert code in (ExitCode.DONE, ExitCode.ERROR), said
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["schema_version"] == 1
    return found


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    folder = CheckpointFolder(str(tmp_path / "runs"))
    folder.claim("job", "token")
    save(folder, 100)
    save(folder, 500)
    return folder


@pytest.fixture
def root(folder: CheckpointFolder) -> Path:
    return Path(folder.url)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


def test_all_are_listed_for_people_and_programs(
    root: Path, folder: CheckpointFolder
) -> None:
    incomplete = folder.begin(700)
    folder.write_part(incomplete, part_name(0, 1), {"value/0": torch.zeros(1)}, {})
    flip(root / OLD / "manifest.json")

    code, ended, _ = psctl("checkpoint", "list", "--checkpoint-dir", str(root))
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert code == 0
    assert lines[0] == ["NAME", "STATE", "VERSION", "CLOCK", "SIZE", "WRITTEN", "(UTC)"]
    assert lines[1] == [OLD, "damaged"]
    assert lines[2][:4] == [NEW, "complete", "500", "250"]
    assert lines[2][-2:] == ["1970-01-01", "00:00:01"]
    assert lines[3] == [incomplete, "incomplete"]

    found = json_of("checkpoint", "list", "--checkpoint-dir", str(root))
    assert found["url"] == str(root)
    assert [each["state"] for each in found["checkpoints"]] == [
        "damaged", "complete", "incomplete",
    ]  # fmt: skip
    assert found["checkpoints"][1]["job_id"] == "job"
    assert "is damaged" in found["checkpoints"][0]["problem"]


def test_jobs_are_listed_where_there_are_several(
    root: Path, folder: CheckpointFolder
) -> None:
    save(folder, 900, job_id="other")

    _, ended, _ = psctl("checkpoint", "list", "--checkpoint-dir", str(root))
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [line[-1] for line in lines] == ["JOB", "job", "job", "other"]


def test_the_folder_of_one_checkpoint_is_no_folder_of_checkpoints(root: Path) -> None:
    code, _, said = psctl("checkpoint", "show", "--checkpoint-dir", str(root / NEW))
    assert code == ExitCode.USAGE
    assert f"name the folder that it is in, and {NEW} beside it" in said


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    code, ended, _ = psctl("checkpoint", "list", "--checkpoint-dir", str(tmp_path))
    assert (code, ended.stdout) == (0, f"no checkpoints in {tmp_path}\n")
    for command in ("verify", "show"):
        code, _, said = psctl("checkpoint", command, "--checkpoint-dir", str(tmp_path))
        assert (code, said) == (1, f"there is no checkpoint in {tmp_path}")


def test_damage_is_found_and_is_exit_code_1(root: Path) -> None:
    at = ("--checkpoint-dir", str(root))
    code, ended, said = psctl("checkpoint", "verify", *at)
    assert (code, ended.stdout) == (0, f"{OLD} is good\n{NEW} is good\n")
    assert said == f"psctl: reading {OLD}\npsctl: reading {NEW}\n"

    flip(root / NEW / part_name(1, 2))
    code, ended, _ = psctl("checkpoint", "verify", *at)
    assert code == ExitCode.ERROR
    assert ended.stdout.startswith(f"{OLD} is good\n{NEW}/{part_name(1, 2)} in ")
    assert "are not those that were written" in ended.stdout
    assert psctl("checkpoint", "verify", OLD, *at)[0] == 0
    assert psctl("checkpoint", "verify", NEW, *at)[0] == 1

    found = json_of("checkpoint", "verify", *at)
    assert [each["is_good"] for each in found["checkpoints"]] == [True, False]


def test_the_newest_is_shown_or_the_one_that_is_named(root: Path) -> None:
    at = ("--checkpoint-dir", str(root))
    _, ended, _ = psctl("checkpoint", "show", *at)
    assert f"checkpoint  {NEW}\njob         job\n" in ended.stdout
    assert "values      version 500, clock 250, bsp" in ended.stdout
    assert "optimizers  SGD (optimizer)" in ended.stdout

    found = json_of("checkpoint", "show", OLD, *at)
    assert found["name"] == OLD
    assert found["tensors"][0] == {
        "model": "model", "name": "généré", "shape": [3, 4], "type": "float32",
        "kind": "parameter",
    }  # fmt: skip
    names = [part["name"] for part in found["parts"]]
    assert names == [part_name(0, 2), part_name(1, 2)]

    code, _, said = psctl("checkpoint", "show", "step-000000000007", *at)
    assert code == ExitCode.ERROR
    assert "there is no step-000000000007" in said


def test_older_ones_are_deleted(root: Path) -> None:
    at = ("--checkpoint-dir", str(root))
    found = json_of("checkpoint", "prune", "--keep=1", *at)
    assert (found["deleted"], found["kept"]) == ([OLD], [NEW])

    _, ended, _ = psctl("checkpoint", "prune", "--keep=1", *at)
    assert ended.stdout == "nothing to delete\n1 checkpoint left\n"


def test_of_several_jobs_one_has_to_be_named(
    root: Path, folder: CheckpointFolder
) -> None:
    save(folder, 900, job_id="other\x1b")

    at = ("--checkpoint-dir", str(root))
    code, _, said = psctl("checkpoint", "prune", "--keep=1", *at)
    assert code == ExitCode.USAGE
    assert "of these jobs: job, other\\x1b; say which with --job" in said


def test_a_newer_format_and_a_store_away_have_their_codes(root: Path) -> None:
    newer = {"format": 2, "manifest": {}, "digest": ""}
    (root / NEW / "manifest.json").write_text(json.dumps(newer))
    at = ("--checkpoint-dir", str(root))

    assert psctl("checkpoint", "show", *at)[0] == ExitCode.INCOMPATIBLE_VERSION
    assert psctl("checkpoint", "list", "--checkpoint-dir", "nosuch://a")[0] == (
        ExitCode.BAD_CONFIGURATION
    )


# Snapshots


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(40, 50)
        self.small = nn.Linear(50, 3).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.tied = self.hidden.weight


def save_model(
    folder: CheckpointFolder, model: nn.Module, shard_count: int
) -> Manifest:
    """Writes the values of a model as its shards would."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    schema = ModelSchema(
        tuple(
            SchemaEntry(
                name=name,
                shape=tuple(tensor.shape),
                element_type=ElementType[str(tensor.dtype)[6:].upper()],
                tied_names=("hidden.weight",) if name == "tied" else (),
            )
            for name, tensor in state.items()
        )
    )
    placement = place(schema, shard_count, 4096)
    flat = [tensor.detach().reshape(-1) for tensor in state.values()]
    name = folder.begin(7)
    parts = tuple(
        folder.write_part(
            name,
            part_name(index, shard_count),
            {
                PartKey.value(chunk.index).text: torch.cat(
                    [flat[p.entry_index][p.start : p.stop] for p in chunk.slices]
                )
                for chunk in chunks
            },
            {},
        )
        for index, chunks in enumerate(placement.chunks_by_shard)
    )
    manifest = Manifest(
        name=name,
        job_id="job",
        release="0.1.0",
        created_unix_s=0.0,
        version=7,
        clock=7,
        mode=Mode.BSP,
        shard_count=shard_count,
        chunk_bytes=4096,
        is_finite=True,
        parts=parts,
        terms=JobTerms(schema=schema, optimizers=()),
        job=job_of(3, ("a", 1), ("a", 2), ("b", 0)),
    )
    folder.commit(manifest)
    return manifest


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("shard_count", [1, 3])
def test_values_of_a_checkpoint_load_into_the_plain_model(
    tmp_path: Path, shard_count: int, named: bool
) -> None:
    folder = CheckpointFolder(str(tmp_path / "runs"))
    folder.claim("job", "token")
    torch.manual_seed(0)
    model = Model()
    manifest = save_model(folder, model, shard_count)
    out = tmp_path / "model.safetensors"
    url = f"{folder.url}/{manifest.name}" if named else folder.url

    found = json_of("snapshot", "get", "--checkpoint", url, "--out", str(out))

    assert found["checkpoint"] == manifest.name
    assert (found["version"], found["clock"], found["generation"]) == (7, 7, 3)
    loaded = Model()
    loaded.load_state_dict(load_file(out), strict=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    with safe_open(out, "pt") as file:
        assert file.metadata()["paramserver.job"] == "job"


def test_what_is_shown_says_where_in_the_data_it_is(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path / "runs"))
    folder.claim("job", "token")
    save_model(folder, Model(), 1)
    at = ("--checkpoint-dir", folder.url)

    _, ended, _ = psctl("checkpoint", "show", *at)

    assert "data        epoch 2 of a, epoch 0 of b\n" in ended.stdout
    assert json_of("checkpoint", "show", *at)["epochs"] == {"a": 2, "b": 0}


# Hugging Face


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Model, str]:
    """A model, and the folder with a checkpoint of it."""
    folder = CheckpointFolder(str(tmp_path / "runs"))
    folder.claim("job", "token")
    torch.manual_seed(0)
    model = Model()
    save_model(folder, model, 3)
    return model, folder.url


def export(url: str, out: Path, *options: str) -> dict[str, Any]:
    return json_of(
        *("checkpoint", "export", "--checkpoint-dir", url, "--to", "huggingface"),
        *("--out", str(out), *options),
    )


def test_a_hugging_face_folder_loads_into_the_plain_model(
    saved: tuple[Model, str], tmp_path: Path
) -> None:
    model, url = saved

    found = export(url, tmp_path / "out")

    assert found["files"] == ["model.safetensors"]
    assert [each.name for each in (tmp_path / "out").iterdir()] == found["files"]
    loaded = Model()
    missing, unexpected = load_model(loaded, tmp_path / "out" / "model.safetensors")
    assert (missing, unexpected) == (set(), [])
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
        names = set(file.keys())
    assert metadata["format"] == "pt"
    assert metadata["paramserver.version"] == "7"
    assert metadata["hidden.weight"] == "tied"
    assert names == model.state_dict().keys() - {"hidden.weight"}


def test_several_files_have_an_index(saved: tuple[Model, str], tmp_path: Path) -> None:
    model, url = saved
    out = tmp_path / "out"

    found = export(url, out, "--max-shard-size", "1KB")

    *files, index = found["files"]
    assert index == "model.safetensors.index.json"
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert {each.name for each in out.iterdir()} == {*files, index}
    state = model.state_dict()
    del state["hidden.weight"]
    found = json.loads((out / index).read_text())
    weights = found["weight_map"]
    assert weights.keys() == state.keys()
    assert found["metadata"] == {"total_size": sum(t.nbytes for t in state.values())}
    for file in files:
        tensors = load_file(out / file)
        assert tensors.keys() == {name for name in weights if weights[name] == file}
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 1000
        for name, tensor in tensors.items():
            assert torch.equal(tensor, state[name]), name


def test_a_folder_that_is_there_is_not_written_to(
    saved: tuple[Model, str], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    code, _, said = psctl(
        *("checkpoint", "export", "--checkpoint-dir", saved[1], "--to", "huggingface"),
        *("--out", str(tmp_path / "out")),
    )
    assert code == ExitCode.USAGE
    assert said.endswith("is there already: name a new folder")


def test_nothing_is_left_of_an_export_that_meets_damage(
    saved: tuple[Model, str], tmp_path: Path
) -> None:
    runs = Path(saved[1])
    flip(next(runs.glob("step-*/part-00001*")))
    code, _, said = psctl(
        *("checkpoint", "export", "step-000000000007", "--checkpoint-dir", str(runs)),
        *("--to", "huggingface", "--out", str(tmp_path / "out")),
    )
    assert code == ExitCode.ERROR
    assert "is damaged" in said
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-shard-size", "5 apples"), "'5 apples' is no size, such as 5GB or"),
        (("--model", "other"), "the job has no model 'other': name one of 'model'"),
    ],
)
def test_options_of_an_export_are_checked(
    saved: tuple[Model, str], tmp_path: Path, options: tuple[str, str], said: str
) -> None:
    code, _, found = psctl(
        *("checkpoint", "export", "--checkpoint-dir", saved[1], "--to", "huggingface"),
        *("--out", str(tmp_path / "out"), *options),
    )
    assert code == ExitCode.USAGE
    assert said in found


@pytest.mark.parametrize("option", ["--model", "--max-shard-size"])
def test_options_of_hugging_face_alone_are_refused_elsewhere(
    saved: tuple[Model, str], tmp_path: Path, option: str
) -> None:
    code, _, said = psctl(
        *("checkpoint", "export", "--checkpoint-dir", saved[1], "--to", "dcp"),
        *("--out", str(tmp_path / "out"), option, "5GB"),
    )
    assert code == ExitCode.USAGE
    assert "only for --to huggingface" in said


def test_a_damaged_checkpoint_is_not_read_and_the_one_before_it_is(
    tmp_path: Path,
) -> None:
    folder = CheckpointFolder(str(tmp_path / "runs"))
    folder.claim("job", "token")
    model = Model()
    first, second = (save_model(folder, model, 2) for _ in range(2))
    flip(tmp_path / "runs" / second.name / part_name(0, 2))
    out = tmp_path / "model.safetensors"

    code, _, said = psctl(
        "snapshot",
        "get",
        "--checkpoint",
        f"{folder.url}/{second.name}/",
        "--out",
        str(out),
    )
    assert code == ExitCode.ERROR
    assert "is damaged" in said
    assert not out.exists()

    found = json_of("snapshot", "get", "--checkpoint", folder.url, "--out", str(out))
    assert found["checkpoint"] == first.name


def test_pickles_are_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "model.pt")

    code, _, said = psctl(
        "snapshot", "get", "--checkpoint", str(tmp_path / "model.pt"),
        "--out", str(tmp_path / "out.safetensors"),
    )  # fmt: skip
    assert code == ExitCode.USAGE
    assert "pickles, which can run code, and are not read" in said
