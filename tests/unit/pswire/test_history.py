"""History files: where they are, what they hold, who may write them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pswire.history import HistoryFile, HistoryPathError, history_path


def opened(wanted: str, process: str = "shard-0") -> HistoryFile:
    return HistoryFile(wanted, process=process, job_id="job", facts={"shard": 0})


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ("run.jsonl", "run.jsonl"),
        ("runs/", "runs/worker-a%2Fb-1.jsonl"),
        ("runs/{process}.txt", "runs/worker-a%2Fb-1.txt"),
    ],
)
def test_many_processes_are_given_files_of_their_own(wanted: str, path: str) -> None:
    assert history_path(wanted, "worker-a/b-1") == Path(path)


def test_a_folder_that_is_there_needs_no_slash(tmp_path: Path) -> None:
    assert history_path(str(tmp_path), "shard-0") == tmp_path / "shard-0.jsonl"


def test_the_first_line_says_whose_it_is(tmp_path: Path) -> None:
    file = opened(f"{tmp_path}/new/")
    file.write("done", push=["w", 1, 2])
    file.close()
    file.write("done", push=["w", 1, 3])

    first, second = lines(tmp_path / "new" / "shard-0.jsonl")
    assert first["type"] == "begin"
    assert (first["format"], first["job"], first["process"]) == (1, "job", "shard-0")
    assert first["shard"] == 0
    assert first["pid"] == os.getpid()
    assert (second["type"], second["push"]) == ("done", ["w", 1, 2])


def test_a_process_that_starts_again_goes_on_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    opened(str(path)).close()
    with path.open("a") as file:
        file.write('{"type":"do')
    opened(str(path)).close()

    texts = path.read_text().splitlines()
    assert [json.loads(texts[i])["type"] for i in (0, 2)] == ["begin", "begin"]
    assert len(texts) == 3


def test_two_processes_do_not_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "h.jsonl")
    file = opened(path)
    with pytest.raises(HistoryPathError, match=r"another process.*{process}"):
        opened(path, "shard-1")
    file.close()
    opened(path).close()


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryPathError, match="no history can be written"):
        opened(str(tmp_path / "file" / "h.jsonl"))
    with pytest.raises(HistoryPathError, match="File name too long"):
        opened(str(tmp_path / ("n" * 300)))


def test_a_full_disk_ends_the_history_and_not_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    file = opened(str(tmp_path / "h.jsonl"))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._descriptor)
    os.close(full)

    file.write("done")
    file.write("done")

    assert len(caplog.records) == 1
    assert "the history" in caplog.text
    assert "No space left" in caplog.text


def test_a_forked_child_neither_writes_nor_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    script = f"""
import os, sys
from pswire.history import HistoryFile
file = HistoryFile({str(path)!r}, process="w", job_id="j", facts={{}})
read, write = os.pipe()
child = os.fork()
if not child:
    file.write("child")
    os.close(write)
    os.read(read, 1)
    os._exit(0)
file.close()
HistoryFile({str(path)!r}, process="w", job_id="j", facts={{}}).write("parent")
os.close(write)
os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert [line["type"] for line in lines(path)] == ["begin", "begin", "parent"]


def test_a_history_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "histories"
    before = os.umask(0)
    try:
        HistoryFile(f"{folder}/", process="w0", job_id="job", facts={}).close()
    finally:
        os.umask(before)

    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
