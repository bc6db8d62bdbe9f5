"""Training steps with overlap, beside DistributedDataParallel on gloo."""

from typing import Final

from torch.nn.parallel import DistributedDataParallel

import psworker
from psctl.bench.overlap_training import Training
from psctl.bench.workload import (
    Contender,
    Entry,
    Ground,
    Member,
    Workload,
    rate_at_least,
)

_WORKER_COUNT: Final = 2
_STEP_COUNT: Final = 3
"""Of a repetition: values of one step arrive while the next one computes."""


def _start(ground: Ground) -> dict[str, str]:
    return {"coordinator": ground.start_job(shard_count=2, worker_count=_WORKER_COUNT)}


def _training(member: Member) -> Training:
    return Training(
        member.sizes.parameter_count, member.sizes.batch_size, rank=member.rank
    )


def _contender(member: Member, training: Training) -> Contender:
    def run() -> None:
        training.turn(_STEP_COUNT)

    return Contender(
        run,
        amount=_STEP_COUNT * member.sizes.batch_size * member.count,
        values=training.values,
    )


def _overlap(member: Member) -> Contender:
    ps = member.stack.enter_context(
        psworker.connect(member.places["coordinator"], f"bench-{member.rank}")
    )
    training = _training(member)
    training.prepare(ps, overlap=True)
    return _contender(member, training)


def _ddp(member: Member) -> Contender:
    training = _training(member)
    training.model = DistributedDataParallel(training.model)
    return _contender(member, training)


DDP: Final = Workload(
    name="ddp",
    about_s=70,
    title="training step of a model of about 25 million parameters, 2 workers, figures "
    "of one sample",
    entries=(
        Entry("paramserver", "prepare(overlap=True), 2 shards", _overlap),
        Entry("ddp", "DistributedDataParallel on gloo, the same batches", _ddp),
    ),
    targets=(rate_at_least("paramserver", 1.0, "ddp"),),
    start=_start,
    member_count=_WORKER_COUNT,
    thread_count=1,
    tolerance=1e-3,
)
