"""A record as a line of a history has it, the same on the coordinator and on shards."""

from pswire.membership import Record


def record_values(record: Record) -> dict[str, object]:
    return {
        "generation": record.generation,
        "fence": record.fence_number,
        "kind": record.kind.label,
        "members": [
            [*member.worker, member.base_clock, member.base_sequence]
            for member in record.members
        ],
        "departures": [
            [*end.member.worker, end.last_sequence, end.evicted]
            for end in record.departures
        ],
        "mode": record.mode.label,
        "bound": record.staleness_bound,
        "quorum": record.quorum,
        "grace_window_ms": record.grace_window_ms,
        "mode_clock": record.mode_clock,
        "terms_clock": record.terms_clock,
        "skipped": list(record.skipped_clocks),
    }
