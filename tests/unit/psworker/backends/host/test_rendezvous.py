"""How processes of a host find each other beside those of other users and jobs."""

import os
import re
import socket
from collections.abc import Iterator

import pytest

from pswire.security.tokens import new_token
from pswire.shared_memory.segments import SegmentHeader, SegmentKind
from psworker.backends.host.messages import ProcessId
from psworker.backends.host.rendezvous import (
    GroupSecret,
    Hello,
    Rendezvous,
    _address,
    group_of,
)
from psworker.errors import ConfigurationError


@pytest.fixture
def group(request: pytest.FixtureRequest) -> str:
    return group_of(f"{os.getpid()} {request.node.name}", "127.0.0.1:7070")


@pytest.fixture(params=["lock", "0"])
def taken(request: pytest.FixtureRequest, group: str) -> Iterator[socket.socket]:
    """An address of the group that somebody else has taken."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(_address(group, request.param))
        made.listen()
        yield made


@pytest.mark.usefixtures("taken")
def test_an_address_that_another_user_has_taken_is_named_with_the_cure(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: mine + 1)
    text = f"user {mine} of this machine has taken the name .* another PS_HOST_GROUP"
    with pytest.raises(ConfigurationError, match=text):
        Rendezvous(group, 0)


def test_one_that_waits_for_its_turn_is_let_in(group: str) -> None:
    first = Rendezvous(group, 0)
    try:
        first.close()
        with pytest.raises(ConfigurationError, match="a living process is number 0"):
            Rendezvous(group, 0)
        second = Rendezvous(group, 1)
        second.close()
        second.listener.close()
    finally:
        first.listener.close()


def test_the_addresses_of_a_group_do_not_follow_from_each_other(group: str) -> None:
    found = [_address(group, part) for part in ("lock", "0", "1")]
    tails = {re.sub(rb"^\0paramserver-host-", b"", each) for each in found}
    assert len(tails) == 3
    assert all(re.fullmatch(rb"[0-9a-f]{32}", each) for each in tails)


def hello(secret: GroupSecret, number: int = 1) -> Hello:
    process = ProcessId(number, 7)
    header = SegmentHeader(SegmentKind.GRADIENT, 1, 64)
    return Hello(process, "", 2, header, proof=secret.proof_of(process))


def test_a_process_proves_that_it_has_the_token_of_the_job(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unproven = hello(GroupSecret(group))
    monkeypatch.setenv("PS_TOKEN", new_token())
    before = GroupSecret(group)
    shown = hello(before)
    assert before.admits(shown)
    assert not before.admits(unproven)
    assert not before.admits(hello(GroupSecret("another group")))

    monkeypatch.setenv("PS_TOKEN", new_token())
    after = GroupSecret(group)
    assert not after.admits(shown)
    # One that was there when the token was replaced knows both.
    assert before.admits(shown)
    assert before.admits(hello(after))


def test_without_credentials_all_prove_the_same(group: str) -> None:
    assert GroupSecret(group).admits(hello(GroupSecret(group)))
