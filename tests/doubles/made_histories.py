"""Histories made by hand, as a good run writes them."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psctl.check_history import HistoryReport, check_history

Values = dict[str, Any]

SHARDS = ("shard-0", "shard-1")
CHUNKS = {"shard-0": (0, 2), "shard-1": (1,)}
WORKERS = ("a", "b")
CLOCK_COUNT = 3


def push(worker_id: str, sequence: int, incarnation: int = 1) -> list[Any]:
    return [worker_id, incarnation, sequence]


@dataclass
class Histories:
    """Files of a run, to be changed before they are written."""

    files: dict[str, list[Values]] = field(default_factory=dict)

    def begin(self, process: str, role: str, **facts: object) -> None:
        self.add(
            process, "begin", format=1, job="j", process=process, role=role, **facts
        )

    def add(self, process: str, kind: str, /, **values: object) -> None:
        self.files.setdefault(process, []).append(
            {**copy.deepcopy(values), "type": kind}
        )

    def find(self, process: str, kind: str, **wanted: object) -> Values:
        """The first line of a kind with these values."""
        return next(
            line
            for line in self.files[process]
            if line["type"] == kind and wanted.items() <= line.items()
        )

    def remove(self, process: str, kind: str, **wanted: object) -> Values:
        line = self.find(process, kind, **wanted)
        self.files[process].remove(line)
        return line

    def check(self, folder: Path) -> HistoryReport:
        for process, lines in self.files.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"{process}.jsonl").write_text(text)
        return check_history([folder])


def record(generation: int, members: tuple[str, ...], **values: object) -> Values:
    return {
        "generation": generation,
        "members": [[worker_id, 1, 0, 0] for worker_id in members],
        "departures": [],
        "mode": "bsp",
        "bound": 0,
        "mode_clock": 0,
        "skipped": [],
        **values,
    }


def good(mode: str = "bsp", bound: int = 0) -> Histories:
    """Two workers, two shards, three clocks, then everybody leaves."""
    run = Histories()
    first = record(1, WORKERS, mode=mode, bound=bound, kind="start")
    last = record(
        2,
        (),
        mode=mode,
        bound=bound,
        departures=[["a", 1, CLOCK_COUNT, False], ["b", 1, CLOCK_COUNT, False]],
    )
    run.begin("coordinator", "coordinator", shard_count=2)
    run.add("coordinator", "record", **first)
    run.add("coordinator", "record", **last)
    for index, shard in enumerate(SHARDS):
        run.begin(shard, "shard", shard=index, incarnation=1, shard_count=2)
        run.add(shard, "record", **first, torn=0)
        for clock in range(1, CLOCK_COUNT + 1):
            add_clock(run, shard, clock, mode=mode, bound=bound)
        run.add(shard, "record", **last, torn=0)
    for worker_id in WORKERS:
        add_worker(run, worker_id, mode=mode, bound=bound)
    return run


def add_clock(run: Histories, shard: str, clock: int, *, mode: str, bound: int) -> None:
    pushes = [push(worker_id, clock) for worker_id in WORKERS]
    for each in pushes:
        run.add(shard, "opened", push=each, clock=clock)
        run.add(shard, "trailer", push=each, chunks=list(CHUNKS[shard]), weight=1.0)
    for chunk in CHUNKS[shard]:
        run.add(shard, "applied", chunk=chunk, clock=clock, pushes=pushes, torn=[])
    for each in pushes:
        run.add(shard, "done", push=each, outcome="applied", clock=clock)
    for each in pushes:
        run.add(shard, "reply", push=each, **reply(clock, mode=mode, bound=bound))


def reply(clock: int, *, mode: str = "bsp", bound: int = 0) -> Values:
    return {
        "op": "push",
        "outcome": "applied",
        "generation": 1,
        "clock": clock,
        "version": 2 * clock,
        "frontier": clock,
        "mode": mode,
        "bound": bound,
        "staleness": 0,
    }


def add_worker(run: Histories, worker_id: str, *, mode: str, bound: int) -> None:
    process = f"worker-{worker_id}-1"
    run.begin(process, "worker", worker=[worker_id, 1])
    for clock in range(1, CLOCK_COUNT + 1):
        each = push(worker_id, clock)
        run.add(process, "invoke", op="push", push=each, clock=clock)
        replies = [
            {"shard": index, "incarnation": 1, **reply(clock, mode=mode, bound=bound)}
            for index in range(2)
        ]
        run.add(process, "ok", op="push", push=each, outcome="applied", replies=replies)


def broken(report: HistoryReport) -> dict[str, str]:
    """The first break of each promise that was broken."""
    found: dict[str, str] = {}
    for each in report.findings.breaks:
        found.setdefault(each.promise, f"{each.place} {each.text}")
    return found


def applied_twice(run: Histories) -> None:
    line = run.find("shard-0", "applied", chunk=2, clock=2)
    run.files["shard-0"].insert(run.files["shard-0"].index(line) + 1, dict(line))


def returned() -> Histories:
    """A run that was killed whole after its clocks, returned to its start and ended.

    Files of the second life end in 2; the coordinator writes on in its own.
    """
    run = good()
    for process in (*SHARDS, "coordinator"):
        run.remove(process, "record", generation=2)
    text = json.dumps(good().files)
    for worker_id in WORKERS:
        text = text.replace(f'["{worker_id}", 1', f'["{worker_id}", 2')
    text = text.replace('"incarnation": 1', '"incarnation": 2')
    for generation in (2, 1):
        text = text.replace(
            f'"generation": {generation}', f'"generation": {generation + 2}'
        )
    for process, lines in json.loads(text).items():
        match process.partition("-"):
            case ("worker", _, _):
                process = f"{process.removesuffix('-1')}-2"
            case ("shard", _, _):
                process = f"{process}-2"
        run.files.setdefault(process, []).extend(lines)
    return run
