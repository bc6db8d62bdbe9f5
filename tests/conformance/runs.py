"""Runs of a script: as one process, and as the workers of a job."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from psserver.coordinator.core.data.ledger import DataLedger
from tests.conformance.catalogue import DATA, Script
from tests.conformance.losses import Line
from tests.doubles.children import Child, Nursery, kill, wait_until
from tests.integration.job import JOB_SEED, Job

OVERLAPPED: Final = Path(__file__).with_name("overlapped.py")
ONE_PROCESS: Final = Path(__file__).with_name("one_process.py")
ENVIRONMENT: Final = {"EXAMPLE_DATA": str(DATA)}
RUN_TIMEOUT_S: Final = 100.0
EPOCH_COUNT_MAX: Final = 8


def run_alone(
    nursery: Nursery,
    script: Script,
    path: Path,
    folder: Path,
    *,
    order: str = "forward",
) -> list[Line]:
    """Runs one process on the batches that the workers of a job have together."""
    ledger = DataLedger(JOB_SEED)
    dealt = [ledger.seed_of("loader", epoch) for epoch in range(EPOCH_COUNT_MAX)]
    seeds = "-" if script.is_seeded else ",".join(map(str, dealt))
    child = nursery.start(
        f"{path.parent.name}-{order}",
        *(str(ONE_PROCESS), seeds, order, str(path), *script.arguments_alone),
        folder=folder,
        environment=ENVIRONMENT,
    )
    (lines,) = _lines_of([child])
    return lines


def run_workers(
    nursery: Nursery, script: Script, job: Job, folder: Path, *, overlap: bool = False
) -> list[list[Line]]:
    """Runs the workers of a job; the lines of each, by rank."""
    command = [str(script.distributed), *script.arguments_of_worker]
    if overlap:
        command = [str(OVERLAPPED), *command]
    children = [
        nursery.start(
            f"worker-{rank}-overlapped" if overlap else f"worker-{rank}",
            *command,
            folder=folder,
            environment=ENVIRONMENT
            | {"PS_COORDINATOR": job.address, "PS_WORKER_ID": f"w{rank}"},
        )
        for rank in range(script.worker_count)
    ]
    return _lines_of(children)


def _lines_of(children: Sequence[Child]) -> list[list[Line]]:
    def is_over() -> bool:
        codes = [child.code for child in children]
        return None not in codes or any(codes)

    try:
        wait_until(is_over, "the end of the scripts", RUN_TIMEOUT_S)
        for child in children:
            assert not child.code, f"{child.name} failed:\n{child.log}"
    finally:
        for child in children:
            kill(child)
    return [[Line.parse(line) for line in child.lines()] for child in children]
