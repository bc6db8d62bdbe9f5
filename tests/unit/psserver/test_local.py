"""Where the shards of `psserver local` listen, and what it refuses."""

import asyncio
import sys
from pathlib import Path

import pytest

from psserver import local
from psserver.config import CoordinatorConfig, ListenConfig, OptionError
from psserver.edge.ending import JobFailedError
from psserver.local import run_local, shard_listen
from pswire.addresses import parse_address
from pswire.security.credentials import Credentials
from tests.doubles.made_certificates import SERVER, MadeCertificates


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


def test_shards_without_a_token_are_refused_where_one_is_asked_for(
    tmp_path: Path,
) -> None:
    config = CoordinatorConfig(
        listen=ListenConfig(
            address=parse_address("127.0.0.1:0"), tokens=tmp_path / "tokens.json"
        ),
        state_dir=tmp_path,
        shard_count=1,
    )
    with pytest.raises(OptionError, match="psctl token create --role shard"):
        asyncio.run(run_local(config, [], verbose=False))


@pytest.mark.parametrize(
    ("listen", "has_tls"),
    [("0.0.0.0:7070", False), ("[::]:0", False), ("[::]:0", True)],
)
def test_every_address_is_refused(tmp_path: Path, listen: str, has_tls: bool) -> None:
    credentials = MadeCertificates(tmp_path).credentials(SERVER)
    config = CoordinatorConfig(
        listen=ListenConfig(
            address=parse_address(listen),
            insecure=not has_tls,
            credentials=credentials if has_tls else Credentials(),
        ),
        state_dir=tmp_path,
        shard_count=1,
    )
    with pytest.raises(OptionError, match=r"workers are told one of each shard") as e:
        asyncio.run(run_local(config, [], verbose=False))
    assert ("--insecure" in str(e.value)) is not has_tls


@pytest.mark.parametrize(
    ("code", "is_started_again", "starts", "text"),
    [
        ("os.kill(os.getpid(), 9)", True, 3, "killed by signal 9, 3 times in a row"),
        ("os.kill(os.getpid(), 9)", False, 1, "shard 7 was killed by signal 9$"),
        ("sys.exit(78)", True, 1, "shard 7 ended with code 78$"),
    ],
)
def test_a_shard_that_is_killed_each_time_ends_the_job(
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    is_started_again: bool,
    starts: int,
    text: str,
) -> None:
    started: list[str] = []

    async def start(*arguments: str) -> asyncio.subprocess.Process:
        started.append(arguments[0])
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", f"import os, sys; {code}"
        )

    monkeypatch.setattr(local, "_start", start)
    monkeypatch.setattr(local, "SHORT_LIVES_MAX", 3)
    monkeypatch.setattr(local, "SHORT_LIFE_S", 600.0)  # on a busy machine, too
    monkeypatch.setattr(local, "PAUSE_S", 0.01)

    async def keep() -> None:
        children = [await start("shard")] * 9
        what_follows = local.RETURNS if is_started_again else ""
        await local._keep("shard 7", 8, ("shard",), children, what_follows)

    with pytest.raises(JobFailedError, match=text):
        asyncio.run(keep())
    assert len(started) == starts


def test_a_killed_coordinator_is_started_again_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[str, ...]] = []
    codes = iter(["os.kill(os.getpid(), 9)", "sys.exit(69)"])

    async def start(*arguments: str) -> asyncio.subprocess.Process:
        started.append(arguments)
        program = f"import os, sys; print('listening', flush=True); {next(codes)}"
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program), stdout=asyncio.subprocess.PIPE
        )

    monkeypatch.setattr(local, "_start", start)
    monkeypatch.setattr(local, "PAUSE_S", 0.01)

    async def keep() -> None:
        arguments = ("coordinator", "--listen=127.0.0.1:7070")
        children = [await start(*arguments)]
        await local._keep("the coordinator", 0, arguments, children, local.GOES_ON)

    with pytest.raises(JobFailedError, match=r"the coordinator ended with code 69$"):
        asyncio.run(keep())
    assert started == [("coordinator", "--listen=127.0.0.1:7070")] * 2


def test_shards_are_told_where_to_record_and_the_coordinator_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: dict[str, tuple[str, ...]] = {}

    async def start(*arguments: str) -> asyncio.subprocess.Process:
        role = arguments[0]
        started[role] = arguments
        program = f"print('psserver {role} on 127.0.0.1:7070', flush=True); exit(69)"
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program), stdout=asyncio.subprocess.PIPE
        )

    monkeypatch.setattr(local, "_start", start)
    config = CoordinatorConfig(
        listen=ListenConfig(address=parse_address("127.0.0.1:0")),
        state_dir=tmp_path,
        shard_count=1,
    )
    with pytest.raises(JobFailedError, match="ended with code 69"):
        asyncio.run(
            run_local(config, [], shard_arguments=["--record=folder"], verbose=False)
        )

    option = "--record=folder"
    assert option in started["shard"]
    assert option not in started["coordinator"]
