"""Real training scripts, as one process and as two workers on two shards."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conformance.catalogue import CATALOGUE, SCRIPTS, Script
from tests.conformance.changed_lines import changed_line_count
from tests.conformance.losses import difference, in_turn, over_workers
from tests.conformance.report import Row
from tests.conformance.runs import run_alone, run_workers
from tests.doubles.children import Nursery
from tests.integration.job import Job

CHANGED_LINE_COUNT_MAX: Final = 4
STEP_COUNT_MIN: Final = 12


def named(script: Script) -> str:
    return script.name


@pytest.mark.parametrize("script", CATALOGUE, ids=named)
def test_a_script_changes_in_four_lines(script: Script) -> None:
    plain, distributed = script.plain.read_text(), script.distributed.read_text()
    assert "psworker" not in plain
    assert 1 <= changed_line_count(plain, distributed) <= CHANGED_LINE_COUNT_MAX


def test_every_script_is_in_the_suite() -> None:
    for folder, scripts in (
        ("plain", CATALOGUE),
        ("ps", [script for script in CATALOGUE if not script.is_example]),
    ):
        files = {path.stem for path in (SCRIPTS / folder).glob("*.py")}
        assert files == {script.name for script in scripts}


def test_the_page_tells_of_every_script_and_what_it_is_allowed(
    repository: Path,
) -> None:
    page = (repository / "docs" / "conformance.md").read_text()
    told = re.findall(r"^\| (\w+) \| (.+?) \| .* \| (\S+) \|$", page, re.MULTILINE)
    assert told[1:] == [
        (script.name, script.title, f"{script.allowed:.0e}") for script in CATALOGUE
    ]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("script", CATALOGUE, ids=named)
def test_losses_are_those_of_one_process(
    script: Script,
    nursery: Nursery,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    if script.data is not None and not script.data.exists():
        pytest.skip(f"no {script.data.name}: `make conformance` fetches it")
    alone = run_alone(nursery, script, script.plain, tmp_path)
    settings: dict[str, Any] = {"workers_min": script.worker_count}
    if script.is_seeded:
        settings["job_seed"] = 0
    with Job(tmp_path / "job", **settings, sockets=True) as job:
        workers = run_workers(nursery, script, job, tmp_path)
        chunk_counts = [len(host.model.chunks) for host in job.shards]
    overlapped = workers
    if script.overlaps:
        with Job(tmp_path / "overlapped", **settings, sockets=True) as job:
            overlapped = run_workers(nursery, script, job, tmp_path, overlap=True)
    together = (
        in_turn(workers)
        if script.in_turn
        else over_workers(alone, workers, script.batch_size)
    )
    without_coordinator = run_alone(nursery, script, script.distributed, tmp_path)
    reordered = math.nan
    if "CONFORMANCE_REORDERED" in os.environ:
        turned = run_alone(nursery, script, script.plain, tmp_path, order="reversed")
        reordered = difference(alone, turned)

    row = Row(
        script.name,
        script.title,
        changed_line_count(script.plain.read_text(), script.distributed.read_text()),
        len(alone),
        difference(alone, together),
        reordered,
        script.allowed,
    )
    record_property("conformance", asdict(row))
    assert without_coordinator == alone, "the script alone has other losses"
    assert overlapped == workers, "overlap=True leads to other losses"
    assert len(alone) >= STEP_COUNT_MIN
    assert len([count for count in chunk_counts if count]) == script.shard_count
    assert row.difference <= row.allowed
