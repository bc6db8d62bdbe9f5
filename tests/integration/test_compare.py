"""`psctl compare` in small: real jobs in two modes, and all its files."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doubles.children import Completed, Nursery
from tests.doubles.installed import need

Compare = Callable[..., Completed]


@pytest.fixture
def compare(nursery: Nursery, tmp_path: Path) -> Compare:
    """Runs `python` with a command line, and ours of the comparison in small."""

    def run(*arguments: str, python: tuple[str, ...] = ("-m", "psctl")) -> Completed:
        scratch = tmp_path / "tmp"
        scratch.mkdir(exist_ok=True)
        done = nursery.run(
            *(*python, "compare"),
            *("--workers", "2", "--samples", "1280", "--base-ms", "30"),
            *("--snapshot-interval", "0.3", "--out", str(tmp_path / "out")),
            *arguments,
            environment={"TMPDIR": str(scratch)},
            timeout_s=250,
            launches=True,
        )
        assert list(scratch.iterdir()) == []
        return done

    return run


def test_modes_train_and_are_measured(compare: Compare, tmp_path: Path) -> None:
    need("matplotlib", "pip install 'paramserver[plot]'")
    done = compare(
        *("--modes", "bsp,bsp+1", "--loads", "straggler", "--target", "0.2"),
        # In which the slow worker has steps, whatever stands still meanwhile.
        *("--samples", "2560", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert "[2/2] straggler, BSP + 1" in done.stderr
    figures = json.loads(done.stdout)
    bsp, backup = figures["runs"]
    for run in (bsp, backup):
        assert run["sample_count"] >= 2560
        assert run["final_accuracy"] > 0.2
        assert run["target_s"] > 0
    # What a busy machine leaves of the arithmetic is not judged here.
    assert bsp["dropped_sample_count"] == 0 < backup["dropped_sample_count"]
    assert bsp["staleness_max"] == backup["staleness_max"] == 0
    assert bsp["step_cost"] > 3
    assert [each["mode"] for each in figures["ratios_to_bsp"]] == ["bsp+1"]
    runs, curve, staleness, picture = map(Path, figures["files"])
    rows = list(csv.DictReader(runs.read_text().splitlines()))
    assert [row["mode"] for row in rows] == ["bsp", "bsp+1"]
    assert len(curve.read_text().splitlines()) > 1 + 2
    assert len(staleness.read_text().splitlines()) > 2
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.repeat
def test_workers_that_keep_no_pace_are_measured(
    compare: Compare, tmp_path: Path
) -> None:
    done = compare(*("--modes", "bsp,asp", "--loads", "straggler,hiccups", "--json"))
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [(run["load"], run["mode"]) for run in runs] == [
        (load, mode) for load in ("straggler", "hiccups") for mode in ("bsp", "asp")
    ]
    for run in runs:
        assert run["dropped_sample_count"] == 0
        assert (run["staleness_max"] > 0) == (run["mode"] == "asp")


@pytest.mark.repeat
def test_without_matplotlib_all_but_the_picture_is_there(
    compare: Compare, tmp_path: Path
) -> None:
    # As if it were not installed, in this command and in nothing else.
    program = (
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = (\n"
        "    lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
        ")\n"
        "from psctl.__main__ import main\n"
        "main()\n"
    )
    done = compare(
        *("--modes", "ssp:3", "--loads", "hiccups", "--samples", "640"),
        python=("-c", program),
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'paramserver[plot]'" in done.stderr
    assert "SSP(3)" in done.stdout
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"compare.csv", "accuracy.csv", "staleness.csv"}
    (run,) = csv.DictReader((tmp_path / "out/compare.csv").read_text().splitlines())
    assert float(run["staleness_max"]) > 0


def test_strategies_train_on_a_link_and_are_measured(
    compare: Compare, tmp_path: Path
) -> None:
    need("matplotlib", "pip install 'paramserver[plot]'")
    done = compare(
        *("--strategies", "bsp,diloco:10", "--link", "200mbit,1ms", "--batch", "8"),
        *("--samples", "640", "--base-ms", "1", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert "[2/2] even, diloco:10" in done.stderr
    figures = json.loads(done.stdout)
    assert (figures["link_mbit"], figures["link_latency_ms"]) == (200, 1)
    plain, diloco = figures["runs"]
    for run in (plain, diloco):
        # Each sample once.
        assert run["sample_count"] == 640
        assert run["curve"][-1][1:3] == [640, run["sent_bytes"] + run["received_bytes"]]
        assert run["final_loss"] < 4.5
    assert plain["exchange_count"] == 40
    assert diloco["exchange_count"] in (4, 5)  # the round at the end is a short one
    assert 5 < diloco["first_bytes_over_own"] < 10
    runs, curve, picture = map(Path, figures["files"])
    assert len(list(csv.DictReader(runs.read_text().splitlines()))) == 2
    assert len(curve.read_text().splitlines()) > 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_comparisons_are_made_one_at_a_time(compare: Compare) -> None:
    done = compare("--strategies", "bsp", "--attack", "scale")
    assert done.returncode == 2
    assert "comparisons of their own" in " ".join(done.stderr.split())
    done = compare("--link", "50mbit")
    assert done.returncode == 2
    assert "only --strategies are compared on a link" in " ".join(done.stderr.split())
