"""Lines of logs: their fields, their form, and the files that keep them."""

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pswire import logs

# Not below `pswire`, to which a connection of another test may have given handlers.
LOG = logging.getLogger("library")


class Terminal(io.StringIO):
    """Takes what is written."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def own_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of this test alone, with nothing known of the process."""
    root = logging.getLogger()
    for name in (logs.LOG_FORMAT_VARIABLE, logs.LOG_DIR_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(logs, "_known", {})
    monkeypatch.setenv("NO_COLOR", "1")
    yield
    for handler in root.handlers:
        handler.close()


def stderr(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> io.StringIO:
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in text.splitlines()]


def test_lines_have_what_is_known_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said = stderr(monkeypatch, io.StringIO())
    logs.configure_logs(role="shard")
    LOG.info("first")
    clock = 4
    logs.know(job="job-1", id=0, clock=lambda: clock)
    clock = 5
    LOG.warning("second %s", "text")
    first, second = parsed(said.getvalue())
    assert (first["event"], first["role"]) == ("first", "shard")
    assert not {"job", "id", "clock"} & first.keys()
    wanted = {"event": "second text", "level": "warning", "role": "shard"}
    assert second.items() >= {**wanted, "job": "job-1", "id": 0, "clock": 5}.items()


def test_other_threads_read_no_state_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = stderr(monkeypatch, io.StringIO())
    logs.configure_logs(role="shard")
    readers = []

    def clock() -> int:
        readers.append(threading.current_thread())
        return len(readers)

    logs.know(clock=clock)
    thread = threading.Thread(target=LOG.info, args=("from elsewhere",))
    thread.start()
    thread.join()
    assert readers == [threading.current_thread()]
    assert parsed(said.getvalue())[0]["clock"] == 1


@pytest.mark.parametrize(
    ("stream", "chosen", "is_json"),
    [
        (io.StringIO, "", True),
        (Terminal, "", False),
        (io.StringIO, "text", False),
        (Terminal, "json", True),
    ],
)
def test_text_for_people_and_json_for_programs(
    monkeypatch: pytest.MonkeyPatch,
    stream: type[io.StringIO],
    chosen: str,
    is_json: bool,
) -> None:
    said = stderr(monkeypatch, stream())
    monkeypatch.setenv(logs.LOG_FORMAT_VARIABLE, chosen)
    logs.configure_logs(role="shard")
    LOG.info("here")
    assert said.getvalue().startswith("{") == is_json
    assert "role" in said.getvalue()


def test_a_file_keeps_json_lines_and_does_not_grow_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stderr(monkeypatch, Terminal())
    monkeypatch.setenv(logs.LOG_DIR_VARIABLE, str(tmp_path / "logs"))
    monkeypatch.setattr(logs, "FILE_BYTES_MAX", 1000)
    logs.configure_logs(role="shard", name="shard-3")
    for number in range(200):
        LOG.info("line %d", number)
    files = sorted((tmp_path / "logs").iterdir())
    assert len(files) == logs.FILE_COUNT
    assert sum(file.stat().st_size for file in files) <= 1000 * logs.FILE_COUNT
    newest = parsed((tmp_path / "logs" / "shard-3.jsonl").read_text())
    assert newest[-1].items() >= {"event": "line 199", "role": "shard"}.items()


def test_a_folder_that_can_not_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(logs.LOG_DIR_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(logs.LogFolderError, match="choose another --log-dir"):
        logs.configure_logs(role="shard", name="shard-3")


def test_a_library_is_silent_once_its_user_has_configured_logging(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = stderr(monkeypatch, io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    handlers = logs.handlers_of("worker-0", {logs.LOG_DIR_VARIABLE: str(tmp_path)})
    monkeypatch.setattr(LOG, "handlers", [])
    logs.keep_library_logs((LOG.name,), handlers)
    LOG.warning("before")
    assert [each["event"] for each in parsed(said.getvalue())] == ["before"]

    of_user = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(of_user))
    LOG.warning("after")
    assert of_user.getvalue() == "after\n"
    assert "after" not in said.getvalue()
    kept = parsed((tmp_path / "worker-0.jsonl").read_text())
    assert [each["event"] for each in kept] == ["before", "after"]
    for handler in handlers:
        handler.close()


def test_an_error_never_steers_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said = stderr(monkeypatch, Terminal())
    logs.configure_logs(role="coordinator")
    try:
        raise ValueError("a name\x1b[2J")
    except ValueError:
        LOG.exception("failed")
    assert "\x1b" not in said.getvalue()
    assert said.getvalue().splitlines()[-1] == "ValueError: a name\\x1b[2J"
