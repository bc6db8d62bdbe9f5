"""Where the shards of `psserver local` listen, and what it refuses."""

import asyncio
from pathlib import Path

import pytest

from psserver.config import CoordinatorConfig, ListenConfig, OptionError
from psserver.local import run_local, shard_listen
from pswire.addresses import parse_address


@pytest.mark.parametrize(
    ("coordinator", "shard"),
    [
        ("127.0.0.1:7070", "127.0.0.1:0"),
        ("localhost:7070", "127.0.0.1:0"),
        ("[::1]:7070", "127.0.0.1:0"),
        ("192.168.0.7:7070", "192.168.0.7:0"),
        ("[fd00::7]:0", "[fd00::7]:0"),
        ("box.lan:7070", "box.lan:0"),
    ],
)
def test_who_reaches_the_coordinator_reaches_the_shards(
    coordinator: str, shard: str
) -> None:
    assert str(shard_listen(parse_address(coordinator))) == shard


@pytest.mark.parametrize("listen", ["0.0.0.0:7070", "[::]:0"])
def test_every_address_is_refused(tmp_path: Path, listen: str) -> None:
    config = CoordinatorConfig(
        listen=ListenConfig(address=parse_address(listen), insecure=True),
        state_dir=tmp_path,
        shard_count=1,
    )
    with pytest.raises(OptionError, match=r"workers are told one of each shard"):
        asyncio.run(run_local(config, [], verbose=False))
