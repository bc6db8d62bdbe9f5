"""Settings: the flag wins over the variable, the variable over the job's file."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import psworker
from psctl.__main__ import app as psctl_app
from psserver.__main__ import app as psserver_app
from pswire.config_file import (
    SHARED_KEYS,
    ConfigFileError,
    read_settings,
    variable_of,
)
from pswire.config_options import ConfiguredGroup, options_of
from psworker.__main__ import app as psworker_app
from psworker.config import CONNECT_KEYS, RUN_KEYS, settings, timeout_s
from psworker.connecting import find_worker_id

APPS = {"psserver": psserver_app, "psworker": psworker_app, "psctl": psctl_app}
RUN = CliRunner()
JOB = """
[job]
coordinator = "10.0.0.1:7070"
tls_ca = "ca.pem"
verbose = true

[coordinator]
shards = 3
min-workers = 2
limit = ["calls=100", "idle_s=3"]

[local]
mode = "ssp"
min_workers = 1

[shard]
threads = 2

[worker]
nproc = 4
worker_id = "w7"
step_timeout_s = 30
shared_memory = false

[psctl]
timeout = 12.5
"""


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also undoes what a command or `settings` sets for the processes it starts."""
    for name in ("CONFIG", "COORDINATOR", "TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN"):
        monkeypatch.setenv(f"PS_{name}", "")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def group_of(program: str) -> ConfiguredGroup:
    group = typer.main.get_command(APPS[program])
    assert isinstance(group, ConfiguredGroup)
    return group


