"""`psctl status`: where a job stands, for people. Programs get its document."""

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine
from typing import Any, Final, TypeVar

from psctl.tables import count_text, fitted
from pswire.addresses import Address
from pswire.aggregation import MEAN
from pswire.byte_text import byte_text
from pswire.limits import STALENESS_COUNTED_MAX
from pswire.membership import WorkerState
from pswire.names import printable
from pswire.reasons import Refusal
from pswire.status_document import Document, terms_of_document
from psworker.errors import error_of_refusal
from psworker.launch.reachability import (
    problem_behind_call,
    unreachable,
    wait_reachable,
)
from psworker.transport.calls import CallError
from psworker.transport.status_client import fetch_document

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 2.0
"""Longest wait for something to listen there. A person looks now, not later."""

TIMEOUT_S: Final = 5.0
"""Longest wait for the coordinator's answer."""


def read_document(coordinator: Address) -> Document:
    """The coordinator's answer, or an error as of `ask`."""
    return ask(
        coordinator,
        fetch_document(str(coordinator), timeout_s=TIMEOUT_S),
        timeout_s=TIMEOUT_S,
    )


def ask(
    coordinator: Address, question: Coroutine[Any, Any, T], *, timeout_s: float
) -> T:
    """The coordinator's answer to a call that takes `timeout_s` at most."""
    try:
        wait_reachable(coordinator, CONNECT_TIMEOUT_S)
        return asyncio.run(question)
    except CallError as error:
        if error.refusal is not None:
            raise error.to_ps_error() from error
        problem = problem_behind_call(coordinator, error.code, error.text)
        raise unreachable(coordinator, timeout_s, problem) from error
    except Refusal as refusal:
        raise error_of_refusal(refusal) from refusal
    finally:
        question.close()


def status_text(status: Document) -> str:
    facts = [f"{name:<12}{text}" for name, text in _facts(status) if text]
    return "\n".join(
        [
            *facts,
            "",
            "as of the last reports of the shards, usually less than 1 s old:",
            _shard_table(status["shards"]),
            "",
            _worker_table(status) if status["workers"] else "no workers",
        ]
    )


def _facts(status: Document) -> list[tuple[str, str]]:
    """Names and texts; those without a text are not shown."""
    steps, samples = status["steps_per_s"], status["samples_per_s"]
    speed = "" if steps is None else f"{steps:.3g} steps/s"
    if samples is not None:
        speed += f", {samples:.4g} samples/s"
    logged = (
        f"{name} {'-' if value is None else f'{value:.4g}'}"
        for name, value in status["metrics"].items()
    )
    since = f", after clock {status['mode_clock']}" if status["mode_clock"] else ""
    version, failure = status["snapshot_version"], status["failure"] or ""
    clip = status["clip_grad_norm"]
    waits_for = printable(status["waiting_for"] or "nobody")
    return [
        ("now", printable(status["diagnosis"]["sentence"] or "")),
        ("speed", speed),
        ("logged", printable(", ".join(logged))),
        ("job", printable(status["job"]["job_id"])),
        ("mode", f"{terms_of_document(status)}{since}"),
        ("strategy", printable(status["strategy"] or "")),
        ("phase", f"{status['phase']}, generation {status['generation']}"),
        ("evictions", _evictions_text(status)),
        (
            "model",
            f"{count_text(status['tensor_count'], 'tensor')}, "
            f"{byte_text(status['parameter_bytes'])}",
        ),
        (
            "snapshot",
            "none (`psctl snapshot get` makes one)"
            if version is None
            else f"version {version}",
        ),
        ("checkpoint", _checkpoint_text(status["checkpoints"])),
        ("waits for", "" if failure else waits_for),
        ("tensors", _transport_text(status)),
        ("cut off", _unreached_text(status)),
        ("began with", _brought_text(status)),
        ("gradients", f"clipped to a norm of {clip:g}" if clip else ""),
        ("compressed", printable(status["compression"] or "")),
        ("privacy", _privacy_text(status["privacy"])),
        *(
            (
                "split",
                f"{printable(split['name'])}: {split['item_count']} items, digest "
                f"{printable(split['digest'])[:12]}",
            )
            for split in status["splits"]
        ),
        ("data", _epoch_text(status["epochs"][0]) if status["epochs"] else ""),
        ("staleness", _staleness_text(status["shards"])),
        *(
            (
                "recording",
                f"that of shard {shard['shard_index']} has ended: "
                f"{printable(shard['recording_end'])}",
            )
            for shard in status["shards"]
            if shard["recording_end"]
        ),
        ("gradients", _gradients_text(status)),
        ("failure", printable(failure)),
    ]


def _checkpoint_text(checkpoints: Document | None) -> str:
    """The newest checkpoint, and why the last try has failed; empty without any."""
    if checkpoints is None:
        return ""
    newest, failure = checkpoints["newest"], checkpoints["failure"]
    text = f"none yet, one every {printable(checkpoints['interval'])}"
    if newest is not None:
        text = (
            f"version {newest['version']}, {newest['age_ms'] / 1000:.0f} s ago "
            f"({printable(newest['name'])}, {byte_text(newest['byte_count'])})"
        )
    return f"{text}; the last try has failed: {printable(failure)}" if failure else text


def _privacy_text(privacy: Document | None) -> str:
    """The budget that is spent, and by what it is counted; empty without any."""
    if privacy is None:
        return ""
    epsilon = privacy["epsilon"]
    spent = "more than all" if epsilon is None else f"{epsilon:.4g}"
    return (
        f"epsilon {spent} of {privacy['epsilon_max']:.4g} spent for each sample, at "
        f"delta {privacy['delta']:g}: {privacy['participation_count']} of "
        f"{privacy['participation_max']} participations, noise "
        f"{privacy['noise_multiplier']:g} x {privacy['max_grad_norm']:g}"
    )


