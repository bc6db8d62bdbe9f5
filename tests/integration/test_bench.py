"""`psctl bench` in small: it measures all sides and leaves nothing behind.

Its processes are forked, but those of one test.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles.children import Nursery


def test_both_sides_are_measured_in_one_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "psctl", "bench", "step", "--json"]
    done = subprocess.run(
        [*command, "--mib", "2", "--repetitions", "4"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["repetition_count"] == 4
    assert figures["machine"]["cpu_model"]
    assert figures["versions"]["paramserver"]
    for side in ("paramserver", "torch_rpc"):
        spread = figures[side]
        assert 0 < spread["min_ms"] <= spread["median_ms"] <= spread["max_ms"]
    assert figures["torch_rpc_over_paramserver"] > 0
    assert list(tmp_path.iterdir()) == []


def test_overlap_is_measured_beside_one_process(
    nursery: Nursery, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    sizes = ["--parameters", "2000000", "--batch", "4", "--turns", "2", "--steps", "2"]
    done = nursery.run(
        *("-m", "psctl", "bench", "overlap", "--json", *sizes),
        *("--workers", "2", "--bandwidth", "4000", "--latency", "1"),
        environment={"TMPDIR": str(scratch)},
        launches=True,
        timeout_s=250,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["worker_count"], figures["bandwidth_mbit"]) == (2, 4000)
    for name in ("one_process", "without_overlap", "with_overlap"):
        assert 0 < figures[name]["min_ms"] <= figures[name]["median_ms"]
    assert figures["without_over_with"] > 0
    assert list(scratch.iterdir()) == []


def test_a_workload_of_several_processes_is_measured_into_files(
    nursery: Nursery, tmp_path: Path
) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    sizes = ["--mib", "2", "--repetitions", "2"]
    names = ["--only", "allreduce2"]
    done = nursery.run(
        *("-m", "psctl", "bench", "all", "--json"),
        *(*sizes, *names, "--out", str(out)),
        environment={"TMPDIR": str(scratch)},
        launches=True,
        timeout_s=250,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert json.loads((out / "bench.json").read_text()) == printed
    assert printed["command"].startswith("psctl bench all --json --mib 2")
    assert [each["name"] for each in printed["workloads"]] == names[1::2]
    for workload in printed["workloads"]:
        assert workload["failure"] is None
        for contender in workload["contenders"]:
            assert contender["why_not"] is None
            assert len(contender["durations_ms"]) == 2
            assert min(contender["durations_ms"]) > 0
        for target in workload["targets"]:
            assert target["ratio"] > 0
    assert "| `allreduce2` |" in (out / "bench.md").read_text()
    assert {path.name for path in out.iterdir()} == {
        "bench.json",
        "bench.md",
        "bench.png",
    }
    assert "allreduce2: " in done.stderr
    assert list(scratch.iterdir()) == []


@pytest.mark.repeat
def test_a_large_model_is_saved_and_restored(nursery: Nursery, tmp_path: Path) -> None:
    done = nursery.run(
        *("-m", "psctl", "bench", "large", "--json", "--mib", "8"),
        environment={"TMPDIR": str(tmp_path)},
        launches=True,
        timeout_s=250,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["read"]["own_byte_count"] >= 3 * 8 << 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.repeat
def test_recovery_is_measured(nursery: Nursery, tmp_path: Path) -> None:
    done = nursery.run(
        *("-m", "psctl", "bench", "all", "--json", "--only", "recovery"),
        *("--repetitions", "2", "--parameters", "100000", "--out", str(tmp_path)),
        environment={},
        launches=True,
        timeout_s=250,
    )
    assert done.returncode == 0, done.stderr
    (workload,) = json.loads(done.stdout)["workloads"]
    assert workload["failure"] is None
