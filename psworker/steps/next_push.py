"""The push that a worker makes next: its identity, and how it is delivered."""

from psworker.member.exchange import Delivery, PushExchange
from psworker.member.jump import member_in
from psworker.member.session import Session
from psworker.optim.steps import Groups, PushExtras
from psworker.transport.values import PushHeader, PushTrailer


def next_header(session: Session, optimizer: str, sequence: int) -> PushHeader:
    """The header of a push, of the clock that the newest record says.

    Args:
        session: The worker.
        optimizer: Name of the optimizer.
        sequence: Number of the push.

    Raises:
        EvictedError: The newest record has no place for this worker.
    """
    record = session.membership.record
    member = member_in(record, session.worker)
    assert record is not None, "only a record has members"
    return PushHeader(
        job_id=session.settings.job_id,
        optimizer=optimizer,
        worker=session.worker,
        generation=record.generation,
        sequence=sequence,
        sequence_unacknowledged_min=sequence,
        clock=member.clock_of(sequence),
    )


def empty_trailer(session: Session, groups: Groups, extras: PushExtras) -> PushTrailer:
    """The trailer of a push of weight 0, without a gradient and without data.

    Args:
        session: The worker.
        groups: Current hyperparameters of the optimizer.
        extras: What the optimizer sends beside a gradient.
    """
    record = session.membership.record
    return PushTrailer(
        weight=0.0,
        groups=groups,
        is_finite=True,
        ranges=(),
        optimizer_digest=extras.spec_digest,
        loads_state=extras.loads is not None,
        is_of_longest=record is not None and record.has_longest(session.worker),
        scheduler_steps=extras.scheduler_steps,
    )


def incarnations_of_shards(session: Session) -> list[int]:
    """The start of each shard that the newest shard map names."""
    return [shard.incarnation for shard in session.membership.shards]


def delivery_of(session: Session, exchange: PushExchange, timeout_s: float) -> Delivery:
    """What brings a push to all shards, and their answers back.

    The first attempt goes on with what was sent ahead.
    """
    return lambda receiver: session.shards.push(
        exchange.pushes,
        receiver,
        timeout_s=timeout_s,
        ahead=exchange.take_ahead(),
        asks_first=exchange.asks_first,
    )