def _evictions_text(status: Document) -> str:
    """How many were evicted, and what happens on the next loss."""
    text = f"{count_text(status['evicted_count'], 'worker')} evicted or replaced"
    if status["phase"] in ("finished", "failed"):
        return text
    return (
        f"{text}, never below {status['workers_floor']}; on a loss: "
        f"{status['job']['worker_loss_policy']}"
    )


def _brought_text(status: Document) -> str:
    """Whose values the job began with, where workers brought others; else empty."""
    others = [
        f"{printable(each['worker_id'])} brought other "
        f"{' and '.join(map(printable, each['brought_other']))}"
        for each in status["workers"]
        if each["brought_other"]
    ]
    if not others:
        return ""
    return f"the values of the worker of rank 0; {', '.join(others)}"


def _unreached_text(status: Document) -> str:
    """Who gets no answer from which shards; empty when all do."""
    return ", ".join(
        f"{printable(each['worker_id'])} gets no answer from shard "
        f"{' and '.join(map(str, each['unreached_shards']))}"
        for each in status["workers"]
        if each["unreached_shards"]
    )


def _transport_text(status: Document) -> str:
    """How tensors of members travel; empty when all go over gRPC."""
    shard_count = len(status["shards"])
    counts = {
        each["worker_id"]: each["shared_memory_shard_count"]
        for each in status["workers"]
        if each["rank"] is not None
    }
    if all(count == shard_count for count in counts.values()):
        return "through shared memory" if counts else ""
    sharing = [
        f"{printable(name)} with {count} of {count_text(shard_count, 'shard')}"
        for name, count in counts.items()
        if count
    ]
    return f"through shared memory: {', '.join(sharing)}" if sharing else ""


def _gradients_text(status: Document) -> str:
    """How gradients become updates, and whose did not count as they were sent."""
    job = status["job"]
    parts = [] if job["aggregation"] == MEAN.name else [job["aggregation"]]
    if job["gradient_norm_max"]:
        policy = job["bad_gradient_policy"]
        parts.append(f"{policy} above a norm of {job['gradient_norm_max']:g}")
    for worker in status["workers"]:
        counts = [
            f"{count} {what.replace('_', ' ')}"
            for what in ("bad", "clipped", "left_out")
            if (count := worker[f"{what}_gradient_count"])
        ]
        if counts:
            parts.append(f"{printable(worker['worker_id'])}: {', '.join(counts)}")
    return "; ".join(parts)


def _epoch_text(epoch: Document) -> str:
    """How far the newest epoch is, and what was not seen exactly once."""
    other = {
        "seen more than once": epoch["seen_again_count"],
        "torn": epoch["torn_count"],
        "dropped": epoch["dropped_count"],
        "skipped": epoch["skipped_count"],
    }
    parts = [f"{count} {name}" for name, count in other.items() if count]
    state = ", over" if epoch["over"] else ""
    return ", ".join(
        [
            f"epoch {epoch['epoch']} of {printable(epoch['loader'])}{state}: "
            f"{epoch['seen_once_count']} of {epoch['position_count']} seen once",
            *parts,
        ]
    )


def _staleness_text(shards: list[Document]) -> str:
    """How many pushes had which staleness, over all shards; empty when none had."""
    totals: Counter[int] = Counter()
    for shard in shards:
        totals.update(dict(enumerate(shard["staleness_counts"])))
    return ", ".join(
        f"{staleness}{'+' if staleness == STALENESS_COUNTED_MAX else ''}: "
        f"{count / totals.total():.1%}"
        for staleness, count in sorted(totals.items())
        if count
    )


def _shard_table(shards: list[Document]) -> str:
    return fitted(
        (
            *("SHARD", "STATE", "CLOCK", "VERSION", "QUEUE", "TORN", "SILENT"),
            *("SIZE", "ADDRESS"),
        ),
        [
            (
                shard["shard_index"],
                shard["state"],
                shard["clock"],
                shard["version"],
                shard["queued_push_count"],
                shard["torn_step_count"],
                _seconds(shard["silent_ms"], "never"),
                byte_text(shard["parameter_bytes"]),
                shard["address"] or "-",
            )
            for shard in shards
        ],
        least_useful=("TORN", "SILENT", "QUEUE", "SIZE"),
    )


def _worker_table(status: Document) -> str:
    awaited = {
        other["name"]
        for shard in status["shards"]
        if shard["waiting"] is not None and not status["failure"]
        for other in shard["waiting"]["awaited"]
    }
    return fitted(
        (
            *("WORKER", "RANK", "STATE", "CLOCK", "LEAD", "LAG", "IN STEP"),
            *("LOST", "ADDRESS"),
        ),
        [
            (
                worker["worker_id"],
                "-" if worker["rank"] is None else str(worker["rank"]),
                _state_text(worker, awaited),
                *(
                    "-" if worker[name] is None else worker[name]
                    for name in ("clock", "lead", "lag")
                ),
                _seconds(worker["step_ms"], "-"),
                _seconds(worker["silent_ms"] or None, "-"),
                worker["address"] or "-",
            )
            for worker in status["workers"]
        ],
        least_useful=("LEAD", "RANK"),
    )


def _state_text(worker: Document, awaited: Collection[str]) -> str:
    """The state of a worker, and whether shards wait for it."""
    state: str = worker["state"]
    if worker["rank"] is None or worker["worker_id"] not in awaited:
        return state
    return "awaited" if state == WorkerState.MEMBER else f"{state}, awaited"


def _seconds(ms: int | None, unknown: str) -> str:
    return unknown if ms is None else f"{ms / 1000:.1f} s"
