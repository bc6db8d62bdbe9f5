"""What a worker reads from a record."""

import random

from psserver.edge.record import Member, WorkerKey
from psserver.shard.core.clock_table import ClockTable
from psworker.transport import values
from psworker.transport.values import Identity


def record_of(*members: values.Member) -> values.Record:
    return values.Record(fence_number=1, generation=1, members=members)


def test_a_worker_finds_the_same_longest_member_as_shards() -> None:
    rng = random.Random(5)
    for _ in range(200):
        bases = [
            (f"w{rng.randrange(4)}", n, rng.randrange(3), rng.randrange(3))
            for n in range(rng.randrange(1, 5))
        ]
        longest = ClockTable.longest(
            tuple(
                Member(
                    worker=WorkerKey(name, start),
                    rank=0,
                    base_clock=clock,
                    base_sequence=base,
                )
                for name, start, clock, base in bases
            )
        )
        mine = record_of(
            *(
                values.Member(Identity(name, start), 0, clock, base)
                for name, start, clock, base in bases
            )
        )

        found = [m.worker for m in mine.members if mine.has_longest(m.worker)]

        assert found == [Identity(*longest.worker)]


def test_a_record_without_members_has_no_longest() -> None:
    assert not record_of().has_longest(Identity("w0", 1))
