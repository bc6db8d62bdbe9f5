"""A job that clips goes on as one process would, whoever dies within a step."""

import json
from pathlib import Path

import pytest

from tests.doubles.promised_numbers import DEVIATION_MAX, NORM_DEVIATION_MAX
from tests.fault import clipped_training
from tests.fault.clipped_training import CLIP, PushKey, in_one_process
from tests.fault.conftest import MakeJob
from tests.fault.fault_job import PATIENT_S


def clocks_of(history: Path) -> list[list[PushKey]]:
    """Whose pushes each clock consists of, the same in every chunk of every shard."""
    found: dict[int, set[tuple[PushKey, ...]]] = {}
    for path in history.glob("shard-*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if line["type"] == "applied":
                pushes = tuple((name, sequence) for name, _, sequence in line["pushes"])
                found.setdefault(line["clock"], set()).add(pushes)
    assert sorted(found) == list(range(1, len(found) + 1))
    assert all(len(sets) == 1 for sets in found.values()), found
    return [list(found[clock].pop()) for clock in sorted(found)]


@pytest.mark.parametrize("policy", ["continue", "wait"])
def test_a_job_that_clips_has_the_numbers_of_one_process(
    policy: str, make_job: MakeJob
) -> None:
    points = {"w1": "worker.staged=kill@12", "w2": "worker.chunk_sent=kill@61"}
    with make_job(
        "--mode=bsp",
        f"--on-worker-loss={policy}",
        "--min-workers=1",
        script=clipped_training.__file__,
        lease_s=PATIENT_S,
    ) as job:
        job.start_workers("w0", "w1", "w2", **points)
        # All of them, so that no one dies before the last one has begun.
        job.wait_members("w0", "w1", "w2")
        job.let_begin()
        for name in points:
            job.expect_killed(name)
            if policy == "wait":
                job.start_worker(f"{name}-again", worker_id=name)
        if policy == "continue":
            job.wait_gone(*points)
        job.wait_steps("w0", 25)

    clocks = clocks_of(job.history)
    values, norms = in_one_process(clocks)
    for mine, theirs in zip(job.values, values, strict=True):
        deviation = (mine - theirs).norm() / theirs.norm()
        assert deviation < DEVIATION_MAX, f"it differs by {deviation}"
    if policy == "continue":
        assert {len(pushes) for pushes in clocks} >= {1, 3}
    # Some are clipped, some are not; how many is a matter of who died when.
    assert min(norms) < CLIP < max(norms)
    told = job.workers["w0"].events("step")
    assert len(told) > 20
    for step in told:
        assert step["grad_norm"] == pytest.approx(
            norms[step["clock"] - 1], rel=NORM_DEVIATION_MAX
        )
