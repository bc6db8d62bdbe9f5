"""`docs/several-machines.md` on two hosts: installed, trained, drained, gone on.

A host is a bash that has a network, a name, processes and a home of its own, and sees
nothing of the checkout. Each command of the page is typed into the one that the page
says, in the order of the page.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import pytest
from playwright.sync_api import expect, sync_playwright

from tests import wheel_check
from tests.debian import require
from tests.doubles.children import wait_until
from tests.doubles.delayed_link import TUN, DelayedLink
from tests.doubles.served_page import FLAGS
from tests.integration.readme_session import Shell, first_line_missing

CHECKOUT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = CHECKOUT / "docs" / "several-machines.md"
ADDRESSES: Final = {"ps0": "10.77.0.1", "gpu0": "10.77.0.2"}
DOMAIN: Final = "example.org"
DELAY_S: Final = 0.02

APART: Final = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child")
"""Of a host. Its processes end with it."""

PROMPT: Final = re.compile(r"(\w*)\$ (.*)")
INSTALL_TIMEOUT_S: Final = 600.0
TRAINING_TIMEOUT_S: Final = 180.0
END_TIMEOUT_S: Final = 90.0
"""The last checkpoint may take a minute."""

SCP: Final = """#!/usr/bin/env python3
import os, subprocess, sys
*given, target = sys.argv[1:]
host, _, path = target.partition(":")
home = os.path.join(os.environ["HOMES"], host.partition(".")[0])
subprocess.run(["cp", *given, os.path.join(home, path)], check=True)
"""
"""Between two hosts that have no sshd."""


@dataclass(frozen=True)
class Command:
    """A command of the page.

    Attributes:
        host: Where it is typed; empty for the checkout.
        text: What is typed.
        shown: Lines that it prints.
    """

    host: str
    text: str
    shown: tuple[str, ...]


def commands_of(page: Path) -> dict[str, list[Command]]:
    """The commands of each part of a page, by its heading."""
    parts: dict[str, list[Command]] = {}
    for part in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        commands = parts.setdefault(part.partition("\n")[0], [])
        for block in re.findall(r"^```\n(.*?)^```", part, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if typed := PROMPT.fullmatch(line):
                    commands.append(Command(typed[1], typed[2], ()))
                elif commands:
                    last = commands.pop()
                    shown = (*last.shown, line)
                    commands.append(Command(last.host, last.text, shown))
    return parts


class Host:
    """A machine. A context manager: leaving it switches the machine off.

    Attributes:
        started: What runs in the background since the last stop: process ids and logs.
    """

    def __init__(
        self, name: str, homes: Path, environment: Mapping[str, str], *, is_online: bool
    ) -> None:
        """Starts it.

        Args:
            name: Its name, without the domain.
            homes: The folder of all homes.
            environment: Of its first process.
            is_online: Whether it has the network of this machine.
        """
        self._home = homes / name
        self._log_count = 0
        self.started: dict[str, Path] = {}
        apart = APART if is_online else (*APART, "--net")
        self._shell = Shell(
            self._home,
            {**environment, "HOMES": str(homes), "HOME": str(self._home)},
            prefix=apart,
        )
        (self._home / "hosts").write_text(
            f"127.0.0.1 localhost\n127.0.1.1 {name}.{DOMAIN} {name}\n"
            + "".join(
                f"{address} {each}.{DOMAIN}\n"
                for each, address in ADDRESSES.items()
                if each != name
            )
        )
        self.type("mount -t proc proc /proc")
        self.type(f"echo {name} > /proc/sys/kernel/hostname")
        self.type("mount --bind hosts /etc/hosts")
        self.type(f"mount -t tmpfs tmpfs '{CHECKOUT}'")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if error is not None:
            for log in sorted(self._home.glob("*.log")):
                error.add_note(f"--- {log}\n{log.read_text()[-8000:]}")
        self._shell.close()

    @property
    def process_id(self) -> int:
        """Of a process that is in its namespaces."""
        return self._shell.process_id

    def connect(self, link_name: str, address: str) -> None:
        """Gives it an address, on a device that was moved here."""
        self.type("ip link set lo up")
        self.type(f"ip address add {address}/24 dev {link_name}")
        self.type(f"ip link set {link_name} up")

    def type(self, text: str, timeout_s: float = TRAINING_TIMEOUT_S) -> str:
        """What a command prints, which succeeds."""
        code, output = self._shell.run(text, timeout_s=timeout_s)
        assert code == 0, f"{text!r} ended with exit code {code}:\n{output}"
        return output

    def follow(self, command: Command) -> str:
        """Does a command of the page; what it has printed so far."""
        text = command.text
        if not text.endswith("&"):
            output = self.type(text, INSTALL_TIMEOUT_S)
            missing = first_line_missing(list(command.shown), output)
            assert missing is None, f"{text!r} did not show {missing!r}:\n{output}"
            return output
        self._log_count += 1
        log = self._home / f"{self._log_count}.log"
        log.touch()
        started = text.removesuffix("&").strip()
        printed = self.type(f"{started} >{log} 2>&1 </dev/null & echo $!")
        self.started[printed.strip()] = log
        self.wait_shown(log, *command.shown)
        return log.read_text()

    def wait_shown(self, log: Path, *shown: str) -> None:
        """Waits until a process has printed some lines, in their order."""
        wait_until(
            lambda: first_line_missing(list(shown), log.read_text()) is None,
            f"{shown} in {log}",
            TRAINING_TIMEOUT_S,
        )

    def endings(self) -> list[int]:
        """Waits for the end of all that was started; their exit codes."""
        codes = [
            self._shell.run(f"wait {each}", timeout_s=END_TIMEOUT_S)[0]
            for each in self.started
        ]
        self.started.clear()
        return codes


def why_not() -> str:
    """Why this machine can't be two; empty if it can."""
    if os.geteuid() != 0:
        return "needs to be root"
    if not Path(TUN).exists():
        return f"there is no {TUN}"
    command = [*APART, "--net", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip()


@pytest.fixture
def homes(tmp_path: Path) -> Path:
    """Of both hosts, with what the page has copied there, and Python on the PATH."""
    wheel = wheel_check.build("wheel", CHECKOUT, tmp_path / "dist")
    copied = [wheel, CHECKOUT / "examples" / "digits_after.py"]
    for name in ADDRESSES:
        home = tmp_path / "homes" / name
        home.mkdir(parents=True)
        for each in copied:
            (home / each.name).write_bytes(each.read_bytes())
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "scp").write_text(SCP)
    (programs / "scp").chmod(0o755)
    (programs / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    # Everything else there, such as pip's settings, is as on this machine.
    return tmp_path / "homes"


@pytest.fixture
def environment(homes: Path) -> dict[str, str]:
    """Of a host: nothing of it leads to the checkout."""
    path = [str(homes.parent / "programs"), "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PS_", "PYTHON", "VIRTUAL_ENV", "MAKE", "MFLAGS"))
    }
    return kept | {"PATH": os.pathsep.join(path), "NO_COLOR": "1"}


