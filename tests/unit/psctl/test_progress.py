"""What long work says on stderr: a bar on a terminal, lines in a pipe."""

import io
import sys
from pathlib import Path

import pytest

from psctl import progress
from psctl.progress import is_animated, working
from pswire.checkpoint.folder import CheckpointFolder
from tests.doubles.checkpoints import save


def test_in_a_pipe_one_line_says_what_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with working("reading it", 100) as work:
        work.advance(100)
        work.update(100, 100)
    assert capsys.readouterr().err == "psctl: reading it\n"


def test_in_a_pipe_the_end_of_long_work_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LONG_S", 0.0)
    with working("reading it"):
        pass
    assert (
        capsys.readouterr().err
        == "psctl: reading it\npsctl: reading it: done in 0:00\n"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_is_there_until_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    assert is_animated()
    assert not is_animated({"TERM": "dumb"})
    with working("reading it") as work:
        work.update(3 << 20, 6 << 20)
        work.advance(1 << 20)
    assert "reading it" in shown.getvalue()
    assert "4.2/6.3 MB" in shown.getvalue() or "4.0/6.0 MiB" in shown.getvalue()


def test_every_byte_of_a_checkpoint_is_counted_once(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path / "runs"))
    folder.claim("job", "token")
    save(folder, 100)
    (name,) = folder.names()
    counts: list[int] = []
    folder.on_read = counts.append
    assert folder.verify(name) == ()
    parts = folder.manifest(name).parts
    assert sum(counts) == sum(part.byte_count for part in parts)
