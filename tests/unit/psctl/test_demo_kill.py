import pytest
from typer.testing import CliRunner

from psctl.__main__ import app
from psctl.demo.kill import Kill, Role, parse_kill

RUN = CliRunner()


@pytest.mark.parametrize(
    ("text", "kill", "name"),
    [
        ("worker-1@40", Kill(Role.WORKER, 1, 40), "w1"),
        ("shard-0@7", Kill(Role.SHARD, 0, 7), "shard 0"),
        ("coordinator@100", Kill(Role.COORDINATOR, 0, 100), "coordinator"),
        ("coordinator-0@100", Kill(Role.COORDINATOR, 0, 100), "coordinator"),
    ],
)
def test_a_kill_is_read_as_it_is_written(text: str, kill: Kill, name: str) -> None:
    read = parse_kill(text, worker_count=3, shard_count=2)
    assert read == kill
    assert read.process_name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--kill worker-1@40"),
        ("worker@40", "which worker"),
        ("worker-1", "--kill worker-1@40"),
        ("reader-1@40", "--kill worker-1@40"),
        ("worker-1@-4", "--kill worker-1@40"),
        ("worker-1@0", "count from 1"),
        ("worker-3@40", "the last one is worker-2"),
        ("shard-2@40", "the last one is shard-1"),
        ("coordinator-1@40", "the last one is coordinator-0"),
    ],
)
def test_other_texts_are_refused_with_examples(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_kill(text, worker_count=3, shard_count=2)


def test_an_only_worker_cant_be_killed() -> None:
    with pytest.raises(ValueError, match="--workers 2"):
        parse_kill("worker-0@40", worker_count=1, shard_count=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kill", "worker-9@40"], "worker-2"),
        (["--kill", "everything"], "coordinator@40"),
        (["--staleness", "3"], "only --mode ssp has a bound"),
        (["--mode", "gossip"], "not one of bsp, ssp, asp"),
    ],
)
def test_the_command_line_refuses_them_as_usage(
    arguments: list[str], said: str
) -> None:
    refused = RUN.invoke(app, ["demo", *arguments])
    assert refused.exit_code == 2
    assert said in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes", "gossip"], "no mode to compare"),
        (["--modes", "bsp+2", "--workers", "2"], "more workers"),
        (["--loads", "noise"], "no load"),
    ],
)
def test_the_comparison_refuses_what_it_does_not_know(
    arguments: list[str], said: str
) -> None:
    refused = RUN.invoke(app, ["compare", *arguments])
    assert refused.exit_code == 2
    assert said in " ".join(refused.output.split())
