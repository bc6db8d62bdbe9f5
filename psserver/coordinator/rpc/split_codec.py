"""A recorded split as a message."""

from pswire.recorded_split import RecordedSplit
from pswire.v1 import coordinator_service_pb2 as messages


def split_message(
    split: RecordedSplit, *, with_recipe: bool = True
) -> messages.SplitRecord:
    """Writes a split. All recipes of a job together may not fit into one message."""
    return messages.SplitRecord(
        name=split.name,
        recipe=split.recipe if with_recipe else "",
        digest=split.digest,
        item_count=split.item_count,
        recorder=split.recorder,
    )
