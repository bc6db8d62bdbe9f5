"""What a job is doing, and why it is slow or waits, found from numbers."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from psserver.coordinator.core.diagnosis import (
    Cause,
    JobFacts,
    WorkerFacts,
    diagnose,
    facts_of,
)
from psserver.coordinator.core.work import StepMeans
from psserver.edge.coordinator_settings import CoordinatorSettings, JobPhase
from pswire.activity import Activity
from pswire.membership import Mode, StepAtomicity
from tests.doubles.driven_coordinator import DrivenCoordinator


def _worker(
    name: str,
    *,
    compute_ms: float = 400.0,
    load_ms: float = 5.0,
    link_ms: float = 30.0,
    step_ms: float = 0.0,
    idle_ms: float = 0.0,
    is_alone: bool = False,
) -> WorkerFacts:
    """A worker of a job in BSP whose steps take all as long.

    Args:
        name: Its id.
        compute_ms: What it computes in a step.
        load_ms: What it waits for its loader.
        link_ms: What it takes to send and receive.
        step_ms: The whole step; what is left it waits for others.
        idle_ms: What it waits for data of others, or of the coordinator.
        is_alone: Whether it waits for nobody, as outside BSP.
    """
    own_ms = compute_ms + load_ms + link_ms
    peer_ms = 0.0 if is_alone else max(0.0, step_ms - own_ms)
    steps = StepMeans(
        steps_per_s=1000 / (own_ms + peer_ms),
        compute_ms=compute_ms,
        load_ms=load_ms,
        send_ms=link_ms / 3,
        wait_ms=2 * link_ms / 3 + peer_ms,
        idle_ms=idle_ms,
        bytes_per_step=1e5,
    )
    return WorkerFacts(name=name, steps=steps, peer_wait_ms=peer_ms)


def _running(*workers: WorkerFacts) -> JobFacts:
    return JobFacts(
        phase=JobPhase.RUNNING,
        shard_count=2,
        workers_min=2,
        clock=77,
        steps_per_s=6.5,
        apply_ms=4.0,
        workers=workers,
    )


def test_a_straggler_is_named_with_its_time_and_theirs() -> None:
    slow = _worker("worker-2", compute_ms=2900.0, load_ms=100.0, step_ms=3100.0)
    others = [_worker(f"worker-{n}", step_ms=3100.0) for n in (0, 1)]
    found = diagnose(_running(*others, slow))
    assert found.cause is Cause.STRAGGLER
    assert (found.who, found.others_wait) == (("worker-2",), True)
    assert found.sentence == (
        "worker-2 is the straggler: its step takes 3.0 s, of which it computes 2.9 s; "
        "the others compute 400 ms and wait for worker-2; see what else its machine "
        "does, or choose a mode that waits less (psctl mode)"
    )


def test_a_slow_link_of_one_worker_is_no_straggler() -> None:
    slow = _worker("worker-1", link_ms=1500.0, step_ms=1905.0)
    found = diagnose(_running(_worker("worker-0", step_ms=1905.0), slow))
    assert (found.cause, found.who) == (Cause.SLOW_LINK, ("worker-1",))
    assert found.sentence == (
        "worker-1 has a slow link: its step takes 1.9 s, of which 1.5 s to send "
        "gradients and receive values; the others take 30 ms and wait for worker-1; "
        "send less (prepare(compression=...)), less often (prepare(strategy=...)), or "
        "while it computes (prepare(overlap=True))"
    )


def test_a_loader_that_does_not_keep_up_is_no_straggler() -> None:
    slow = _worker("worker-0", load_ms=900.0, step_ms=1330.0)
    found = diagnose(_running(slow, _worker("worker-1", step_ms=1330.0)))
    assert (found.cause, found.who) == (Cause.WAITING_FOR_DATA, ("worker-0",))
    assert found.sentence == (
        "worker-0 waits for its loader: 900 ms of its step of 1.3 s; the others wait "
        "5.0 ms for theirs, and wait for worker-0; give the loader more processes "
        "(num_workers), or the data a faster place"
    )


def test_loaders_of_all_workers_are_named_together() -> None:
    slow = [_worker(f"w{n}", load_ms=600.0, step_ms=1030.0) for n in range(3)]
    found = diagnose(_running(*slow))
    assert (found.cause, found.who) == (Cause.WAITING_FOR_DATA, ("w0", "w1", "w2"))
    assert not found.others_wait
    assert "The workers wait for their loaders: 600 ms of a step of 1.0 s" in (
        found.sentence
    )
    alone = diagnose(_running(slow[0]))
    assert alone.sentence.startswith("w0 waits for its loader: ")


def _short(*, batch_count: int | None, idle_ms: float, load_ms: float = 1.0) -> Cause:
    """What is named of two workers whose steps take 8 ms of their own and a load."""
    workers = [
        _worker(f"w{n}", compute_ms=5.0, link_ms=3.0, load_ms=load_ms, idle_ms=idle_ms)
        for n in range(2)
    ]
    return diagnose(replace(_running(*workers), epoch_batch_count=batch_count)).cause


def test_what_short_epochs_cost_is_not_the_loader_s() -> None:
    workers = [
        _worker(f"w{n}", compute_ms=8.0, link_ms=6.0, load_ms=1.0, idle_ms=52.0)
        for n in range(2)
    ]
    found = diagnose(replace(_running(*workers), epoch_batch_count=4))
    assert (found.cause, found.who) == (Cause.SHORT_EPOCHS, ())
    assert found.sentence == (
        "Epochs are short, 2 steps of each worker, and 52 ms of 67 ms for a step go to "
        "where they end and begin; let an epoch have more batches, such as several "
        "passes over the data"
    )


def test_short_epochs_are_named_where_they_are_short_and_cost_most() -> None:
    assert _short(batch_count=32, idle_ms=52.0) is Cause.SHORT_EPOCHS
    assert _short(batch_count=33, idle_ms=52.0) is Cause.TRAINING
    assert _short(batch_count=None, idle_ms=52.0) is Cause.TRAINING
    assert _short(batch_count=4, idle_ms=5.9) is Cause.TRAINING
    assert _short(batch_count=4, idle_ms=6.1) is Cause.SHORT_EPOCHS
    assert _short(batch_count=4, idle_ms=52.0, load_ms=60.0) is Cause.WAITING_FOR_DATA


def test_a_slow_link_of_all_is_named_unless_they_share_memory_or_send_much() -> None:
    slow = [
        _worker(f"w{n}", compute_ms=20.0, link_ms=90.0, step_ms=115.0) for n in range(2)
    ]
    found = diagnose(_running(*slow))
    assert found.cause is Cause.SLOW_LINK
    assert found.sentence.startswith("The link between workers and shards is slow: 86")
    assert "; send less (prepare(compression=...))" in found.sentence
    sharing = [replace(each, shares_memory=True) for each in slow]
    assert diagnose(_running(*sharing)).cause is Cause.TRAINING
    assert slow[0].steps is not None
    much = replace(slow[0].steps, bytes_per_step=1e9)
    large = [replace(each, steps=much) for each in slow]
    assert diagnose(_running(*large)).cause is Cause.TRAINING


def test_with_local_steps_rounds_are_named_and_what_makes_them_cheaper() -> None:
    slow = replace(_worker("a", link_ms=900.0, step_ms=1305.0), takes_local_steps=True)
    found = diagnose(_running(slow, _worker("b", step_ms=1305.0)))
    assert found.cause is Cause.SLOW_LINK
    assert "a has a slow link: its round takes 1.3 s, of which 900 ms to send" in (
        found.sentence
    )
    assert found.sentence.endswith(
        "; let rounds have more local steps (every=...), or send less "
        "(prepare(compression=...))"
    )


def test_outside_bsp_nobody_is_said_to_wait_for_a_straggler() -> None:
    slow = _worker("b", compute_ms=2900.0, is_alone=True)
    facts = _running(_worker("a", is_alone=True), _worker("c", is_alone=True), slow)
    found = diagnose(replace(facts, mode="asp", waits_for_all=False))
    assert (found.cause, found.who) == (Cause.STRAGGLER, ("b",))
    assert not found.others_wait
    assert diagnose(replace(facts, waits_for_all=False, has_bound=True)).others_wait
    assert found.sentence.endswith(
        "400 ms and go on without b in asp; see what else its machine does"
    )


@pytest.mark.parametrize("waits_for_all", [True, False])
def test_an_even_job_with_noise_raises_no_alarm(waits_for_all: bool) -> None:
    for seed in range(100):
        random = Random(seed)
        count = random.randrange(2, 9)
        typical_ms = random.choice([2.0, 30.0, 400.0])
        totals = [[0.0, 0.0, 0.0, 0.0] for _ in range(count)]
        step_count = random.randrange(20, 60)
        for _ in range(step_count):
            own = [
                (
                    typical_ms * random.lognormvariate(0, 0.3),
                    typical_ms / 20 * random.lognormvariate(0, 1),
                    typical_ms / 4 * random.lognormvariate(0, 0.5),
                )
                for _ in range(count)
            ]
            last_ms = max(map(sum, own))
            for total, parts in zip(totals, own, strict=True):
                peer_ms = last_ms - sum(parts) if waits_for_all else 0.0
                for position, part in enumerate((*parts, peer_ms)):
                    total[position] += part / step_count
        workers = (
            WorkerFacts(
                name=f"w{number}",
                steps=StepMeans(
                    steps_per_s=1.0,
                    compute_ms=compute_ms,
                    load_ms=load_ms,
                    wait_ms=link_ms + peer_ms,
                    bytes_per_step=1e7,
                ),
                peer_wait_ms=peer_ms,
            )
            for number, (compute_ms, load_ms, link_ms, peer_ms) in enumerate(totals)
        )
        facts = replace(_running(*workers), waits_for_all=waits_for_all)
        assert diagnose(facts).cause is Cause.TRAINING, seed


def test_several_that_are_slow_are_all_named() -> None:
    usual = [_worker(f"w{n}", step_ms=3000.0) for n in range(6)]
    slow = [_worker(f"s{n}", compute_ms=2500.0, step_ms=3000.0) for n in range(2)]
    found = diagnose(_running(*usual, *slow))
    assert (found.cause, found.who) == (Cause.STRAGGLER, ("s0", "s1"))
    assert "; s1 is slow too; see what else its machine does" in found.sentence


@pytest.mark.parametrize(
    ("activity", "cause", "text"),
    [
        (
            Activity.COMPUTING,
            Cause.STRAGGLER,
            "b is the straggler: it has computed for 12.0 s, and the others wait "
            "for it",
        ),
        (
            Activity.LOADING,
            Cause.WAITING_FOR_DATA,
            "b has waited for its loader for 12.0 s, and the others wait for it",
        ),
        (
            Activity.WAITING,
            Cause.SLOW_LINK,
            "b has waited for answers of the shards for 12.0 s, and the others wait "
            "for it",
        ),
    ],
)
def test_who_is_stuck_is_named_before_its_first_step_is_done(
    activity: Activity, cause: Cause, text: str
) -> None:
    stuck = WorkerFacts(
        name="b", activity=activity, activity_ms=12_000, is_awaited=True
    )
    found = diagnose(_running(WorkerFacts(name="a"), stuck))
    assert (found.cause, found.sentence, found.others_wait) == (cause, text, True)
    both = replace(stuck, name="a"), stuck
    assert diagnose(_running(*both)).cause is Cause.TRAINING


def test_a_full_disk_is_told_from_another_failure_of_a_checkpoint() -> None:
    facts = _running(_worker("a"))
    full = "shard 1: [Errno 28] No space left on device"
    found = diagnose(replace(facts, checkpoint_failure=full))
    assert found.cause is Cause.DISK
    assert found.sentence == (
        "The disk of the checkpoints is full or takes no writes: make room there; the "
        f"job trains, and its last checkpoint has failed: {full}"
    )
    other = diagnose(replace(facts, checkpoint_failure="shard 1: it was lost"))
    assert other.cause is Cause.CHECKPOINT_FAILING
    state = diagnose(replace(facts, disk_failure="database or disk is full"))
    assert state.cause is Cause.DISK
    assert "nobody can join or leave until it does" in state.sentence


def test_the_start_says_what_it_waits_for() -> None:
    waiting = JobFacts(
        phase=JobPhase.WAITING,
        shard_count=2,
        missing_shards=(1,),
        workers_min=3,
        ready_count=1,
    )
    found = diagnose(waiting)
    assert found.cause is Cause.STARTING
    assert found.sentence == "The job starts when shard 1 of 2 is there"
    found = diagnose(replace(waiting, missing_shards=()))
    assert found.cause is Cause.TOO_FEW_WORKERS
    assert found.sentence == (
        "The job waits for 2 more workers: 1 of 3 has called prepare(); start what is "
        "missing, or the job with a smaller --min-workers"
    )
    seeding = JobFacts(
        phase=JobPhase.SEEDING, waits_for="the first values from a", ready_count=1
    )
    assert diagnose(seeding).sentence == (
        "The job starts: it waits for the first values from a"
    )


def test_losses_come_before_all_that_is_only_slow() -> None:
    slow = _worker("b", compute_ms=2900.0, step_ms=3000.0)
    facts = _running(_worker("a", step_ms=3000.0), slow)
    lost = replace(facts.workers[0], lost_ms=12_000)
    found = diagnose(replace(facts, workers=(lost, slow), waits_for="a, until ..."))
    assert (found.cause, found.who) == (Cause.WORKER_LOST, ("a",))
    assert found.sentence == (
        "a is lost, without a sign of life for 12 s, and holds up the others until "
        "that is settled: the job waits for a, until ..."
    )
    shard = diagnose(replace(facts, missing_shards=(0,), waits_for="shard 0 (lost)"))
    assert (shard.cause, shard.who) == (Cause.SHARD_LOST, ("shard 0",))
    assert shard.sentence == "Nothing is trained: the job waits for shard 0 (lost)"
    none = diagnose(replace(facts, workers=(), waits_for="a worker to go on"))
    assert none.cause is Cause.TOO_FEW_WORKERS


@pytest.mark.parametrize(
    ("settings", "waits_for_all"),
    [
        ({}, True),
        ({"backup_worker_count": 1, "step_atomicity": StepAtomicity.CLOCK}, False),
        ({"mode": Mode.ASP}, False),
        ({"mode": Mode.QUORUM, "quorum": 1}, False),
        ({"mode": Mode.QUORUM, "quorum": 2}, True),
    ],
)
def test_who_has_a_quorum_or_backup_workers_waits_for_no_slow_one(
    settings: dict[str, Any], waits_for_all: bool
) -> None:
    made = CoordinatorSettings(job_id="job", shard_count=1, workers_min=2, **settings)
    driven = DrivenCoordinator.running("a", "b", settings=made)
    assert facts_of(driven.core, 0).waits_for_all is waits_for_all


def test_a_job_that_is_over_says_only_that() -> None:
    facts = replace(_running(), phase=JobPhase.FAILED, failure="shard 1 was lost")
    assert diagnose(facts).sentence == "The job has failed: shard 1 was lost"
    over = diagnose(replace(facts, phase=JobPhase.FINISHED))
    assert over.cause is Cause.FINISHED
    assert over.sentence.endswith("all of its workers have left, after clock 77")


def test_the_facts_of_a_core_are_those_of_its_stage() -> None:
    driven = DrivenCoordinator(shard_count=2, workers_min=2)
    driven.add_worker("a")
    assert diagnose(facts_of(driven.core, 0)).cause is Cause.STARTING
    driven.add_shards()
    assert diagnose(facts_of(driven.core, 0)).cause is Cause.TOO_FEW_WORKERS
    driven.add_worker("b")
    assert diagnose(facts_of(driven.core, 0)).cause is Cause.STARTING
    driven.report_all()
    found = diagnose(facts_of(driven.core, 0))
    assert found.cause is Cause.TRAINING
    assert found.sentence == "Training at clock 0 in bsp with 2 workers"
