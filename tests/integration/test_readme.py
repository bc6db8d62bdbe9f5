"""Every block of the README runs; `readme_session` says how."""

import re
from pathlib import Path

import pytest

from tests.doubles.children import Nursery
from tests.doubles.forked_commands import forked_commands
from tests.integration.readme_session import ReadmeFailureError, ReadmeSession

CHECKOUT = Path(__file__).resolve().parents[2]
README = CHECKOUT / "README.md"
EXAMPLES = CHECKOUT / "examples"

PAGE = """
# A page

<!-- file: hello.py -->
```python
import sys
print("hello,", sys.argv[1])
```

```console
$ export WHOM=world
$ echo one; echo two; \\
    echo three
one
...
three
$ python hello.py $WHOM
hello, ...
```

<!-- invisible-code-block: python
number = 3
-->

```python
assert number == 3
```

A server in a second terminal:

```console
$ python examples/serve.py localhost:8099 &
listening at localhost:8099
$ python examples/connect.py localhost:8099
connected to localhost:8099
```
"""


SERVE = """
import signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
host, port = sys.argv[1].split(":")
listener = socket.create_server((host, int(port)))
print("listening at", sys.argv[1], flush=True)
while True:
    listener.accept()[0].close()
"""

CONNECT = """
import socket, sys
host, port = sys.argv[1].split(":")
socket.create_connection((host, int(port))).close()
print("connected to", sys.argv[1])
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that holds no more than a page needs."""
    examples = tmp_path / "checkout" / "examples"
    examples.mkdir(parents=True)
    (examples / "serve.py").write_text(SERVE)
    (examples / "connect.py").write_text(CONNECT)
    return tmp_path / "checkout"


def run_page(text: str, checkout: Path, scratch: Path) -> int:
    page = checkout / "page.md"
    page.write_text(text)
    scratch.mkdir()
    with ReadmeSession(page, checkout=checkout, scratch=scratch) as session:
        return session.run()


def console(*lines: str) -> str:
    return "\n".join(["```console", *lines, "```", ""])


def test_a_page_runs_as_its_reader_would_run_it(checkout: Path, tmp_path: Path) -> None:
    assert run_page(PAGE, checkout, tmp_path / "scratch") == 5


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (console("$ false"), "'false' ended with exit code 1"),
        (console("$ echo one", "two"), "'echo one' did not show 'two'"),
        (console("$ echo b; echo a", "a", "b"), "did not show 'b'"),
        (console("echo one"), "a block starts with"),
        ("```python\nassert 1 == 2\n```\n", "AssertionError"),
        ("<!-- file: t.py -->\n```python\nx = 1\n```\n", r"never run: \['t.py'\]"),
        (console("$ sh -c 'exit 3' &", "$ wait $! || true"), "exit code 3"),
        (console("$ exit 4"), "ended the shell"),
    ],
)
def test_a_page_that_is_wrong_fails(
    page: str, says: str, checkout: Path, tmp_path: Path
) -> None:
    with pytest.raises(ReadmeFailureError, match=says):
        run_page(page, checkout, tmp_path / "scratch")


def test_every_block_is_of_a_kind_that_runs() -> None:
    fences = re.findall(r"^```(\S*)$", README.read_text(), re.MULTILINE)
    assert set(fences[::2]) <= {"console", "python", "diff"}


def test_the_change_that_the_readme_shows_is_that_of_the_examples() -> None:
    before, after = (
        [line.strip() for line in path.read_text().splitlines()]
        for path in (EXAMPLES / "digits_before.py", EXAMPLES / "digits_after.py")
    )
    (shown,) = re.findall(r"^```diff\n(.*?)^```", README.read_text(), re.M | re.S)
    lines = [line for line in shown.splitlines() if line.strip() != "..."]
    assert {line[2:] for line in lines if line[0] == "+"} == set(after) - set(before)
    assert {line[2:].strip() for line in lines if line[0] == " "} <= set(before)


def test_the_page_does_what_it_says(nursery: Nursery, tmp_path: Path) -> None:
    """The processes of its job start as a reader's do, those of the demo are forked."""
    with (
        forked_commands(nursery) as forked,
        ReadmeSession(
            README, checkout=CHECKOUT, scratch=tmp_path, commands_of_make=forked
        ) as session,
    ):
        assert session.run() >= 2
