"""Where shards are, for workers and clients."""

from psserver.coordinator.core.shard_map import ShardSlot
from pswire.v1 import membership_pb2 as messages


def address_message(slot: ShardSlot) -> messages.ShardAddress:
    """Writes where a shard is."""
    return messages.ShardAddress(
        shard_index=slot.index, address=slot.address, incarnation=slot.incarnation
    )
