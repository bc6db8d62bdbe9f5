"""The pages of docs/ do what they say; `readme_session` says how their blocks run.

The processes that they start are forked. Those of README.md are not.
"""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psworker
from tests.doubles.children import Nursery
from tests.doubles.forked_commands import forked_commands
from tests.integration.job import Job
from tests.integration.readme_session import ReadmeSession

CHECKOUT = Path(__file__).resolve().parents[2]


SESSIONS = {"getting-started.md": 3, "data.md": 4, "formats.md": 5, "install.md": 1}
"""Pages that a reader follows in a shell, with the least number of their blocks."""


@pytest.mark.parametrize(
    ("name", "block_count"),
    [
        # What its scripts do, `test_other_formats.py` tries in one process.
        pytest.param(*page, marks=pytest.mark.repeat)
        if page[0] == "formats.md"
        else page
        for page in SESSIONS.items()
    ],
)
def test_the_page_does_what_it_says(
    name: str, block_count: int, nursery: Nursery, tmp_path: Path
) -> None:
    page = CHECKOUT / "docs" / name
    with (
        forked_commands(nursery) as forked,
        ReadmeSession(
            page, checkout=CHECKOUT, scratch=tmp_path, commands=forked
        ) as session,
    ):
        assert session.run() >= block_count


IN_A_SCRIPT = [
    "buffers.md",
    "checkpoints.md",
    "clipping.md",
    "compression.md",
    "errors.md",
    "optimizers.md",
    "overlap.md",
    "privacy.md",
    "psctl.md",
    "sparse.md",
    "strategies.md",
]
"""Pages whose blocks are parts of a script, such as one call of `prepare`."""


def test_every_block_that_could_run_is_of_a_page_that_runs() -> None:
    blocks = {
        (page.name, kind)
        for page in (CHECKOUT / "docs").rglob("*.md")
        for kind in re.findall(r"^ *```(python|console)$", page.read_text(), re.M)
    }
    assert {name for name, _ in blocks} == SESSIONS.keys() | set(IN_A_SCRIPT)
    assert {name for name, kind in blocks if kind == "console"} == SESSIONS.keys()


def made_before() -> dict[str, object]:
    """What a script has before the part that a page shows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
    train_set = TensorDataset(torch.rand(64, 64), torch.randint(10, (64,)))
    return {
        "psworker": psworker,
        "torch": torch,
        "nn": nn,
        "DataLoader": DataLoader,
        "TensorDataset": TensorDataset,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "train_set": train_set,
        "loader": DataLoader(train_set, batch_size=32),
        "criterion": nn.CrossEntropyLoss(),
        "EPOCHS": 2,
        "loss": torch.tensor(0.5),
    }


def test_what_others_scripts_become_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that stay and those that are added; other systems are not installed."""
    monkeypatch.delenv("PS_COORDINATOR", raising=False)
    page = (CHECKOUT / "docs" / "coming-from.md").read_text()
    changes = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(changes) == 4
    for change in changes:
        lines = [line for line in change.splitlines() if line[0] in "+ "]
        given = made_before()
        exec("\n".join(line[2:] for line in lines), given)
        connection = given["ps"]
        assert isinstance(connection, psworker.LocalConnection)
        connection.close()


@pytest.mark.parametrize("name", IN_A_SCRIPT)
def test_the_parts_of_a_script_that_a_page_shows_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with what a script has made before: alone, or as a worker."""
    given = made_before()
    page = Sybil(parsers=[PythonCodeBlockParser()]).parse(CHECKOUT / "docs" / name)
    examples = list(page.examples())
    assert examples
    with ExitStack() as opened:
        connects = name in ("privacy.md", "strategies.md")  # each time to a new job
        if not connects:
            given["ps"] = opened.enter_context(psworker.connect())
        page.namespace.update(given)
        for number, example in enumerate(examples):
            if connects and "psworker.connect(" in example.parsed:
                job = opened.enter_context(Job(tmp_path / str(number)))
                monkeypatch.setenv("PS_COORDINATOR", job.address)
            example.evaluate()
