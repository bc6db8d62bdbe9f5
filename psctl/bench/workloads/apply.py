"""The shard's arithmetic alone. psserver measures it: the two sides never import."""

from typing import Final

from psctl.bench.workload import (
    Entry,
    Workload,
    begun_elsewhere,
    rate_at_least,
)

APPLY: Final = Workload(
    name="apply",
    about_s=5,
    title="Adam on one big vector in a shard's process, without any transport",
    entries=(
        Entry("shard", "the shard's apply, chunk by chunk", begun_elsewhere),
        Entry("fused", "torch.optim.Adam(fused=True) at once", begun_elsewhere),
    ),
    targets=(rate_at_least("shard", 0.6, "fused"),),
    member_module="psserver.bench.apply",
)
