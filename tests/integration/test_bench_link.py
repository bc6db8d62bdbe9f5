"""The limited link of `psctl bench all`, by the kernel and without its help."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from psctl.bench.limited_link import limited_link, no_namespace_reason
from psctl.failures import CommandError
from psctl.processes import Children

NAMESPACE_OF_SELF = "import os; print(os.readlink('/proc/self/ns/net'))"


def namespaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() == 0 and bool(no_namespace_reason()), reason="needs iproute2"
)
def test_the_kernels_link_limits_both_directions_and_is_gone_afterwards(
    tmp_path: Path,
) -> None:
    with limited_link(200) as link, Children(tmp_path) as children:
        place = link.shard_place(children)
        assert place.listens == place.is_reached
        port = int(place.listens.partition(":")[2])
        inside = subprocess.run(
            [*link.prefix, sys.executable, "-c", NAMESPACE_OF_SELF],
            capture_output=True,
            text=True,
            check=True,
        )
        assert inside.stdout.strip() != os.readlink("/proc/self/ns/net")
        name = link.prefix[-1]
        assert name in namespaces()
        shown = [
            subprocess.run(
                ["tc", "-n", name, kind, "show", "dev", "lo"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for kind in ("class", "filter")
        ]
        assert shown[0].count("rate 200Mbit ceil 200Mbit") == 2
        # As destination and as source, in the notation of u32.
        assert f"{port:08x}/0000ffff" in shown[1]
        assert f"{port:04x}0000/ffff0000" in shown[1]
    assert name not in namespaces()


def test_without_root_a_process_passes_bytes_on_and_the_figures_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with limited_link(200) as link, Children(tmp_path) as children:
        assert link.prefix == ()
        assert "since only root may make network namespaces" in link.text
        place = link.shard_place(children)
        listens, reached = (
            int(each.partition(":")[2]) for each in (place.listens, place.is_reached)
        )
        with socket.create_server(("127.0.0.1", listens)) as server:
            told = children.next_line(90)
            assert told is not None
            assert told.text == f"passes 127.0.0.1:{reached} on to port {listens}"
            with socket.create_connection(("127.0.0.1", reached)) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"there")
                    assert accepted.recv(10) == b"there"
                    accepted.sendall(b"back")
                    assert client.recv(10) == b"back"


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    reason = no_namespace_reason()
    assert reason == "this machine has no ip and no tc (install iproute2)"


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() == 0 and bool(no_namespace_reason()), reason="needs iproute2"
)
def test_a_link_that_the_kernel_refuses_says_what_to_do_and_leaves_nothing() -> None:
    with (
        pytest.raises(CommandError, match=r"class add .* failed .*as another user"),
        limited_link(0),
    ):
        raise AssertionError("there is no such link")
    assert f"psctl-bench-{os.getpid()}" not in namespaces()
