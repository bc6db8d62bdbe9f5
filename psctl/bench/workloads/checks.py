"""What is checked in a step of the big parameter, beside the whole step."""

import json
import re
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

import torch
import xxhash

from psctl.bench.workload import (
    OVER_TCP,
    CannotRunError,
    Contender,
    Entry,
    Ground,
    Member,
    Workload,
    time_at_most,
)
from psctl.bench.workloads.big_parameter import big_tensors, job_steps
from pswire.limits import CHUNK_BYTES_MAX
from pswire.torch_types import buffer_of
from psworker.optim.gradients import is_finite, norm_of

_CHUNK_ELEMENTS: Final = CHUNK_BYTES_MAX // 4
_DIGESTS_OVER_TCP: Final = 4
"""Of each chunk: made and verified, of the gradient and of the values."""

_DIGESTS_ON_ONE_HOST: Final = 1
"""Of each chunk: made of the gradient, to know a push again."""

_PUSH_COUNT: Final = 200
_START_TIMEOUT_S: Final = 60.0


def _start(ground: Ground) -> dict[str, str]:
    coordinator = ground.start_job()
    chunk_count = -(-ground.sizes.element_count // _CHUNK_ELEMENTS)
    ground.start("dedupe", "psserver.bench.dedupe", str(chunk_count), str(_PUSH_COUNT))
    printed = ground.children.line_of("dedupe", _START_TIMEOUT_S, re.compile(".+"))
    if printed is None:
        raise CannotRunError(
            f"psserver.bench.dedupe printed nothing within {_START_TIMEOUT_S:.0f} s; "
            "the machine may be too busy: measure again"
        )
    dedupe_s = statistics.median(json.loads(printed.group()))
    return {"coordinator": coordinator, "dedupe_s": str(dedupe_s)}


def _checks(digest_count: int, member: Member) -> Contender:
    """The passes over a step's buffers, where a step makes them.

    Each digest is of bytes that were just copied, as in a step, so that they are in
    the cache; the copies are not counted.
    """
    _, gradient = big_tensors(member)
    copied = torch.empty(_CHUNK_ELEMENTS)
    dedupe_s = float(member.places["dedupe_s"])

    def run() -> float:
        began = time.perf_counter()
        assert is_finite(norm_of([gradient]))
        counted_s = time.perf_counter() - began + dedupe_s
        for _ in range(digest_count):
            for start in range(0, len(gradient), _CHUNK_ELEMENTS):
                part = gradient[start : start + _CHUNK_ELEMENTS]
                chunk = copied[: len(part)].copy_(part)
                began = time.perf_counter()
                xxhash.xxh3_64_intdigest(buffer_of(chunk))
                counted_s += time.perf_counter() - began
        return counted_s

    return Contender(run)


def _workload(
    name: str,
    transport: str,
    digest_count: int,
    share_max: float,
    environment: Mapping[str, str],
) -> Workload:
    digests = f"{digest_count} digest{'s' * (digest_count > 1)} of each chunk"
    return Workload(
        name=name,
        about_s=10,
        title="finite verdict, digests and dedupe of a step of one big parameter, "
        + transport,
        entries=(
            Entry("step", "optimizer.step(), 1 worker, 1 shard", job_steps()),
            Entry(
                "checks",
                f"one norm, {digests}, the shard's table of pushes",
                partial(_checks, digest_count),
            ),
        ),
        targets=(time_at_most("checks", share_max, "step"),),
        start=_start,
        environment=environment,
    )


CHECKS: Final = _workload("checks", "TCP", _DIGESTS_OVER_TCP, 0.03, OVER_TCP)

CHECKS_ON_ONE_HOST: Final = _workload(
    "checks_one_host", "shared memory", _DIGESTS_ON_ONE_HOST, 0.1, {}
)
