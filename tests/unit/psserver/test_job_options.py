"""Options of a job: declared once, taken by two commands, written down again."""

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from psserver.__main__ import Commands, app
from psserver.config import ListenConfig
from psserver.edge.checkpoint_interval import CheckpointInterval
from psserver.edge.coordinator_settings import ShardLossPolicy
from psserver.job_options import (
    JobOptions,
    takes_job_options,
)
from pswire.addresses import Address
from pswire.membership import LossPolicy, Mode, StepAtomicity

RUN = CliRunner()

FULL = JobOptions(
    shards=3,
    mode=Mode.SSP.label,
    staleness=5,
    min_workers=4,
    on_worker_loss=LossPolicy.WAIT.label,
    on_shard_loss=ShardLossPolicy.FAIL.label,
    step_atomicity=StepAtomicity.CLOCK.label,
    backup_workers=1,
    staleness_scaling=True,
    delay_compensation=0.04,
    chunk_kib=256,
    lease_ttl=2.5,
    checkpoint_dir="checkpoints",
    checkpoint_every="500steps",
    checkpoint_keep=5,
    seed=7,
)


def parsed(arguments: list[str]) -> JobOptions:
    """The options as a command of its own reads them."""
    probe = typer.Typer(cls=Commands)
    found: list[JobOptions] = []

    @probe.callback()
    def program() -> None: ...

    @probe.command("coordinator")
    @takes_job_options
    def command(*, job: JobOptions) -> None:
        found.append(job)

    done = RUN.invoke(probe, ["coordinator", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return found[0]


@pytest.mark.parametrize("given", [JobOptions(shards=1), FULL])
def test_options_survive_the_command_line_of_another_process(
    given: JobOptions,
) -> None:
    assert parsed(given.arguments()) == given


@pytest.mark.parametrize("command", ["coordinator", "local"])
def test_both_commands_take_them(command: str) -> None:
    shown = RUN.invoke(app, [command, "--help"]).output
    for option in FULL.arguments():
        assert option.split("=")[0] in shown


def test_the_lease_becomes_milliseconds() -> None:
    listen = ListenConfig(address=Address("127.0.0.1", 0))
    assert FULL.config(listen, Path("state")).lease_ttl_ms == 2500


def test_a_folder_of_checkpoints_is_one_path_for_all_processes() -> None:
    listen = ListenConfig(address=Address("127.0.0.1", 0))

    def url(given: str) -> str:
        options = replace(FULL, checkpoint_dir=given)
        settings = options.config(listen, Path("state")).job_settings(
            job_id="job", job_seed=0
        )
        assert settings.checkpoints is not None
        assert settings.checkpoints.interval == CheckpointInterval(step_count=500)
        assert settings.checkpoints.keep_count == 5
        return settings.checkpoints.url

    assert url("checkpoints") == str(Path("checkpoints").absolute())
    assert url("file:///data/run") == "/data/run"
    assert url("s3://bucket/run") == "s3://bucket/run"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "nonsense"],
        ["--shards", "1", "--on-worker-loss", "panic"],
        ["--shards", "1", "--lease-ttl", "nan"],
        ["--shards", "1", "--lease-ttl", "inf"],
        ["--shards", "1", "--chunk-kib", "1.5"],
        ["--shards", "1", "--checkpoint-dir", "c", "--checkpoint-every", "10"],
        ["--shards", "1", "--checkpoint-dir", "c", "--checkpoint-keep", "0"],
        ["--shards", "1", "--checkpoint-every", "10min"],
        ["--shards", "1", "--checkpoint-keep", "2"],
    ],
)
def test_wrong_use_is_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    command = ["coordinator", f"--state-dir={tmp_path / 'state'}", *arguments]
    assert RUN.invoke(app, command).exit_code == 2
    assert not (tmp_path / "state").exists()
