"""Runs the code blocks of a Markdown page as a reader would, in order.

- ```console blocks: lines that begin with `$ ` go to one bash, which lives as long as
  the page, so that `export`, `cd` and `wait` mean what they mean to a reader. A line
  that ends in a backslash goes on in the next. A command must succeed. What the page
  shows below a command must come in its output, in that order; `...` in it stands for
  anything within a line, and a line of `...` alone for nothing in particular.
- A command that ends in `&` goes on in the background, as in a second terminal. What
  is shown below it is waited for. At the end of the page all of them get SIGTERM and
  must end with exit code 0.
- ```python blocks: a script each, run by the same bash. What a reader need not see
  stands before it in an HTML comment, `<!-- invisible-code-block: python`.
- A block behind the comment `<!-- file: NAME -->` is saved under that name instead,
  and a later command must name it.
- Port numbers: every `HOST:PORT` of this machine that the page writes is replaced,
  in commands, scripts and expected output, by a free port; the same one each time.
- `git clone`, `pip install` and `cd paramserver` have been done already. `make demo`
  runs in the checkout; any other `make` only shows what it would do, since the tests
  can't run in themselves.

Everything happens in a scratch folder that holds a copy of `examples/`.
"""

import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser

INSTALLED = Path(sys.executable).parent
COMMAND_TIMEOUT_S = 180.0
SHOWN_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
END_OF_COMMAND = "--end-of-command--"
LOCAL_ADDRESS = re.compile(r"(?<=localhost:|127\.0\.0\.1:)[1-9]\d*\b")
FILE_COMMENT = re.compile(r"<!--\s*file:\s*(\S+)\s*-->\s*\Z")
NOTHING_TO_DO = re.compile(r"git clone .*|pip install .*|cd paramserver")
MAKE = re.compile(r"make (\w+)")


class ReadmeFailureError(AssertionError):
    """A block did not do what the page says."""


