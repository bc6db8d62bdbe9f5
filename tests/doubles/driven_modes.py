"""Jobs of a driven coordinator whose mode is asked to change."""

from dataclasses import replace

from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.fence_report import WorkerHolding
from pswire.membership import Mode, ModeTerms
from tests.doubles.core_values import key
from tests.doubles.driven_coordinator import DrivenCoordinator

SETTINGS = CoordinatorSettings(job_id="job", shard_count=2)


def running(*names: str, mode: Mode = Mode.BSP, bound: int = 0) -> DrivenCoordinator:
    settings = replace(SETTINGS, mode=mode, staleness_bound=bound)
    return DrivenCoordinator.running(*names, settings=settings)


def ask(job: DrivenCoordinator, mode: Mode, bound: int = 0) -> None:
    job.core.set_mode(ModeTerms(mode, bound), job.now_ms)


def far_apart(job: DrivenCoordinator, **trailers: int) -> None:
    """Every shard has these pushes of each worker, complete and done."""
    holdings = tuple(
        WorkerHolding(
            worker=key(name),
            complete_sequence=sequence,
            trailer_sequence=sequence,
            touched_sequence=sequence,
        )
        for name, sequence in trailers.items()
    )
    job.send_all(replace(job.report_of(), holdings=holdings))
