"""Documents of jobs that nobody runs: what a page or a command is shown in tests.

All names are those of `tests/samples`, which `pswire.status_document` writes. Values
follow from the time that the job has trained, so that one document fits the next.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

Document = dict[str, Any]

SAMPLES: Final = Path(__file__).parents[1] / "samples"

MIB: Final = 1 << 20

CLOCKS_PER_S: Final = 14.2

EPOCH_SAMPLE_COUNT: Final = 60_000


@dataclass(kw_only=True)
class MadeJob:
    """A job as its documents show it. A test may change it between two of them.

    Attributes:
        worker_ids: Its workers.
        elapsed_s: For how long it has trained.
        began_at_unix_s: When it began.
        mode: `bsp`, `ssp`, `asp` or `quorum`.
        strategy: How workers take local steps; None where they take none.
        cause: The diagnosis.
        sentence: Its sentence.
        who: Whom it is about; shards wait for them when the cause is a straggler, in
            `bsp` and `ssp`.
        slow: Of some workers, how many times as long as the others they compute. They
            are behind in `ssp` and `asp`.
        link_ms: Of some workers, how long an answer is under way.
        states: States of workers other than `member`.
        metrics: Names of what scripts log, beside the loss.
        loaders: Names of leased loaders.
        job_id: Its id.
        shard_count: Its shards.
        events: What has happened: seconds after the begin, kind and text.
    """

    worker_ids: list[str]
    elapsed_s: float = 754.0
    began_at_unix_s: float = 1_800_000_000.0
    mode: str = "bsp"
    strategy: str | None = None
    cause: str = "training"
    sentence: str = "all workers train"
    who: list[str] = field(default_factory=list)
    slow: Mapping[str, float] = field(default_factory=dict)
    link_ms: Mapping[str, float] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    metrics: tuple[str, ...] = ("accuracy",)
    loaders: tuple[str, ...] = ("train",)
    job_id: str = "digits-7c1e"
    shard_count: int = 2
    events: list[tuple[float, str, str]] = field(default_factory=list)

    @property
    def clock(self) -> int:
        """Clocks that all members have completed."""
        return int(self.elapsed_s * CLOCKS_PER_S)

    @property
    def others_wait(self) -> bool:
        """Whether others wait for those that the diagnosis is about."""
        return self.cause == "straggler" and self.mode in ("bsp", "ssp")

    def status(self) -> Document:
        """As `/status` answers."""
        sample = sampled("status")
        workers = [self._worker(*ranked) for ranked in enumerate(self.worker_ids)]
        members = [worker for worker in workers if worker["clock"] is not None]
        clocks = [member["clock"] for member in members]
        for member in members:
            member["lead"] = member["clock"] - min(clocks)
            member["lag"] = max(clocks) - member["clock"]
        checkpoint_clock = self.clock - self.clock % 500
        return sample | {
            "job": sample["job"] | {"job_id": self.job_id, "workers_min": 1},
            "diagnosis": {
                "cause": self.cause,
                "sentence": self.sentence,
                "who": self.who,
                "others_wait": self.others_wait,
            },
            "mode": self.mode,
            "staleness_bound": {"ssp": 3, "asp": None}.get(self.mode, 0),
            "quorum": 3 if self.mode == "quorum" else None,
            "grace_window_s": 0.0 if self.mode == "quorum" else None,
            "strategy": self.strategy,
            "elapsed_s": self.elapsed_s,
            "steps_per_s": CLOCKS_PER_S * len(members),
            "samples_per_s": CLOCKS_PER_S * len(members) * 32,
            "metrics": self._metrics(self.elapsed_s),
            "waiting_for": None,
            "failure": None,
            "workers": workers,
            "shards": [self._shard(index) for index in range(self.shard_count)],
            "epochs": [self._epoch(loader) for loader in self.loaders],
            "checkpoints": {
                "url": "s3://models/digits",
                "interval": "500steps",
                "newest": sample["checkpoints"]["newest"]
                | {
                    "name": f"step-{4 * checkpoint_clock:012d}",
                    "clock": checkpoint_clock,
                    "byte_count": 307 * MIB,
                    "age_ms": int(self.clock % 500 / CLOCKS_PER_S * 1000),
                },
                "failure": None,
            },
            "privacy": None,
        }

    def history(self) -> Document:
        """As `/history` answers."""
        interval_s = max(1.0, self.elapsed_s / 500)
        times = [n * interval_s for n in range(1, int(self.elapsed_s / interval_s) + 1)]
        rate = CLOCKS_PER_S * len(self.worker_ids)
        return sampled("history") | {
            "interval_s": interval_s,
            "points": [
                {
                    "at_unix_s": self.began_at_unix_s + at_s,
                    "clock": int(at_s * CLOCKS_PER_S),
                    "steps_per_s": rate * _wobble(at_s),
                    "samples_per_s": 32 * rate * _wobble(at_s),
                    "metrics": self._metrics(at_s),
                }
                for at_s in times
            ],
        }

    def events_after(self, number: int) -> Document:
        """As `/events` answers."""
        sample = sampled("events")
        return sample | {
            "events": [
                sample["events"][0]
                | {
                    "number": index,
                    "at_unix_s": self.began_at_unix_s + at_s,
                    "kind": kind,
                    "text": text,
                    "clock": int(at_s * CLOCKS_PER_S) or None,
                }
                for index, (at_s, kind, text) in enumerate(self.events, 1)
                if index > number
            ]
        }

    def _metrics(self, at_s: float) -> Document:
        loss = 0.18 + 2.1 * math.exp(-at_s / 160) * _wobble(at_s)
        return {"loss": loss, **dict.fromkeys(self.metrics, 1 - loss / 3)}

    def _worker(self, rank: int, name: str) -> Document:
        state = self.states.get(name, "member")
        sample: Document = sampled("status")["workers"][0] | {
            "worker_id": name,
            "state": state,
            "address": f"10.0.1.{rank % 250}:51{rank:03d}",
        }
        if state in ("registered", "joining"):
            unknown = ("rank", "clock", "lead", "lag", "step_ms", "step_count", "loss")
            times = (each for each in sample if each.endswith(("_ms", "_per_s")))
            return sample | dict.fromkeys((*unknown, *times))
        factor = self.slow.get(name, 1 + 0.04 * math.sin(rank * 7.3))
        link_ms = self.link_ms.get(name, 6.0)
        others_ms = max(0.0, 63.9 - 24.0 * factor - link_ms)
        behind = 0
        if self.mode != "bsp":
            drift = (factor - 1) * 6 + 0.5 * math.sin(rank + self.elapsed_s)
            behind = max(0, min(int(drift), 4 if self.mode == "ssp" else 40))
        return sample | {
            "rank": rank,
            "clock": self.clock + 4 - behind,
            "silent_ms": 12_400 if state == "lost" else 0,
            "step_ms": 22,
            "step_count": self.clock,
            "sample_count": self.clock * 32,
            "loss": self._metrics(self.elapsed_s)["loss"] * (1 + 0.03 * math.sin(rank)),
            "steps_per_s": CLOCKS_PER_S,
            "samples_per_s": CLOCKS_PER_S * 32,
            "compute_ms": 24.0 * factor,
            "data_wait_ms": 2.1,
            "send_ms": 7.4,
            "answer_wait_ms": link_ms + others_ms,
            "peer_wait_ms": others_ms,
            "sent_bytes": self.clock * 3 * MIB,
            "received_bytes": self.clock * 3 * MIB,
            "resident_bytes": (860 + rank % 7 * 11) * MIB,
            "round_step_count": None,
            "steps_since_push": None,
            "fragment_under_way": None,
        }

    def _shard(self, index: int) -> Document:
        sample: Document = sampled("status")["shards"][0]
        awaited = sample["waiting"]["awaited"][0]
        waiting = sample["waiting"] | {
            "clock": self.clock + 1,
            "waited_ms": 6200,
            "awaited": [awaited | {"name": name} for name in self.who],
        }
        return sample | {
            "shard_index": index,
            "address": f"10.0.0.{5 + index}:7071",
            "clock": self.clock,
            "frontier": self.clock,
            "queued_push_count": (index + int(self.elapsed_s)) % 3,
            "staleness_counts": [] if self.mode == "bsp" else [900, 2400, 1300, 30],
            "waiting": waiting if self.others_wait else None,
            "parameter_bytes": 51 * MIB,
            "optimizer_bytes": 102 * MIB,
            "resident_bytes": (392 + 14 * index) * MIB,
            "apply_ms": 3.4 + 0.2 * index,
            "received_bytes": self.clock * 2 * MIB * len(self.worker_ids),
            "sent_bytes": self.clock * 2 * MIB * len(self.worker_ids),
        }

    def _epoch(self, loader: str) -> Document:
        sample = sampled("status")["epochs"][0]
        counts = {each: 0 for each in sample if each.endswith("_count")}
        epoch, seen = divmod(self.clock * 32 * 4, EPOCH_SAMPLE_COUNT)
        return {
            **sample,
            **counts,
            "loader": loader,
            "epoch": epoch,
            "position_count": EPOCH_SAMPLE_COUNT,
            "seen_once_count": seen,
            "never_count": EPOCH_SAMPLE_COUNT - seen,
            "held_count": min(EPOCH_SAMPLE_COUNT - seen, 64 * len(self.worker_ids)),
        }


@cache
def sampled(name: str) -> Document:
    """A sample, of which callers change copies."""
    document: Document = json.loads((SAMPLES / f"{name}.json").read_text())
    return document


def _wobble(at_s: float) -> float:
    """About 1, never the same for long."""
    return 1 + 0.03 * math.sin(at_s / 3) + 0.02 * math.sin(at_s / 0.7)
