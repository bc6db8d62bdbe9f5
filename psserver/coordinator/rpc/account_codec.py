"""What became of an epoch, as a message."""

from psserver.coordinator.core.data.epoch_account import EpochAccount
from pswire.v1 import coordinator_service_pb2 as messages


def account_message(account: EpochAccount) -> messages.EpochAccount:
    """Writes an account."""
    return messages.EpochAccount(
        loader=account.loader,
        epoch=account.epoch,
        position_count=account.position_count,
        left_out_count=account.left_out_count,
        seen_once_count=account.seen_once_count,
        seen_again_count=account.seen_again_count,
        torn_count=account.torn_count,
        dropped_count=account.dropped_count,
        skipped_count=account.skipped_count,
        never_count=account.never_count,
        closed=account.is_closed,
    )
