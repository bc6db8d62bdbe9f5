"""Documents of jobs that nobody runs: what a page or a command is shown in tests.

They have the names that `pswire.status_document` writes, and its own test compares
both. Everything follows from a clock, so that one document fits the next.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Document = dict[str, Any]

BEGAN_AT_UNIX_S: Final = 1_800_000_000.0
"""When the jobs began."""

MIB: Final = 1 << 20


@dataclass(kw_only=True)
class MadeJob:
    """A job as its documents show it.

    Attributes:
        worker_ids: Its workers.
        elapsed_s: For how long it has trained.
        mode: `bsp`, `ssp` or `asp`.
        cause: The diagnosis, with its sentence and whom it is about.
        sentence: As `cause`.
        who: As `cause`.
        slow: Own time of a step of some workers, as a factor; they fall behind in `ssp`
            and `asp`.
        states: States of workers other than `member`.
        metrics: Names of what scripts log, beside the loss.
        loaders: Names of leased loaders.
        checkpoints: Whether it makes any.
        events: What has happened: seconds after the begin, kind, text, and more.
    """

    worker_ids: list[str]
    elapsed_s: float = 754.0
    mode: str = "bsp"
    cause: str = "training"
    sentence: str = ""
    who: list[str] = field(default_factory=list)
    slow: Mapping[str, float] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    metrics: tuple[str, ...] = ("accuracy",)
    loaders: tuple[str, ...] = ("train",)
    checkpoints: bool = True
    job_id: str = "digits-7c1e"
    shard_count: int = 2
    events: list[tuple[float, str, str, Document]] = field(default_factory=list)

    @property
    def clock(self) -> int:
        """Clocks that all members have completed."""
        return int(self.elapsed_s * 14.2)

    def status(self) -> Document:
        workers = [
            self._worker(rank, name) for rank, name in enumerate(self.worker_ids)
        ]
        slowest = min(
            (w["clock"] for w in workers if w["clock"] is not None), default=0
        )
        fastest = max(
            (w["clock"] for w in workers if w["clock"] is not None), default=0
        )
        for worker in workers:
            if worker["clock"] is not None:
                worker["lead"] = worker["clock"] - slowest
                worker["lag"] = fastest - worker["clock"]
        steps_per_s = sum(w["steps_per_s"] or 0.0 for w in workers)
        return {
            "schema_version": 2,
            "coordinator": "10.0.0.4:7070",
            "admin_url": None,
            "diagnosis": {
                "cause": self.cause,
                "sentence": self.sentence
                or f"{len(workers)} workers train at {steps_per_s:.0f} steps/s.",
                "who": self.who,
            },
            "job": self._settings(len(workers)),
            "phase": "running",
            "mode": self.mode,
            "staleness_bound": {"bsp": 0, "ssp": 3, "asp": None}[self.mode],
            "mode_clock": 0,
            "generation": 3,
            "workers_floor": 1,
            "evicted_count": 0,
            "elapsed_s": self.elapsed_s,
            "steps_per_s": steps_per_s,
            "samples_per_s": steps_per_s * 32,
            "metrics": self._metrics(self.elapsed_s),
            "waiting_for": None,
            "failure": None,
            "clip_grad_norm": None,
            "compression": None,
            "snapshot_version": None,
            "tensor_count": 62,
            "parameter_bytes": 102 * MIB,
            "workers": workers,
            "shards": [self._shard(index) for index in range(self.shard_count)],
            "splits": [],
            "epochs": [self._epoch(loader) for loader in self.loaders],
            "checkpoints": self._checkpoints() if self.checkpoints else None,
            "privacy": None,
        }

    def history(self) -> Document:
        interval_s = max(1.0, self.elapsed_s / 500)
        times = [n * interval_s for n in range(1, int(self.elapsed_s / interval_s) + 1)]
        rate = self.status()["steps_per_s"]
        return {
            "schema_version": 2,
            "interval_s": interval_s,
            "points": [
                {
                    "at_unix_s": BEGAN_AT_UNIX_S + at_s,
                    "clock": int(at_s * 14.2),
                    "steps_per_s": rate * _wobble(at_s),
                    "samples_per_s": 32 * rate * _wobble(at_s),
                    "metrics": self._metrics(at_s),
                }
                for at_s in times
            ],
        }

    def events_after(self, number: int) -> Document:
        events = [
            {
                "number": index,
                "at_unix_s": BEGAN_AT_UNIX_S + at_s,
                "kind": kind,
                "text": text,
                "worker_id": None,
                "shard_index": None,
                "clock": int(at_s * 14.2) or None,
                **more,
            }
            for index, (at_s, kind, text, more) in enumerate(self.events, 1)
        ]
        return {
            "schema_version": 2,
            "events": [event for event in events if event["number"] > number],
        }

    def _settings(self, worker_count: int) -> Document:
        return {
            "job_id": self.job_id,
            "shard_count": self.shard_count,
            "workers_min": min(4, worker_count),
            "lease_ttl_ms": 10_000,
            "worker_loss_policy": "continue",
            "step_atomicity": "chunk",
            "backup_worker_count": 0,
            "staleness_scaling": False,
            "delay_compensation": 0.0,
            "chunk_bytes": None,
            "aggregation": "mean",
            "gradient_norm_max": None,
            "bad_gradient_policy": "skip",
        }

    def _checkpoints(self) -> Document:
        clock = self.clock - self.clock % 500
        return {
            "url": "s3://models/digits",
            "interval": "500steps",
            "newest": {
                "url": "s3://models/digits",
                "name": f"v{clock:012d}",
                "version": 4 * clock,
                "clock": clock,
                "byte_count": 307 * MIB,
                "age_ms": int(self.clock % 500 / 14.2 * 1000),
            },
            "failure": None,
        }

    def _metrics(self, at_s: float) -> Document:
        loss = (
            0.18 + 2.1 * math.exp(-at_s / 160) * _wobble(at_s) + 0.01 * math.sin(at_s)
        )
        return {
            "loss": loss,
            **dict.fromkeys(self.metrics, 1 - loss / 3),
        }

    def _worker(self, rank: int, name: str) -> Document:
        state = self.states.get(name, "member")
        is_member = state in ("member", "suspect", "lost", "leaving")
        factor = self.slow.get(name, 1 + 0.04 * math.sin(rank * 7.3))
        behind = 0
        if self.mode != "bsp":
            behind = max(
                0, int((factor - 1) * 6 + 0.5 * math.sin(rank + self.elapsed_s))
            )
            behind = min(behind, 4) if self.mode == "ssp" else behind
        compute_ms = 34.0 * factor
        return {
            "worker_id": name,
            "incarnation": 1,
            "rank": rank if is_member else None,
            "state": state,
            "clock": self.clock + 4 - behind if is_member else None,
            "lead": None,
            "lag": None,
            "silent_ms": 0 if state != "lost" else 12_400,
            "step_ms": 22 if is_member else None,
            "address": f"10.0.1.{rank % 250}:51{rank:03d}",
            "shared_memory_shard_count": 0,
            "brought_other": [],
            "unreached_shards": [],
            "bad_gradient_count": 0,
            "clipped_gradient_count": 0,
            "left_out_gradient_count": 0,
            "step_count": self.clock if is_member else None,
            "sample_count": self.clock * 32 if is_member else None,
            "loss": self._metrics(self.elapsed_s)["loss"] * (1 + 0.03 * math.sin(rank)),
            "metrics": {},
            "steps_per_s": 14.2 if is_member else None,
            "samples_per_s": 14.2 * 32 if is_member else None,
            "compute_ms": compute_ms if is_member else None,
            "data_wait_ms": 2.1 if is_member else None,
            "send_ms": 7.4 if is_member else None,
            "answer_wait_ms": max(3.0, 70.4 - compute_ms - 9.5) if is_member else None,
            "peer_wait_ms": 3.0 if is_member else None,
            "activity": "computing" if is_member else None,
            "activity_ms": 12 if is_member else None,
            "sent_bytes": self.clock * 102 * MIB if is_member else None,
            "received_bytes": self.clock * 102 * MIB if is_member else None,
            "encodings": [],
            "resident_bytes": (860 + rank % 7 * 11) * MIB if is_member else None,
        }

    def _shard(self, index: int) -> Document:
        awaited = [
            {"name": name, "clock": self.clock, "silent_ms": 6200, "lost_ms": 0}
            for name in self.who
            if self.cause in ("straggler", "worker_lost")
        ]
        return {
            "shard_index": index,
            "incarnation": 1,
            "state": "ready",
            "address": f"10.0.0.{5 + index}:7071",
            "silent_ms": 0,
            "parameter_bytes": 51 * MIB,
            "optimizer_bytes": 102 * MIB,
            "clock": self.clock,
            "frontier": self.clock,
            "version": self.clock * len(self.worker_ids),
            "queued_push_count": (index + int(self.elapsed_s)) % 3,
            "torn_step_count": 0,
            "staleness_counts": [],
            "waiting": {
                "clock": self.clock + 1,
                "waited_ms": 6200,
                "reason": "pushes",
                "awaited": awaited,
            }
            if awaited
            else None,
            "resident_bytes": (392 + 14 * index) * MIB,
            "apply_ms": 3.4 + 0.2 * index,
            "received_bytes": self.clock * 51 * MIB * len(self.worker_ids),
            "sent_bytes": self.clock * 51 * MIB * len(self.worker_ids),
            "duplicate_count": 0,
            "chunk_count": 26,
        }

    def _epoch(self, loader: str) -> Document:
        total = 60_000
        seen = min(total, self.clock * 32 % total)
        return {
            "loader": loader,
            "epoch": self.clock * 32 // total,
            "over": False,
            "position_count": total,
            "seen_once_count": seen,
            "seen_again_count": 0,
            "torn_count": 0,
            "dropped_count": 0,
            "skipped_count": 64 if seen > 64 else 0,
            "never_count": total - seen - (64 if seen > 64 else 0),
            "left_out_count": 0,
        }


def _wobble(at_s: float) -> float:
    """About 1, never the same for long."""
    return 1 + 0.03 * math.sin(at_s / 3) + 0.02 * math.sin(at_s / 0.7)