def shown(path: Path, role: str, *arguments: str) -> dict[str, dict[str, Any]]:
    words = ["config", "show", f"--config={path}", f"--role={role}", "--json"]
    done = RUN.invoke(psctl_app, [*words, "--", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)[role]
    return found


def test_a_flag_wins_over_a_variable_and_that_over_the_file(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shards(*arguments: str) -> dict[str, Any]:
        return shown(job, "coordinator", *arguments)["shards"]

    assert shards() == {"value": 3, "source": f"{job}: [coordinator] shards"}
    monkeypatch.setenv("PS_SHARDS", "5")
    assert shards() == {"value": 5, "source": "PS_SHARDS"}
    assert shards("--shards=7") == {"value": 7, "source": "--shards"}


def test_the_daemon_gets_what_config_show_says(
    job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    got: list[Any] = []
    monkeypatch.setattr("psserver.local.run_local", lambda *a, **k: got.append((a, k)))
    monkeypatch.setattr("psserver.__main__._run", lambda *a, **k: None)

    done = RUN.invoke(
        psserver_app,
        ["local", f"--config={job}", f"--state-dir={tmp_path}", "--no-verbose"],
        catch_exceptions=False,
    )

    assert done.exit_code == 0, done.output
    (((config, job_arguments, *_), options),) = got
    assert (config.shard_count, config.workers_min, config.mode.label) == (3, 1, "ssp")
    assert (config.limits.calls, config.limits.idle_s) == (100, 3.0)
    assert options["verbose"] is False
    assert "--no-staleness-scaling" in job_arguments


def test_sections_of_all_roles_and_their_order(job: Path) -> None:
    assert shown(job, "local")["mode"]["value"] == "ssp"
    assert shown(job, "local")["shards"]["value"] == 3
    assert shown(job, "local")["min_workers"]["value"] == 1
    assert shown(job, "coordinator")["min_workers"]["value"] == 2
    assert shown(job, "coordinator")["mode"] == {"value": "bsp", "source": "default"}
    shard = shown(job, "shard")
    assert shard["threads"]["value"] == 2
    assert shard["coordinator"]["source"] == f"{job}: [job] coordinator"
    assert shown(job, "psctl")["timeout"]["value"] == 12.5
    worker = shown(job, "worker")
    assert worker["nproc"]["value"] == 4
    assert worker["step_timeout_s"]["value"] == "30"
    assert worker["start_timeout_s"]["source"] == "default"


def test_without_a_role_all_that_is_set_is_shown(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_LEASE_TTL", "2.5")
    done = RUN.invoke(psctl_app, ["config", "show", f"--config={job}"])
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines()[1:]]
    assert ["coordinator", "lease_ttl", "2.5", "PS_LEASE_TTL"] in rows
    assert ["worker", "nproc", "4", f"{job}: [worker] nproc"] in rows
    assert "default" not in done.stdout.split()


def test_secrets_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[coordinator]\ncheckpoint_dir = "s3://me:/hunter2@bucket/x"\n')
    monkeypatch.setenv("PS_TOKEN", "hunter3")
    for words in ([], ["--json"], ["--role=coordinator"], ["--role=worker"]):
        done = RUN.invoke(psctl_app, ["config", "show", f"--config={path}", *words])
        assert done.exit_code == 0, done.output
        assert "hunter" not in done.output
        assert "PS_TOKEN" in done.output


WRONG = [
    ("[coordinator]\nshard = 2", "no setting 'shard': did you mean 'shards'?"),
    ("[cordinator]\nshards = 2", r"no section \[cordinator\]: did you mean 'coord"),
    ("[job]\nshards = 2", r"\[job\] has no setting 'shards': it belongs to \[coordin"),
    ("[job]\ntoken = 'x'", "no setting 'token': did you mean 'tokens'?"),
    ("shards = 2", "'shards' stands outside of any section"),
    ("[coordinator]\nshards = 'two'", "shards: 'two' is not a whole number from 1"),
    ("[coordinator]\nshards = true", "shards is true, and a text or a number is exp"),
    ("[coordinator]\nshards = [2]", r"shards is \[2\], and a text or a number is exp"),
    ("[coordinator]\nshards = 2.5", "shards: '?2.5'? is not a whole number"),
    ("[coordinator]\nmode = 3", "mode: '3' is not one of bsp, ssp, asp"),
    ("[coordinator]\nverbose = 1", "verbose is 1, and true or false is expected"),
    ("[coordinator]\nlimit = [1]", r"limit is \[1\], and a list of texts is expected"),
    ("[coordinator]\nlease-ttl = 1\nlease_ttl = 2", "which are the same: leave one"),
    ("[coordinator]\nshards 2", "is no TOML: .*line 2"),
    ("[coordinator]\nlimit = " + 10_000 * "[", "is no TOML: "),
    ("[coordinator]\nyes = true", "no setting 'yes'"),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_a_wrong_file_is_refused_with_its_place(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    words = [f"--config={path}", f"--state-dir={tmp_path}"]
    assert_refused(RUN.invoke(psserver_app, ["coordinator", *words]), path, said)
    words = [f"--config={path}", "--role=coordinator"]
    assert_refused(RUN.invoke(psctl_app, ["config", "show", *words]), path, said)


def assert_refused(done: Result, path: Path, said: str) -> None:
    text = " ".join(done.stderr.split())
    assert done.exit_code == 2, done.output
    assert f"Invalid value for --config: {path}" in text
    assert re.search(said, text), text


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    words = ["status", f"--config={tmp_path / 'none.toml'}"]
    done = RUN.invoke(psctl_app, words)
    assert done.exit_code == 2
    assert "No such file" in done.stderr


def test_each_program_leaves_the_sections_of_others_alone(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[worker]\nnprocs = 2\n")
    keys = group_of("psserver").known_keys()
    assert read_settings(path, ("job", "shard"), keys) == {}
    with pytest.raises(ConfigFileError, match="did you mean 'nproc'"):
        read_settings(path, ("job", "worker"), group_of("psworker").known_keys())


def all_options() -> Iterator[tuple[str, Any]]:
    for program in APPS:
        for words, command in group_of(program).leaves():
            for option in options_of(command):
                yield " ".join((program, *words)), option


def test_every_option_has_the_variable_of_its_name() -> None:
    found = list(all_options())
    assert len(found) > 150
    for command, option in found:
        key = max(option.opts, key=len).removeprefix("--").replace("-", "_")
        wanted = "PS_LIMITS" if key == "limit" else variable_of(key)
        assert option.envvar == wanted, (command, key)
        assert option.secondary_opts or not option.is_flag


def test_what_all_share_is_an_option_or_setting_of_several() -> None:
    known = {
        key for p in APPS for keys in group_of(p).known_keys().values() for key in keys
    }
    assert known >= SHARED_KEYS
    run = dict(group_of("psworker").leaves())[("run",)]
    keys = {max(o.opts, key=len).strip("-").replace("-", "_") for o in options_of(run)}
    assert keys - CONNECT_KEYS.keys() == RUN_KEYS


def test_a_script_reads_the_same_file(job: Path) -> None:
    environ = {"PS_CONFIG": str(job), "PS_WORKER_ID": ""}
    found = settings(environ)
    assert found["PS_COORDINATOR"] == "10.0.0.1:7070"
    assert find_worker_id(None, found) == "w7"
    assert found["PS_SHARED_MEMORY"] == "0"
    assert timeout_s("step_timeout_s", None, found) == 30.0
    assert timeout_s("step_timeout_s", 5.0, found) == 5.0
    assert timeout_s("start_timeout_s", None, found) == 3600.0

    found = settings({**environ, "PS_WORKER_ID": "w1", "PS_STEP_TIMEOUT_S": "7"})
    assert find_worker_id(None, found) == "w1"
    assert timeout_s("step_timeout_s", None, found) == 7.0
    with pytest.raises(psworker.ConfigurationError, match="PS_STEP_TIMEOUT_S: 'soon'"):
        timeout_s("step_timeout_s", None, {"PS_STEP_TIMEOUT_S": "soon"})


def test_a_script_takes_what_it_proves_itself_with_from_the_file(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_CONFIG", str(job))
    settings()
    assert os.environ["PS_TLS_CA"] == os.path.abspath("ca.pem")

    monkeypatch.setenv("PS_TLS_CA", "other.pem")
    settings()
    assert os.environ["PS_TLS_CA"] == "other.pem"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "step_timout_s = 3",
            "no setting 'step_timout_s': did you mean 'step_timeout_s'",
        ),
        ("step_timeout_s = -1", "step_timeout_s: .*number of seconds"),
        ("coordinator = 'nowhere'", "coordinator: 'nowhere' is no address"),
        ("shared_memory = 'no'", "shared_memory is .no., and true or false"),
        ("worker_id = 'a\\nb'".replace("'", '"'), "control character"),
    ],
)
def test_a_script_refuses_a_wrong_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"[worker]\n{text}\n")
    monkeypatch.setenv("PS_CONFIG", str(path))
    with pytest.raises(psworker.ConfigurationError, match=f"job.toml: .*{said}"):
        psworker.connect()


def test_a_script_reads_the_file_without_a_parser_of_commands() -> None:
    program = "import psworker.config, sys; print('typer' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n", done.stderr
