"""What a process of a group hears when another one is gone."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch.distributed as dist

from psworker.backends.group import GroupChannel
from psworker.errors import UnavailableError
from tests.doubles.child_process import killed_at_end

PEER: Final = """
import os, sys
import torch.distributed as dist
from psworker.backends.group import GroupChannel

dist.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2)
channel = GroupChannel(timeout_s=20)
assert channel.led(lambda: None) == "ready"
os._exit(0)  # as one that is killed: nobody is told
"""


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[GroupChannel]:
    """The leader's, of a group whose other process has ended."""
    meet = f"file://{tmp_path / 'meet'}"
    process = subprocess.Popen([sys.executable, "-c", PEER, meet], text=True)
    with killed_at_end(process) as peer:
        dist.init_process_group("gloo", init_method=meet, rank=0, world_size=2)
        try:
            channel = GroupChannel(timeout_s=20)
            channel.led(lambda: "ready")
            assert peer.wait() == 0
            yield channel
        finally:
            dist.destroy_process_group()


def test_a_process_that_is_gone_is_told_with_what_to_do(
    channel: GroupChannel, caplog: pytest.LogCaptureFixture
) -> None:
    text = (
        r"^another process of this process group has ended or is silent, and the group "
        r"can't go on without it; torchrun ends what is left and, with --max-restarts, "
        r"starts the group again \((?s:.+)\)$"
    )
    with pytest.raises(UnavailableError, match=text) as caught:
        channel.sum(1.0)
    assert caught.value.__suppress_context__

    # An error of the leader stays the one to raise.
    def fail() -> None:
        raise OverflowError("first")

    with (
        caplog.at_level(logging.WARNING, "psworker"),
        pytest.raises(OverflowError, match="first"),
    ):
        channel.led(fail)
    (line,) = (each.message for each in caplog.records if each.name == "psworker")
    assert line.startswith(
        "could not send the error to the other processes: another process of "
    )