@pytest.fixture
def page() -> dict[str, list[Command]]:
    """Its commands."""
    return commands_of(PAGE)


@pytest.fixture
def hosts(
    homes: Path, environment: dict[str, str], page: dict[str, list[Command]]
) -> Iterator[dict[str, Host]]:
    """Both, with the wheel installed, and 20 ms between them each way."""
    if reason := why_not():
        pytest.skip(reason)
    require("iproute2", "ip")
    require("curl")
    for command in page["Install"]:
        assert command.host in ("", "each")
    # One environment for both: that of torch is large.
    with Host("ps0", homes, environment, is_online=True) as first:
        for command in page["Install"]:
            if command.host:
                first.follow(command)
    (homes / "gpu0" / "environment").symlink_to(homes / "ps0" / "environment")
    with ExitStack() as opened:
        made = {
            name: opened.enter_context(Host(name, homes, environment, is_online=False))
            for name in ADDRESSES
        }
        link = opened.enter_context(DelayedLink(DELAY_S))
        for end, (name, host) in zip(link.ends, made.items(), strict=True):
            end.move(host.process_id)
            host.connect(end.name, ADDRESSES[name])
            host.type(". environment/bin/activate")
        link.start()
        yield made


def follow(hosts: Mapping[str, Host], commands: list[Command]) -> list[str]:
    """Types commands; what each has printed."""
    return [hosts[command.host].follow(command) for command in commands]


def look_at_the_page(host: Host, token: str, wrapper: Path) -> None:
    """A browser on a host opens the page of the job, with a token."""
    inside = f"nsenter --target={host.process_id} --net"
    wrapper.write_text(f'#!/bin/sh\nexec {inside} {require("chromium")} "$@"\n')
    wrapper.chmod(0o755)
    with sync_playwright() as playwright:
        # The file of names is the host's own, which Chromium does not see.
        known = f"--host-resolver-rules=MAP ps0.{DOMAIN} {ADDRESSES['ps0']}"
        flags = [*FLAGS, known]
        browser = playwright.chromium.launch(executable_path=wrapper, args=flags)
        try:
            shown = browser.new_context(ignore_https_errors=True).new_page()
            shown.set_default_timeout(60_000)
            shown.goto(f"https://ps0.{DOMAIN}:9090/")
            shown.get_by_label("Token", exact=True).fill(token)
            shown.get_by_role("button", name="Use this token").click()
            expect(shown.locator("#link")).to_have_text("live", timeout=60_000)
        finally:
            browser.close()


@pytest.mark.root
@pytest.mark.timeout(1800)
def test_the_page_brings_up_a_job_that_goes_on_after_it_was_stopped(
    hosts: dict[str, Host], page: dict[str, list[Command]], homes: Path
) -> None:
    ps0, gpu0 = hosts["ps0"], hosts["gpu0"]
    follow(hosts, page["Certificates and tokens"])
    follow(hosts, page["Start"])
    *_, status = follow(hosts, page["Watch"])
    ready = page["Watch"][1].text
    connected = gpu0.type(f"{ready} --output /dev/null --write-out %{{time_connect}}")
    assert float(connected) >= 2 * DELAY_S
    watched: dict[str, Any] = json.loads(status)
    assert [each["state"] for each in watched["workers"]] == ["member"] * 2
    events = gpu0.type(page["Watch"][-1].text.replace("/status", "/events"))
    assert "job_started" in events
    assert "<title>" in gpu0.type(ready.replace("/readyz", "/"))
    follow(hosts, page["Stop"])
    assert ps0.endings() == [0, 0, 0]
    assert gpu0.endings() == [128 + signal.SIGTERM]
    follow(hosts, page["Start"])
    coordinator, (trained,) = next(iter(ps0.started.values())), gpu0.started.values()
    ps0.wait_shown(coordinator, "...the job returns to checkpoint...")
    gpu0.wait_shown(trained, "[p0] test accuracy 0.9...")
    follow(hosts, page["Go on"])
    token = (homes / "ps0" / "admin.token").read_text().strip()
    look_at_the_page(gpu0, token, homes.parent / "chromium")
    follow(hosts, page["Stop"][:1])
    assert ps0.endings() == [0, 0, 0]
    assert gpu0.endings() == [0]
