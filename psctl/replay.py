"""`psctl replay`: what a job has recorded, applied again; for people and programs."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from psctl.failures import CommandError
from psctl.progress import working
from psctl.snapshots import save_snapshot
from psctl.tables import aligned, count_text, fitted
from psserver.shard.host.recording import RecordingError
from psserver.shard.host.replaying import (
    ReplayedPush,
    ShardReplay,
    Until,
    UpdateKey,
    newest_recordings,
)
from pswire.exit_codes import ExitCode
from pswire.names import printable
from pswire.torch_types import TORCH_DTYPES, buffer_of
from psworker.snapshots.snapshot import Snapshot, states_of

if TYPE_CHECKING:
    from psserver.shard.core.push import PushId

SCHEMA_VERSION: Final = 1
"""Of the JSON. `docs/replay.md` describes it."""

_WORKERS_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class JobUpdate:
    """An update of the whole model, from all shards that were replayed.

    Attributes:
        pushes: Whose gradients it has; one in SSP and ASP.
        clock: Its clock.
        norm: L2 norm of the change of all values.
        nonfinite: Tensors that are not finite after it, and were before.
    """

    pushes: tuple["PushId", ...]
    clock: int
    norm: float
    nonfinite: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "clock": self.clock,
            "pushes": [_push_json(push) for push in self.pushes],
            "norm": _number(self.norm),
            "nonfinite": list(self.nonfinite),
        }

    def to_text(self) -> str:
        pushes = [f"push {push.sequence} of {push.worker}" for push in self.pushes]
        more = len(pushes) - _WORKERS_NAMED
        named = ", ".join(pushes[:_WORKERS_NAMED]) + (f" and {more} more" * (more > 0))
        return f"clock {self.clock}: {named}"


@dataclass(frozen=True)
class ReplayReport:
    """What replaying the recordings of a job has shown.

    Attributes:
        shards: By index.
        norm_max: Norm of an update that is looked for; None for none.
        shows_pushes: Whether each push is listed.
    """

    shards: Sequence[ShardReplay]
    norm_max: float | None = None
    shows_pushes: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether the recordings are whole, and the values those that shards had."""
        return not any(each.damage or each.difference for each in self.shards)

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.DONE if self.is_sound else ExitCode.ERROR

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """Shards of the job that no recording is of."""
        known = {each.shard_index for each in self.shards}
        count = self.shards[0].settings.shard_count
        return tuple(index for index in range(count) if index not in known)

    @cached_property
    def updates(self) -> Mapping[UpdateKey, JobUpdate]:
        """In the order in which the first shard began them."""
        found: dict[UpdateKey, JobUpdate] = {}
        for key in OrderedDict.fromkeys(k for s in self.shards for k in s.updates):
            parts = [s.updates[key] for s in self.shards if key in s.updates]
            pushes = OrderedDict.fromkeys(push for p in parts for push in p.pushes)
            found[key] = JobUpdate(
                pushes=tuple(pushes),
                clock=parts[0].clock,
                norm=math.sqrt(sum(part.square for part in parts)),
                nonfinite=tuple(name for part in parts for name in part.nonfinite),
            )
        return found

    @property
    def first_nonfinite(self) -> JobUpdate | None:
        """The first update after which a value is not finite."""
        return next((each for each in self.updates.values() if each.nonfinite), None)

    @property
    def first_large(self) -> JobUpdate | None:
        """The first update whose norm is larger than the one that is looked for."""
        most = math.inf if self.norm_max is None else self.norm_max
        return next((u for u in self.updates.values() if not u.norm <= most), None)

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in schema order.

        Raises:
            CommandError: There is no recording of some shards.
        """
        if self.missing:
            raise CommandError(
                "the model is not whole: there is no recording of shard "
                f"{', '.join(map(str, self.missing))}; name those of all shards"
            )
        entries = self.shards[0].model.terms.schema.entries
        flat = [
            torch.empty(math.prod(each.shape), dtype=TORCH_DTYPES[each.element_type])
            for each in entries
        ]
        for shard in self.shards:
            for chunk in shard.model.chunks:
                sizes = [piece.element_count for piece in chunk.slices]
                parts = shard.values(chunk).split(sizes)
                for piece, part in zip(chunk.slices, parts, strict=True):
                    flat[piece.entry_index][piece.start : piece.stop] = part
        return [f.reshape(e.shape) for f, e in zip(flat, entries, strict=True)]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all values, by the names of their tensors; empty if some lack."""
        if self.missing:
            return ""
        found = hashlib.sha256()
        entries = self.shards[0].model.terms.schema.entries
        named = zip(entries, self.tensors, strict=True)
        for _, tensor in sorted(named, key=lambda each: (each[0].model, each[0].name)):
            found.update(buffer_of(tensor))
        return found.hexdigest()

    def save(self, out: Path, model: str | None) -> None:
        """Writes the values as a snapshot's file."""
        shards = self.shards
        terms = shards[0].model.terms
        snapshot = Snapshot(
            version=min(each.version for each in shards),
            clock=min(each.clock for each in shards),
            generation=0,
            job_id=shards[0].settings.job_id,
            byte_count=terms.byte_count,
            _states=states_of(terms.schema, self.tensors),
        )
        save_snapshot(snapshot, out, model)

    def to_json(self) -> dict[str, object]:
        found: dict[str, object] = {
            "schema_version": SCHEMA_VERSION,
            "job_id": self.shards[0].settings.job_id,
            "sha256": self.digest,
            "shards": [_shard_json(each) for each in self.shards],
            "missing_shards": list(self.missing),
            "first_nonfinite": _json_or_none(self.first_nonfinite),
            "first_over_norm": _json_or_none(self.first_large),
        }
        if self.shows_pushes:
            first, *_ = self.shards
            found["pushes"] = [
                self._row(number, push)
                for number, push in enumerate(first.pushes, start=1)
            ]
        return found

    def to_text(self) -> str:
        shards = self.shards
        table = aligned(
            ("SHARD", "START", "PUSHES", "UPDATES", "VERSION", "CLOCK", "SHA-256"),
            [
                (
                    each.shard_index,
                    each.incarnation,
                    each.push_count,
                    each.chunk_update_count,
                    each.version,
                    each.clock,
                    each.digest[:16],
                )
                for each in shards
            ],
        )
        ends = [f"shard {s.shard_index}: replayed {s.ending}" for s in shards]
        lines = [f"job {printable(shards[0].settings.job_id)}", "", table, "", *ends]
        if self.digest:
            lines.append(f"all values: SHA-256 {self.digest}")
        else:
            lines.append(f"no recording of shard {', '.join(map(str, self.missing))}")
        versions = {each.version for each in shards}
        if len(versions) > 1:
            lines.append(
                f"the shards end at different versions: --until {min(versions)} brings "
                "all of them to the same one"
            )
        return "\n".join([*lines, *self._findings(), *self._table()])

    def _findings(self) -> list[str]:
        lines = []
        for shard in self.shards:
            place = f"shard {shard.shard_index}"
            if shard.error:
                lines.append(f"{place} failed there: {printable(shard.error)}")
            if shard.damage:
                lines.append(printable(shard.damage))
            if shard.difference:
                lines.append(f"{place} has other bits: {printable(shard.difference)}")
        if found := self.first_nonfinite:
            names = ", ".join(map(printable, found.nonfinite))
            lines.append(f"first value that is not finite: {found.to_text()}; {names}")
        else:
            lines.append("all values stay finite")
        if self.norm_max is not None:
            found = self.first_large
            over = f"first update beyond norm {self.norm_max:g}: "
            said = f"{found.to_text()}, norm {found.norm:.4g}" if found else "none"
            lines.append(over + said)
        return lines

    def _table(self) -> list[str]:
        if not self.shows_pushes:
            return []
        first, *_ = self.shards
        pushes = enumerate(first.pushes, start=1)
        rows = [tuple(self._row(n, push).values()) for n, push in pushes]
        head = (
            *("NUMBER", "WORKER", "START", "PUSH", "CLOCK", "WEIGHT", "STALENESS"),
            *("GRADIENT", "UPDATE", "VERSION", "OUTCOME"),
        )
        shown = [tuple(map(_shown, row)) for row in rows]
        numbers = [name for name in head if name not in ("WORKER", "OUTCOME")]
        count = count_text(len(rows), "push", "pushes")
        title = f"{count}, as shard {first.shard_index} was done with them"
        least = ("START", "NUMBER", "VERSION")
        return ["", title, fitted(head, shown, least_useful=least, right=numbers)]

    def _row(self, number: int, push: ReplayedPush) -> dict[str, Any]:
        """A push, as programs get it; a table has its values in the same order."""
        update = None if push.update is None else self.updates[push.update]
        return {
            "number": number,
            **_push_json(push.push),
            "clock": push.clock,
            "weight": push.weight,
            "staleness": push.staleness,
            "gradient_norm": _number(push.gradient_norm),
            "update_norm": None if update is None else _number(update.norm),
            "version": push.version,
            "outcome": push.outcome or "not done",
        }


