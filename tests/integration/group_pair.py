"""Starts the two processes of a `torch.distributed` group."""

from pathlib import Path
from typing import Final

from tests.doubles.free_addresses import free_address
from tests.integration.job import Job
from tests.integration.processes import Processes

SCRIPT: Final = "tests.integration.group_worker"
ROOT: Final = Path(__file__).resolve().parents[2]


def start_pair(
    processes: Processes, kind: str, folder: Path, job: Job, **environment: str
) -> None:
    """Starts two processes as torchrun does, without the time its agent takes."""
    port = str(free_address().port)
    for rank in range(2):
        processes.start(
            f"rank-{rank}",
            *("-m", SCRIPT, kind, str(folder)),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            PS_COORDINATOR=job.address,
            PYTHONPATH=f"{ROOT}:{ROOT / 'protos'}",
            **environment,
        )