class Shell:
    """One bash, fed with commands."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        prefix: Sequence[str] = (),
    ) -> None:
        """Starts it, by a command that runs another one, if there is any."""
        self._process = subprocess.Popen(
            [*prefix, "bash", "--noprofile", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        self._output = self._process.stdout.fileno()

    @property
    def process_id(self) -> int:
        """Of bash, or of what has started it."""
        return self._process.pid

    def run(self, command: str, *, timeout_s: float) -> tuple[int, str]:
        """Runs a command and returns its exit code and what it wrote."""
        self._input.write(
            f"{command}\nprintf '\\n{END_OF_COMMAND} %s\\n' $?\n".encode()
        )
        self._input.flush()
        ending = re.compile(rf"\n{END_OF_COMMAND} (\d+)\n\Z")
        deadline = time.monotonic() + timeout_s
        output = ""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while not (ended := ending.search(output)):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ReadmeFailureError(
                        f"{command!r} did not end in {timeout_s:.0f} s:\n{output}"
                    )
                block = os.read(self._output, 1 << 16)
                if not block:
                    raise ReadmeFailureError(f"{command!r} ended the shell:\n{output}")
                output += block.decode(errors="replace")
        return int(ended.group(1)), output[: ended.start()]

    def close(self) -> None:
        """Ends bash and whatever is left of its session."""
        self._input.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class ReadmeSession:
    """Runs a page's blocks. A context manager: leaving it stops the background."""

    def __init__(
        self,
        page: Path,
        *,
        checkout: Path,
        scratch: Path,
        commands: Path = INSTALLED,
        commands_of_make: Path = INSTALLED,
    ) -> None:
        """Starts nothing yet.

        Args:
            page: The Markdown file.
            checkout: The root of the checkout.
            scratch: Where all of it happens, an empty folder.
            commands: The folder of `python` and ours that the page calls.
            commands_of_make: The one of those that `make demo` calls.
        """
        self._page = page
        self._commands = commands
        self._commands_of_make = commands_of_make
        self._checkout = checkout
        self._scratch = scratch
        self._ports: dict[str, str] = {}
        self._background: dict[str, tuple[str, Path]] = {}
        self._saved: set[str] = set()
        self._hidden = ""
        self._block_count = 0

    def __enter__(self) -> "ReadmeSession":
        shutil.copytree(self._checkout / "examples", self._scratch / "examples")
        # What `make test` tells its children of itself is not for the page's `make`.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PS_", "MAKE", "MFLAGS"))
        }
        environment["PATH"] = os.pathsep.join(
            [str(self._commands), str(INSTALLED), environment["PATH"]]
        )
        environment["BIN"] = str(self._commands_of_make)
        environment["CHECKOUT"] = str(self._checkout)
        environment["NO_COLOR"] = "1"
        self._shell = Shell(self._scratch, environment)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            endings = self._stop_background()
        finally:
            self._shell.close()
        if kind is None and endings:
            raise ReadmeFailureError("\n".join(endings))

    def run(self) -> int:
        """Runs every block and returns how many there are."""
        sybil = Sybil(
            parsers=[
                CodeBlockParser("console", self._run_console),
                CodeBlockParser("python", self._run_python),
            ]
        )
        examples = list(sybil.parse(self._page).examples())
        for example in examples:
            example.evaluate()
        if self._saved:
            raise ReadmeFailureError(f"saved but never run: {sorted(self._saved)}")
        return len(examples)

    def _run_python(self, example: Example) -> None:
        source = self._localized(str(example.parsed))
        if example.document.text.startswith("<!--", example.start):
            self._hidden += source
            return
        source, self._hidden = self._hidden + source, ""
        file_comment = FILE_COMMENT.search(example.document.text[: example.start])
        if file_comment is not None:
            name = file_comment.group(1)
            (self._scratch / name).write_text(source)
            self._saved.add(name)
            return
        self._block_count += 1
        name = f"block_{self._block_count}.py"
        (self._scratch / name).write_text(source)
        self._run_command(f"python {name}", shown=[], line=example.line)

    def _run_console(self, example: Example) -> None:
        text = self._localized(str(example.parsed)).replace("\\\n", " ")
        lines = text.splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
        if not starts or starts[0] != 0:
            raise ReadmeFailureError(f"line {example.line}: a block starts with `$ `")
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            shown = [line for line in lines[start + 1 : end] if line.strip()]
            self._run_command(lines[start][2:].strip(), shown=shown, line=example.line)

    def _run_command(self, command: str, *, shown: list[str], line: int) -> None:
        where = f"{self._page.name}, block at line {line}"
        self._saved -= {name for name in self._saved if name in command}
        if command.endswith("&"):
            self._start_background(command.removesuffix("&").strip(), shown, where)
            return
        if NOTHING_TO_DO.fullmatch(command):
            return
        made = MAKE.fullmatch(command)
        code, output = self._shell.run(
            make_command(made.group(1)) if made else command,
            timeout_s=COMMAND_TIMEOUT_S,
        )
        if code != 0:
            logs = self._logs_of_background()
            raise ReadmeFailureError(
                f"{where}: {command!r} ended with exit code {code}:\n{output}\n{logs}"
            )
        if missing := first_line_missing(shown, output):
            raise ReadmeFailureError(
                f"{where}: {command!r} did not show {missing!r}:\n{output}"
            )

    def _start_background(self, command: str, shown: list[str], where: str) -> None:
        log = self._scratch / f"background_{len(self._background)}.log"
        log.touch()
        started = f"{command} >{log} 2>&1 </dev/null & echo $!"
        _, process_id = self._shell.run(started, timeout_s=SHOWN_TIMEOUT_S)
        self._background[process_id.strip()] = (command, log)
        deadline = time.monotonic() + SHOWN_TIMEOUT_S
        while missing := first_line_missing(shown, log.read_text()):
            if time.monotonic() > deadline:
                raise ReadmeFailureError(
                    f"{where}: {command!r} did not show {missing!r}:\n{log.read_text()}"
                )
            time.sleep(0.02)

    def _stop_background(self) -> list[str]:
        """Ends all of them together; returns what went wrong, in words."""
        endings = []
        if self._background:
            everyone = " ".join(self._background)
            self._shell.run(f"kill -TERM {everyone} 2>/dev/null", timeout_s=5)
        for process_id, (command, log) in self._background.items():
            code, _ = self._shell.run(f"wait {process_id}", timeout_s=STOP_TIMEOUT_S)
            if code != 0:
                endings.append(
                    f"{command!r} ended with exit code {code}:\n{log.read_text()}"
                )
        return endings

    def _logs_of_background(self) -> str:
        return "\n".join(
            f"--- {command}\n{log.read_text()}"
            for command, log in self._background.values()
        )

    def _localized(self, text: str) -> str:
        return LOCAL_ADDRESS.sub(lambda found: self._free_port(found.group()), text)

    def _free_port(self, written: str) -> str:
        if written not in self._ports:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self._ports[written] = str(listener.getsockname()[1])
        return self._ports[written]


def make_command(target: str) -> str:
    """`make` of a target in the checkout, leaving nothing there."""
    command = f'make --silent --no-print-directory -C "$CHECKOUT" {target}'
    if target == "demo":
        # A tenth of its epochs; `test_demo.py` looks at what the training comes to.
        return (
            f"{command} --assume-old=.venv/installed "
            'BIN="$BIN" ARGS="--epochs 3 --out $PWD/demo.safetensors"'
        )
    return f"{command} --dry-run >/dev/null"


def first_line_missing(shown: list[str], output: str) -> str | None:
    """The first of the shown lines that does not come in the output, in order."""
    lines = iter(output.splitlines())
    for expected in shown:
        parts = expected.strip().split("...")
        pattern = re.compile(".*".join(re.escape(part) for part in parts))
        if not any(pattern.fullmatch(line.strip()) for line in lines):
            return expected
    return None
