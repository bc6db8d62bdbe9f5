"""With `--on-worker-loss wait` a run with losses is the run without, bit by bit."""

import hashlib
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pswire.exit_codes import ExitCode
from psworker import SnapshotReader
from tests.doubles.children import Nursery
from tests.integration.processes import Processes

TRAIN: Final = """
import torch, psworker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(96, 5)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=4, shuffle=True)
with psworker.connect(
    connect_timeout_s=60, step_timeout_s=60, start_timeout_s=60
) as ps:
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    for epoch in range(3):
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
"""

END_TIMEOUT_S: Final = 100.0

KILLS: Final = {
    "w0": ("worker.push_sent=kill@4", "worker.staged=kill@3"),
    "w1": (
        "worker.step=kill@3",
        "worker.in_barrier=kill@2",
        "worker.push_answered=kill@5",
    ),
}
NO_KILLS: Final[dict[str, tuple[str, ...]]] = {"w0": (), "w1": ()}


def test_a_run_with_five_kills_ends_in_the_same_bits(
    nursery: Nursery, tmp_path: Path
) -> None:
    clean = trained(nursery, tmp_path / "clean", NO_KILLS)
    assert clean == trained(nursery, tmp_path / "killed", KILLS)


def trained(nursery: Nursery, folder: Path, kills: dict[str, tuple[str, ...]]) -> str:
    """Trains with two workers; digest of the values, to the last bit.

    Args:
        nursery: Forks them.
        folder: For what the processes write.
        kills: Where each worker is killed; it is then started again under its id.
    """
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(TRAIN)
    with Processes(folder, nursery) as processes:
        processes.start_daemon(
            "coordinator",
            "coordinator",
            *("--shards=2", "--min-workers=2", "--lease-ttl=2", "--seed=7"),
            *("--on-worker-loss=wait", "--listen=127.0.0.1:0"),
        )
        coordinator = processes.address("coordinator")
        for name in ("shard-0", "shard-1"):
            processes.start_daemon(name, "shard", f"--coordinator={coordinator}")
            processes.address(name)

        def run(worker_id: str) -> None:
            points = kills[worker_id]
            for number, point in enumerate((*points, "")):
                name = f"{worker_id}-{number}"
                processes.start(
                    name,
                    str(script),
                    PS_COORDINATOR=coordinator,
                    PS_WORKER_ID=worker_id,
                    PS_FAILPOINT=point,
                )
                wanted = -signal.SIGKILL if point else ExitCode.DONE
                assert processes.code(name, END_TIMEOUT_S) == wanted

        with ThreadPoolExecutor() as threads:
            list(threads.map(run, kills))
        with SnapshotReader(coordinator) as reader:
            values = reader.latest().state_dict()
    digest = hashlib.sha256()
    for name, tensor in sorted(values.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()
