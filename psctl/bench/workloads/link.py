"""The big parameter over a slow link, with fewer bytes and without.

What fewer bytes cost in accuracy is no matter of time: docs/compression.md.
"""

from dataclasses import replace
from typing import Final

import psworker
from psctl.bench.workload import (
    OVER_TCP,
    Contender,
    Entry,
    Ground,
    Member,
    Workload,
    rate_at_least,
)
from psctl.bench.workloads.big_parameter import stepping

_LINK_MBIT: Final = 200.0
_TOPK: Final = psworker.Compression(push="topk", pull="topk", ratio=0.01)


def _start(ground: Ground) -> dict[str, str]:
    # Jobs of their own: compression is one of a job's settings.
    return {name: ground.start_job(name=name) for name in ("fp32", "int8", "topk")}


def _fp32(member: Member) -> Contender:
    return stepping(member, member.places["fp32"])


def _int8(member: Member) -> Contender:
    made = stepping(member, member.places["int8"], compression="int8")
    return replace(made, values=None)


def _topk(member: Member) -> Contender:
    made = stepping(member, member.places["topk"], compression=_TOPK)
    return replace(made, values=None)


LINK: Final = Workload(
    name="link",
    about_s=75,
    title=f"push + apply (SGD) + pull of one big parameter, link of {_LINK_MBIT:g} "
    "Mbit/s",
    entries=(
        Entry("fp32", "elements as they are", _fp32),
        Entry("int8", 'compression="int8", both ways', _int8),
        Entry("topk", "1 % of the elements both ways, with residuals", _topk),
    ),
    targets=(rate_at_least("int8", 3.3, "fp32"), rate_at_least("topk", 8.0, "fp32")),
    start=_start,
    environment=OVER_TCP,
    link_mbit=_LINK_MBIT,
)
