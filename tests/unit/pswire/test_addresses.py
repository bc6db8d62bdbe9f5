"""Addresses, as people write them."""

import pytest

from pswire.addresses import Address, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:7070", "localhost", 7070),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::1]:65535", "::1", 65_535),
        ("ps-0.training.svc:80", "ps-0.training.svc", 80),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "localhost", ":7070", "localhost:", "localhost:x", "a:-1", "a:65536", "::1:7"],
)
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no address") as refused:
        parse_address(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("character", ["\n", "\0", " ", "\x1b", "\udcff", "\u2028"])
@pytest.mark.parametrize("text", ["ho{}st:1", "host:1{}", "{}host:1"])
def test_an_address_has_no_characters_that_no_host_has(
    text: str, character: str
) -> None:
    with pytest.raises(ValueError, match="is no address: ") as refused:
        parse_address(text.format(character))
    assert str(refused.value).isprintable()
    assert f"{character!a} can't be in one" in str(refused.value)


@pytest.mark.parametrize("digits", [6, 5_000])
def test_a_port_of_any_length_is_told_what_ports_are(digits: int) -> None:
    with pytest.raises(ValueError, match="the port is 0 to 65535") as refused:
        parse_address("h:" + "9" * digits)
    assert len(str(refused.value)) < 200


def test_an_address_is_no_url() -> None:
    with pytest.raises(ValueError, match="is no address: leave out http://"):
        parse_address("http://127.0.0.1:7070")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("my-machine", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(host: str, loopback: bool) -> None:
    assert Address(host, 1).is_loopback is loopback
