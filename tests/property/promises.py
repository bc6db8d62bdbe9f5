"""What must hold after every schedule, told from values that count pushes.

Each check compares what cores did with what workers made and were told; none asks a
core whether it is right.
"""

import math

from psserver.coordinator.core.fence import NUMBERS_PER_START
from psserver.shard.core.push import PushId
from pswire.clipping import gradient_scale
from pswire.leased_data import DataRange
from pswire.membership import Departure, Mode, Outcome, WorkerKey
from tests.doubles.driven_worker import OwnPush
from tests.doubles.simulated_coordinator import Snapshot
from tests.doubles.world import World


def closed_steps(world: World) -> dict[WorkerKey, int]:
    """Of each worker, how many of its pushes count."""
    return {
        end.member.worker: end.last_sequence
        for record in world.coordinator.records
        for end in record.departures
    }


def version_before(world: World) -> int:
    """Steps in the checkpoint that the job goes on from."""
    return world.before.point.version if world.before is not None else 0


def outcome_of(world: World, push: PushId) -> Outcome:
    """All shards say the same of a push that counts."""
    outcomes = {shard.outcomes[push] for shard in world.shards}
    assert len(outcomes) == 1, f"shards differ in what became of {push}: {outcomes}"
    return outcomes.pop()


def counts_of(world: World, own: OwnPush) -> dict[tuple[int, int], int]:
    """How often a push is in each place where its gradient belongs."""
    return {
        (shard_index, chunk_index): world.shards[shard_index].values[chunk_index][
            own.push
        ]
        for shard_index, chunk_index in own.places
    }


def check_exactly_once(world: World) -> None:
    """G1: each push that counts is in every place exactly once, or was thrown away.

    Of others, at most the one that a lost worker was in the middle of is anywhere, and
    nothing of it with two-phase steps (G3).
    """
    closed = closed_steps(world)
    is_two_phase = world.is_two_phase
    for worker in world.workers.values():
        last = closed.get(worker.key, 0)
        assert worker.sequence <= last, f"{worker.key} was told more than counts"
        for own in worker.pushes.values():
            counts = set(counts_of(world, own).values())
            if own.push.sequence <= last:
                is_in = outcome_of(world, own.push) is Outcome.APPLIED
                assert counts <= {int(is_in)}, f"{own.push} is in values {counts} times"
            elif counts - {0}:
                assert counts <= {0, 1}
                assert not is_two_phase, f"{own.push} is torn"
                assert worker.key in world.lost
                assert own.push.sequence == last + 1


def check_torn_counts(world: World) -> None:
    """G3: each shard counts steps of which it applied a part that does not count."""
    closed = closed_steps(world)
    for shard in world.shards:
        torn = [
            own
            for worker in world.workers.values()
            for own in worker.pushes.values()
            if own.push.sequence > closed.get(worker.key, 0)
            and any(
                count
                for (shard_index, _), count in counts_of(world, own).items()
                if shard_index == shard.index
            )
        ]
        assert shard.core.state.torn_step_count == len(torn)


def check_acknowledgements(world: World) -> None:
    """What a worker was told is what happened."""
    for worker in world.workers.values():
        for own in worker.acknowledged:
            if own.outcome:
                assert worker.outcome_of(own) is outcome_of(world, own.push), (
                    f"{worker.key} was told that {own.push} is {own.outcome}"
                )


def check_order(world: World) -> None:
    """G4: pushes of a worker are done in order; nothing told ever goes back."""
    for shard in world.shards:
        for sequences in shard.order.values():
            assert sequences == sorted(set(sequences))
        versions = [version for version, _ in shard.answers]
        frontiers = [frontier for _, frontier in shard.answers]
        assert versions == sorted(versions), "a version went back"
        assert frontiers == sorted(frontiers), "a frontier went back"


def check_divisors(world: World) -> None:
    """All shards divide the update of a clock by the same weight.

    But for the clock after the last one of a worker that was lost: some shards may have
    applied it with that worker. With two-phase steps none has.
    """
    is_two_phase = world.is_two_phase
    torn = {
        end.last_clock + 1
        for record in world.coordinator.records
        for end in record.departures
        if end.member.worker in world.lost and not is_two_phase
    }
    weights: dict[int, set[float]] = {}
    for shard in world.shards:
        for clock, found in shard.weights.items():
            weights.setdefault(clock, set()).update(found)
    for clock, found in weights.items():
        assert len(found) == 1 or clock in torn, f"clock {clock} was divided by {found}"


def check_scales(world: World) -> None:
    """All shards multiply a clock by what follows from the norms of all of them."""
    scales: dict[tuple[int, tuple[WorkerKey, ...]], set[float]] = {}
    for shard in world.shards:
        for consists, found in shard.scales.items():
            scales.setdefault(consists, set()).update(found)
    for consists, found in scales.items():
        expected = 1.0
        if world.clip_grad_norm and not world.update.measures_each:
            total = math.fsum(shard.sums[consists] for shard in world.shards)
            expected = gradient_scale(math.sqrt(total), world.clip_grad_norm)
        if world.clip_grad_norm and world.update.measures_each:
            expected = next(iter(found))
        assert found == {expected}, f"clock {consists[0]} was scaled by {found}"


def check_norms(world: World) -> None:
    """All shards tell a worker the same norm of a push that was applied."""
    for worker in world.workers.values():
        for own in worker.acknowledged:
            norms = {reply.grad_norm for reply in own.answers.values()}
            is_in = own.answers and worker.outcome_of(own) is Outcome.APPLIED
            assert len(norms) <= 1, f"shards differ in the norm of {own.push}: {norms}"
            if is_in and world.clip_grad_norm and world.is_bsp:
                assert norms != {None}, f"nobody tells the norm of {own.push}"


