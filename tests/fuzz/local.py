"""Readers of what is on this machine, and of what workers tell each other."""

import math
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, Final

from torch.utils.data import RandomSampler

from psserver.edge.limits import Limits
from pswire.addresses import parse_address
from pswire.aggregation import Aggregation
from pswire.compression import Compression
from pswire.failpoints import FailpointError, parse_failpoints
from pswire.leased_data import RecordedSplit
from pswire.reasons import Refusal
from pswire.security.roles import Identity
from pswire.shared_memory.handshake import Answer, Offer
from pswire.shared_memory.segments import (
    MemorySegment,
    SegmentError,
    SegmentHeader,
    SegmentKind,
    is_wanted,
)
from psworker.backends.host.rendezvous import MESSAGES
from psworker.config import named_coordinator
from psworker.data.origin import OriginInvalidError, drawing_from, generator_of
from psworker.data.splitting import check_recorded, read_back, split
from psworker.errors import ConfigurationError, SplitError
from psworker.launch.launched import find_host_place
from psworker.launch.torchrun import count_text, find_torchrun, rank_text
from tests.fuzz.target import Target, same, taken

SIZE: Final = 256


def _memory(data: bytes, seals: int) -> int:
    """A descriptor of memory that somebody has made."""
    assert sys.platform == "linux"
    import fcntl

    descriptor = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _take_segment(data: bytes) -> None:
    """Memory that begins with these bytes, with as many seals as the first one has."""
    seals, content = (data[0] & 15 if data else 0), data[1:]
    number = int.from_bytes(content[16:24], "little")
    size = int.from_bytes(content[24:32], "little")
    header = SegmentHeader(SegmentKind.GRADIENT, number, size)
    segment = MemorySegment.adopt(header, _memory(content, seals))
    with taken():
        assert header.is_at_start_of(segment.data)
        assert len(segment.data) == size == len(content)


def _received(receive: Callable[[socket.socket], Any], data: bytes) -> Any:  # noqa: ANN401
    """What is read of a packet; the first byte says how many descriptors come too."""
    count, packet = (data[0] % 4 if data else 0), data[1:1025]
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with first, second:
        second.settimeout(5.0)
        given = [first.fileno()] * count
        socket.send_fds(first, [packet or b"\0"], given)
        return receive(second)


def _take_offer(data: bytes) -> None:
    offer = _received(Offer.receive, data)
    os.close(offer.descriptor)
    with taken():
        assert data[1:17] == offer.token


def _take_answer(data: bytes) -> None:
    os.close(_received(Answer.receive, data).descriptor)


def _take_environment(data: bytes) -> None:
    """Variables, a line each, as whoever starts a process may set them."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    environ = dict(line.partition("=")[::2] for line in lines)
    is_wanted(environ.get("PS_SHARED_MEMORY", ""))
    named_coordinator(None, environ)
    find_host_place(environ)
    find_torchrun(environ)
    rank_text(environ)
    count_text(environ)


def _take_aggregation(data: bytes) -> None:
    rule = Aggregation.parse(data.decode("utf-8", "replace"))
    with taken():
        assert Aggregation.parse(str(rule)) == rule


def _take_limits(data: bytes) -> None:
    """Values of `--limit`, or of PS_LIMITS."""
    limits = Limits.parse(data.decode("utf-8", "surrogateescape").split(" "))
    with taken():
        for each in fields(limits):
            assert math.isfinite(getattr(limits, each.name))


def _take_identity(data: bytes) -> None:
    """An alternative name of a certificate."""
    identity = Identity.from_uri(data.decode("utf-8", "replace"))
    if identity is not None:
        with taken():
            assert Identity.from_uri(identity.uri) == identity
            str(identity).encode()


def _take_failpoints(data: bytes) -> None:
    for each in parse_failpoints(data.decode("utf-8", "surrogateescape")):
        with taken():
            argument = f"({each.argument})" if each.action in ("exit", "delay") else ""
            text = f"{each.name}={each.action}{argument}@{each.turn}"
            assert parse_failpoints(text) == (each,)


def _take_address(data: bytes) -> None:
    address = parse_address(data.decode("utf-8", "surrogateescape"))
    with taken():
        assert parse_address(str(address)) == address


def _take_compression(data: bytes) -> None:
    compression = Compression.parse(data.decode("utf-8", "replace"))
    with taken():
        assert str(Compression.parse(str(compression))) == str(compression)


SAMPLES: Final = list(range(12))
SPLIT: Final = split(len(SAMPLES), parts={"train": 0.5, "test": 0.5}, seed=1)


def _take_recipe(data: bytes) -> None:
    """The recipe of a split that another worker has recorded."""
    recorded = RecordedSplit(
        name="split",
        digest=SPLIT.digest,
        item_count=len(SAMPLES),
        recipe=data.decode("utf-8", "replace"),
        recorder="a",
    )
    with suppress(SplitError):
        check_recorded(SPLIT, replace(recorded, digest="0" * 64))
    read_back(recorded, len(SAMPLES))


def _take_origin(data: bytes) -> None:
    sampler = RandomSampler(SAMPLES)
    generator_of(data)
    with drawing_from(data, sampler), taken():
        assert sorted(sampler) == SAMPLES


def _take_group_message(data: bytes) -> None:
    value = MESSAGES.decode(data)
    with taken():
        assert same(MESSAGES.decode(MESSAGES.encode(value)), value)


LOCAL: Final = (
    Target("segment", _take_segment, (SegmentError,)),
    Target("offer", _take_offer, (SegmentError,)),
    Target("answer", _take_answer, (SegmentError,)),
    Target("environment", _take_environment, (ConfigurationError,)),
    Target("aggregation", _take_aggregation, (ValueError,)),
    Target("limits", _take_limits, (ValueError,)),
    Target("identity", _take_identity, ()),
    Target("failpoints", _take_failpoints, (FailpointError,)),
    Target("address", _take_address, (ValueError,)),
    Target("compression", _take_compression, (Refusal,)),
    Target("recipe", _take_recipe, (SplitError, ConfigurationError)),
    Target("group_message", _take_group_message, (ValueError,)),
    Target("origin", _take_origin, (OriginInvalidError,)),
)
