"""The big parameter over two shards, beside the same over one."""

from typing import Final

from psctl.bench.workload import (
    OVER_TCP,
    Contender,
    Entry,
    Ground,
    Member,
    Workload,
    time_at_most,
)
from psctl.bench.workloads.big_parameter import stepping


def _start(ground: Ground) -> dict[str, str]:
    return {
        "one_shard": ground.start_job(shard_count=1, name="one"),
        "two_shards": ground.start_job(shard_count=2, name="two"),
    }


def _one_shard(member: Member) -> Contender:
    return stepping(member, member.places["one_shard"])


def _two_shards(member: Member) -> Contender:
    return stepping(member, member.places["two_shards"])


SHARDS: Final = Workload(
    name="shards",
    about_s=20,
    title="push + apply (SGD) + pull of one big parameter, 2 shards against 1, TCP",
    entries=(
        Entry("one_shard", "optimizer.step() in a job of one shard", _one_shard),
        Entry("two_shards", "optimizer.step() in a job of two shards", _two_shards),
    ),
    targets=(time_at_most("two_shards", 0.9, "one_shard"),),
    start=_start,
    environment=OVER_TCP,
)