def check_snapshots(world: World) -> None:
    """G5: every image is exactly the pushes up to its cut, on every shard."""
    saved = [each.snapshot for each in world.coordinator.saved]
    for snapshot in (*world.coordinator.snapshots, *saved):
        contents = _contents(world, snapshot)
        assert snapshot.version == version_before(world) + sum(contents.values())
        for worker in world.workers.values():
            last = contents.get(worker.key, 0)
            for own in worker.pushes.values():
                is_in = own.push.sequence <= last
                if not is_in and own.push.sequence > closed_steps(world)[worker.key]:
                    continue  # torn: it may be anywhere
                for (shard_index, chunk_index), count in counts_of(world, own).items():
                    image = snapshot.images[shard_index].values[chunk_index]
                    assert image[own.push] == (count if is_in else 0)


def check_saved_data(world: World) -> None:
    """A batch is used in a checkpoint exactly if its push is in the values.

    Of a push that was dropped it may be either, as far as that was reported; of one
    that was applied in part it is used.
    """
    for saved in world.coordinator.saved:
        contents = _contents(world, saved.snapshot)
        used = set(world.before.used if world.before is not None else ())
        either: set[DataRange] = set()
        for worker in world.workers.values():
            last = contents.get(worker.key, 0)
            for own in worker.pushes.values():
                ranges = own.trailer.ranges
                is_in = own.push.sequence <= last
                if is_in and outcome_of(world, own.push) is not Outcome.DROPPED:
                    used.update(ranges)
                elif is_in or any(counts_of(world, own).values()):
                    either.update(ranges)
        for epoch in saved.epochs:
            dealt = (*epoch.held.values(), *epoch.queues.values(), epoch.returned)
            left = [piece for pieces in dealt for piece in pieces]
            assert len(left) == len(set(left)), "a batch was dealt twice"
            begun = {
                DataRange(epoch.loader, epoch.epoch, start, start + 1)
                for start in range(epoch.cursor)
            }
            assert used <= begun
            assert not used & set(left), "a batch whose push is in would be used again"
            assert begun - used - either <= set(left), "a batch would never be used"


def check_saved_batches(world: World) -> None:
    """No checkpoint is cut between two steps on one batch.

    But for a worker that was lost then, and may be gone for good.
    """
    for saved in world.coordinator.saved:
        for key, last in saved.snapshot.cut.sequences:
            next_push = world.workers[key].pushes.get(last + 1)
            is_within = next_push is not None and next_push.trailer.continues_batch
            assert not is_within or key in saved.lost, f"{next_push} is missing"


def check_end(world: World) -> None:
    """The last snapshot holds everything, and no image is left that nobody reads.

    But for what is torn, which no version counts: it may have come after the snapshot
    that is still the newest.
    """
    last = world.coordinator.snapshots[-1]
    closed = closed_steps(world)
    for shard, image in zip(world.shards, last.images, strict=True):
        for index, counts in shard.values.items():
            for push, count in counts.items():
                if push.sequence <= closed.get(push.worker, 0):
                    assert image.values[index][push] == count
    steps = sum(closed_steps(world).values())
    assert last.version == version_before(world) + steps
    newest = world.coordinator.core.snapshots.newest
    assert newest is not None
    for shard in world.shards:
        first_id = newest.snapshot_id // NUMBERS_PER_START * NUMBERS_PER_START
        kept = [number for number in shard.images if number > first_id]
        assert kept == [newest.snapshot_id]
        assert not shard.threads


def check_resumed(world: World) -> None:
    """What was before the start is in the values as the checkpoint has it.

    No push of a process that was killed is applied, or known to be anybody's.
    """
    if world.before is None:
        return
    point, ghosts = world.before.point, world.before.ghosts
    assert not world.workers.keys() & ghosts.keys(), "a start was numbered again"
    first = world.coordinator.records[0]
    assert (first.mode, first.staleness_bound) == (point.mode, point.staleness_bound)
    assert first.generation > point.generation
    for shard in world.shards:
        for index, counts in shard.values.items():
            old = {p: n for p, n in counts.items() if p.worker in ghosts and n}
            assert old == world.before.values_of(index)
        for version, frontier in shard.answers:
            assert version >= point.version, "a version went back before the checkpoint"
            assert frontier >= point.clock


PROMISES = (
    check_resumed,
    check_exactly_once,
    check_torn_counts,
    check_acknowledgements,
    check_order,
    check_divisors,
    check_scales,
    check_norms,
    check_snapshots,
    check_saved_data,
    check_saved_batches,
    check_end,
)


def _contents(world: World, snapshot: Snapshot) -> dict[WorkerKey, int]:
    """Of each worker, its last push that is in a snapshot."""
    found = dict(snapshot.cut.sequences)
    for record in world.coordinator.records:
        if record.generation <= snapshot.record.generation:
            for end in record.departures:
                if end.member.worker not in found:
                    found[end.member.worker] = _held_of(end, record.mode, snapshot)
    return found


def _held_of(end: Departure, mode: Mode, snapshot: Snapshot) -> int:
    """Of a worker that had ended: all, but for clocks that came after the cut."""
    modes = (mode, snapshot.record.mode)
    is_by_clock = all(each.rules.is_clocked for each in modes)
    if not is_by_clock:
        return end.last_sequence
    held = end.member.base_sequence + max(0, snapshot.cut.clock - end.member.base_clock)
    return min(end.last_sequence, held)
