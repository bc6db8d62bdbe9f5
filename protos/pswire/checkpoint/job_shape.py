"""What the coordinator's own state is like in a manifest.

`psserver.coordinator.storage.saved_job` writes and reads it. It is checked here, so
that whoever looks at a checkpoint finds out that it is none to go on from.
"""

from collections.abc import Mapping
from typing import Any, Final

from pswire.checkpoint.errors import DamagedError
from pswire.checkpoint.json_shape import (
    fields,
    flag,
    names_of,
    number,
    one_of,
    optional,
    real,
    row,
    rows,
    text,
)
from pswire.leased_data import DataRange, EpochShape, RecordedSplit
from pswire.limits import NUMBER_MAX
from pswire.membership import FenceKind, Mode

_COUNT: Final = number()
_SIGNED: Final = number(-NUMBER_MAX - 1)
_WORKER: Final = row(text, _COUNT)
_RANGE: Final = row(text, _COUNT, _COUNT, _COUNT)
_RANGES_OF: Final = rows(row(_WORKER, rows(_RANGE)))
_RUNS: Final = rows(row(_COUNT, _COUNT))
_MEMBER: Final = fields(
    {
        "worker": _WORKER,
        "rank": _COUNT,
        "base_clock": _SIGNED,
        "base_sequence": _COUNT,
    }
)
_RECORD: Final = fields(
    {
        "fence_number": _COUNT,
        "generation": _COUNT,
        "kind": one_of(tuple(FenceKind)),
        "members": rows(_MEMBER),
        "departures": rows(
            fields({"member": _MEMBER, "last_clock": _SIGNED, "evicted": flag})
        ),
        "departed_step_count": _COUNT,
        "skipped_clocks": rows(_COUNT),
        "mixed_clocks": rows(row(_COUNT, flag)),
        "mode": one_of(tuple(Mode)),
        "staleness_bound": _COUNT,
        "mode_clock": _COUNT,
        "workers_floor": _COUNT,
        "commit": optional(row(_COUNT, rows(_WORKER), real, real)),
        "finished_step_count": _SIGNED,
        "quorum": _COUNT,
        "grace_window_ms": _COUNT,
        "terms_clock": _COUNT,
    },
    added=("quorum", "grace_window_ms", "terms_clock"),
)
_EPOCH: Final = fields(
    {
        "shape": fields(
            {"position_count": _COUNT, "batch_size": number(1), "drop_last": flag}
        ),
        "origin": text,
        "order_digest": optional(number(0, (1 << 64) - 1)),
        "registrant": optional(_WORKER),
        "cursor": _COUNT,
        "returned": rows(_RANGE),
        "queues": _RANGES_OF,
        "held": _RANGES_OF,
        "consumed_count": _COUNT,
        "torn_count": _COUNT,
        "dropped_count": _COUNT,
        "skipped": rows(row(_WORKER, _RUNS)),
        "settled_skipped_count": _COUNT,
        "revoked": _RANGES_OF,
        "repeated_count": _COUNT,
        "taken_back": _RUNS,
        "repetition_max": _COUNT,
    },
    added=["taken_back", "repetition_max"],
)
_JOB: Final = fields(
    {
        "seed": _COUNT,
        "participation_count_before": _COUNT,
        "record": _RECORD,
        "sequences": rows(row(text, _COUNT, _COUNT)),
        "incarnations": names_of(_COUNT),
        "epochs": rows(row(text, _COUNT, _EPOCH)),
        "splits": rows(
            fields(
                {
                    **dict.fromkeys(RecordedSplit.__dataclass_fields__, text),
                    "item_count": _COUNT,
                }
            )
        ),
    },
    added=["participation_count_before"],
)


def check_job(job: Mapping[str, Any]) -> None:
    """Checks the state of a job in a manifest.

    Raises:
        DamagedError: No release writes it so; the text names the field.
    """
    _JOB(job, "manifest.job")
    seen = set()
    for index, (loader, epoch, ledger) in enumerate(job["epochs"]):
        place = f"its field manifest.job.epochs[{index}]"
        if (loader, epoch) in seen:
            raise DamagedError(f"{place} is of an epoch that is there before")
        seen.add((loader, epoch))
        usable_count = EpochShape(**ledger["shape"]).usable_count
        if ledger["cursor"] > usable_count:
            raise DamagedError(
                f"{place} is dealt up to position {ledger['cursor']}, of {usable_count}"
            )
        for each in _ranges(ledger):
            is_within = 0 <= each.start < each.stop <= ledger["cursor"]
            if each[:2] != (loader, epoch) or not is_within:
                raise DamagedError(
                    f"{place} has {list(each)!a}, which is not within the "
                    f"{ledger['cursor']} positions that are dealt of it"
                )


def _ranges(ledger: Mapping[str, Any]) -> list[DataRange]:
    found = [*ledger["returned"]]
    for name in ("queues", "held", "revoked"):
        found += [each for _, pieces in ledger[name] for each in pieces]
    return [DataRange(*each) for each in found]
