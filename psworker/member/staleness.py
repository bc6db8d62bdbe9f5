"""Whether values are as fresh as the mode promises: checked on every answer.

The shards see to it; this worker does not take their word for it.
"""

from pswire.membership import Mode, Record
from pswire.outcome import Outcome
from psworker.errors import StalenessError
from psworker.transport.values import PushReply

_BUG = (
    "this should be impossible: either it is a bug, please report it with the logs of "
    "all processes, or a proxy mixes the connections of several jobs"
)


def check_bound(shard_index: int, reply: PushReply, record: Record | None) -> None:
    """Checks one shard's answer to a push or pull.

    Args:
        shard_index: Whose answer.
        reply: The answer.
        record: Newest record known here.

    Raises:
        StalenessError: The values may be older than the mode allows, or were given
            under another mode than the record's.
    """
    if reply.outcome is Outcome.DROPPED:
        return  # what comes next is a pull, whose answer is checked
    if record is not None and record.generation == reply.generation:
        _check_rule(shard_index, reply, record)
    bound = reply.mode.rules.lag_max(reply.staleness_bound)
    if bound is not None and reply.clock - reply.frontier > bound:
        raise StalenessError(
            f"shard {shard_index} gave values for clock {reply.clock} at frontier "
            f"{reply.frontier}, and in {_rule(reply.mode, bound)} the frontier must be "
            f"at least {reply.clock - bound}; {_BUG}",
            facts=_facts(shard_index, reply),
        )


def _check_rule(shard_index: int, reply: PushReply, record: Record) -> None:
    """Up to the clock of a change, the mode before rules."""
    is_other = reply.mode is not record.mode or (
        reply.mode.rules.takes_bound and reply.staleness_bound != record.staleness_bound
    )
    if is_other and reply.clock > record.mode_clock:
        raise StalenessError(
            f"shard {shard_index} gave values for clock {reply.clock} at frontier "
            f"{reply.frontier} in {_rule(reply.mode, reply.staleness_bound)}, but "
            f"generation {record.generation} trains in "
            f"{_rule(record.mode, record.staleness_bound)}; {_BUG}",
            facts=_facts(shard_index, reply),
        )


def _rule(mode: Mode, bound: int) -> str:
    if not mode.rules.takes_bound:
        return mode.label
    return f"{mode.label} with staleness bound {bound}"


def _facts(shard_index: int, reply: PushReply) -> dict[str, str]:
    return {
        "shard_index": str(shard_index),
        "clock": str(reply.clock),
        "frontier": str(reply.frontier),
        "mode": reply.mode.label,
        "staleness_bound": str(reply.staleness_bound),
    }
