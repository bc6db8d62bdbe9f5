"""What makes a shard refuse a push before it changes anything."""

from collections.abc import Collection, Mapping

from psserver.edge.push import PushId, Trailer
from psserver.edge.record import Departure, Member, WorkerKey
from psserver.shard.core.clock_table import ClockTable
from pswire.reasons import ErrorReason, Refusal


def admitted_member(
    clocks: ClockTable, worker: WorkerKey, sequence: int | None = None
) -> Member:
    """The member that a call comes from.

    Args:
        clocks: Members.
        worker: Who calls.
        sequence: For a push, its number: one that ended may still ask for the
            answers to its pushes up to the last one.

    Raises:
        Refusal: `RECOVERING` or `WORKER_INCARNATION_STALE`.
    """
    if clocks.record is None:
        raise Refusal(
            ErrorReason.RECOVERING, "the shard has no record to work under yet"
        )
    member = clocks.member_of(worker)
    if member is not None:
        return member
    departure = clocks.departure_of(worker)
    if departure is not None and sequence is not None:
        if sequence <= departure.last_sequence:
            return departure.member
        raise closed_refusal(departure)
    raise Refusal(
        ErrorReason.WORKER_INCARNATION_STALE,
        f"{worker} is not a member of generation {clocks.record.generation}",
    )


def closed_refusal(departure: Departure) -> Refusal:
    """Why a push beyond a member's last one is refused."""
    return Refusal(
        ErrorReason.WORKER_INCARNATION_STALE,
        f"{departure.member.worker} was closed at push {departure.last_sequence}",
        sequence_closed=departure.last_sequence,
    )


def check_clock(member: Member, push: PushId, clock: int) -> None:
    """Checks the clock that a header names against the one it follows from.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    expected = member.clock_of(push.sequence)
    if clock != expected:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"push {push.sequence} of {push.worker} is of clock {expected}, the header "
            f"says {clock}",
        )


def check_phase(
    push: PushId,
    trailer: Trailer,
    others: Mapping[WorkerKey, Trailer],
    in_phase: Collection[WorkerKey],
) -> None:
    """Checks that all pushes of a clock that have weight are of one kind.

    They name one optimizer, and all are steps of it or all publish values. What a
    worker pushes at another place of its script is left out when the clock is applied.

    Args:
        push: Whose trailer it is.
        trailer: What has come.
        others: Trailers of the clock that are in.
        in_phase: Workers that are at the same place of the script as its own.

    Raises:
        Refusal: `OPTIMIZER_OUT_OF_PHASE`, with who pushed what.
    """
    if trailer.weight == 0:
        return
    for other, theirs in others.items():
        if theirs.weight > 0 and theirs.optimizer != trailer.optimizer:
            raise Refusal(
                ErrorReason.OPTIMIZER_OUT_OF_PHASE,
                f"{push.worker} pushed for optimizer {trailer.optimizer[:64]!r} in the "
                f"clock for which {other} pushed for {theirs.optimizer[:64]!r}",
            )
        is_other = theirs.publishes is not trailer.publishes
        if theirs.weight > 0 and is_other and other in in_phase:
            publisher, stepper = (
                (push.worker, other) if trailer.publishes else (other, push.worker)
            )
            raise Refusal(
                ErrorReason.OPTIMIZER_OUT_OF_PHASE,
                f"{publisher} publishes values in the clock in which {stepper} steps: "
                "all workers of a script publish at the same place",
            )