def replay(
    paths: Sequence[Path],
    *,
    until: Until,
    norm_max: float | None,
    shows_pushes: bool,
) -> ReplayReport:
    """Applies the recordings of one job, each from its beginning."""
    # As in a shard: torch's own threads add in another order.
    torch.set_num_threads(1)
    shards: list[ShardReplay] = []
    try:
        files = newest_recordings(paths)
        total = sum(path.stat().st_size for path in files)
        with working(f"replaying {count_text(len(files), 'shard')}", total) as work:
            for path in files:
                shard = ShardReplay(path)
                shard.run(until)
                shards.append(shard)
                work.advance(path.stat().st_size)
    except RecordingError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error
    shards.sort(key=lambda each: each.shard_index)
    jobs = {each.settings.job_id for each in shards}
    places = {each.shard_index for each in shards}
    if len(jobs) > 1 or len(places) < len(shards):
        raise CommandError(
            "these recordings are not of one run of a job: name one of each of its "
            "shards, or their folder",
            ExitCode.USAGE,
        )
    return ReplayReport(shards, norm_max, shows_pushes)


def _shard_json(shard: ShardReplay) -> dict[str, object]:
    return {
        "shard": shard.shard_index,
        "start": shard.incarnation,
        "path": str(shard.path),
        "push_count": shard.push_count,
        "update_count": shard.chunk_update_count,
        "version": shard.version,
        "clock": shard.clock,
        "sha256": shard.digest,
        "ending": shard.ending,
        "error": shard.error,
        "damage": shard.damage,
        "difference": shard.difference,
    }


def _push_json(push: "PushId") -> dict[str, object]:
    worker_id, incarnation = push.worker
    return {"worker": worker_id, "start": incarnation, "push": push.sequence}


def _json_or_none(update: JobUpdate | None) -> dict[str, object] | None:
    return None if update is None else update.to_json()


def _number(value: float | None) -> float | None:
    """JSON has no number that is not finite."""
    return value if value is not None and math.isfinite(value) else None


def _shown(value: object) -> object:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else value
