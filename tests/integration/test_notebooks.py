"""Workers in a running event loop, and in the cells of IPython."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integration.job import Job, connect
from tests.integration.processes import Processes

CELLS = r"""
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.showtraceback = lambda *_, **__: None
sys.stderr = sys.stdout


def cell(text):
    shell.run_cell(text, store_history=True)


cell('''
import torch, psworker
from torch import nn

def worker(worker_id=None):
    ps = psworker.connect(worker_id=worker_id)
    model = nn.Linear(2, 1)
    return ps, ps.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

def step(objects):
    model, optimizer = objects
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
''')
cell('ps, objects = worker("w0")')
cell('step(objects)')
cell('step(objects); 1 / 0')
cell('step(objects); print("clock", ps.clock)')
cell('ps, objects = worker("w0")')
cell('''
with ps:
    step(objects)
    1 / 0
''')
cell('print("closed", ps.is_closed); 1 / 0')
cell('''
ps, objects = worker("w1")
step(objects)
ps.close()
''')
cell('1 / 0')
print("end", flush=True)
"""


def test_a_worker_trains_inside_of_a_running_event_loop(tmp_path: Path) -> None:
    """As in a notebook, whose kernel has one in the same thread."""

    async def cell(job: Job) -> int:
        with connect(job, "w0") as ps:
            model = nn.Linear(2, 1)
            _, optimizer = ps.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                await asyncio.sleep(0)
            return ps.clock

    with Job(tmp_path, sockets=True) as job:
        assert asyncio.run(cell(job)) == 3


@pytest.mark.skipif(find_spec("IPython") is None, reason="IPython is not installed")
def test_cells_that_fail_or_run_again_say_what_becomes_of_the_worker(
    tmp_path: Path,
) -> None:
    with Job(tmp_path / "job", sockets=True) as job, Processes(tmp_path) as processes:
        processes.start("w", "-c", CELLS, PS_COORDINATOR=job.address)
        still = "psworker: worker w0 is still part of the job, and others may wait"
        assert processes.line("w", 90) == (
            f"psworker: connected to {job.address} as worker w0"
        )
        assert processes.line("w").startswith(still)
        assert processes.line("w") == "clock 3"
        assert processes.line("w") == (
            "psworker: closes the connection of worker w0, which an earlier cell made "
            "to the same job; give connect() worker ids that differ to keep both"
        )
        assert "as worker w0" in processes.line("w")
        assert processes.line("w") == (
            "psworker: worker w0 is no part of the job any more, which counts it as "
            "lost: connect() and prepare() again to go on"
        )
        assert processes.line("w") == "closed True", "and nothing more is said of it"
        assert "as worker w1" in processes.line("w")
        # One that has left is not mentioned. The job may tell of the one that was lost.
        while (line := processes.line("w")) != "end":
            assert not line.startswith("psworker:")
        assert processes.code("w") == 0
