"""What a shard did with a push."""

from pswire.membership import LabelledEnum


class Outcome(LabelledEnum):
    """What became of a push; mirrors `pswire.v1.Outcome`."""

    APPLIED = 1
    STAGED = 2
    SKIPPED = 3
    DROPPED = 4
    DUPLICATE = 5
