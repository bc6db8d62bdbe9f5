"""`psctl replay` on what real shards have recorded, one of which was killed."""

import json
import signal
from pathlib import Path
from typing import Final

from safetensors.torch import load_file

from pswire.exit_codes import ExitCode
from tests.doubles.children import Nursery
from tests.integration.processes import Processes

WORKER: Final = """
import torch, psworker
torch.manual_seed(1)
model = torch.nn.Linear(40, 30)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with psworker.connect() as ps:
    model, optimizer = ps.prepare(model, optimizer)
    while True:
        optimizer.zero_grad()
        model(torch.ones(4, 40)).square().mean().backward()
        optimizer.step()
        print("pushed", flush=True)
"""
PUSH_COUNT: Final = 30


def psctl(processes: Processes, *arguments: str) -> tuple[int, str]:
    processes.start("psctl", "-m", "psctl", "replay", *arguments)
    code = processes.code("psctl")
    return code, "\n".join(processes.lines("psctl"))


def test_a_shard_that_was_killed_is_replayed_to_what_it_had_applied(
    tmp_path: Path, nursery: Nursery
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    folder = tmp_path / "recordings"
    with Processes(tmp_path, nursery) as processes:
        processes.start_daemon(
            "coordinator",
            *("coordinator", "--listen=127.0.0.1:0", "--shards=2", "--mode=asp"),
            "--min-workers=2",
        )
        address = processes.address("coordinator")
        for index in range(2):
            processes.start_daemon(
                f"shard-{index}",
                *("shard", f"--coordinator={address}", f"--index={index}"),
                f"--record={folder}",
            )
        for name in ("w0", "w1"):
            where = {"PS_COORDINATOR": address, "PS_WORKER_ID": name}
            processes.start(name, str(script), **where)
        for _ in range(PUSH_COUNT):
            processes.line("w0")
        processes.send("shard-0", signal.SIGKILL)
        for name in ("w0", "w1"):
            processes.send(name, signal.SIGKILL)
            processes.code(name)
        processes.send("shard-1", signal.SIGTERM)
        assert processes.code("shard-1") == ExitCode.DONE
        acknowledged = sum(len(processes.lines(name)) for name in ("w0", "w1"))

        code, text = psctl(processes, str(folder), "--json", "--show")
        assert code == ExitCode.DONE, processes.log("psctl")
        found = json.loads(text)
        killed, other = found["shards"]
        assert killed["ending"].startswith("to the last ")
        assert other["ending"] == "to the end"
        assert (killed["difference"], killed["damage"]) == ("", "")
        # Each push that a worker has said is in it, and what each had under way.
        assert acknowledged <= killed["version"] <= acknowledged + 2
        # But for one that stood still on its way.
        outcomes = [row["outcome"] for row in found["pushes"] if row["outcome"]]
        assert outcomes[:PUSH_COUNT] == ["applied"] * PUSH_COUNT

        same = min(killed["version"], other["version"])
        out = tmp_path / "model.safetensors"
        code, text = psctl(
            processes, str(folder), f"--until={same}", f"--out={out}", "--norm=1e-9"
        )
        assert code == ExitCode.DONE, processes.log("psctl")
        assert "shard 0: replayed up to --until, entry" in text
        assert "all values: SHA-256" in text
        assert "first update beyond norm 1e-09: clock 1: push 1 of w" in text
        assert load_file(out)["weight"].shape == (30, 40)

        code, text = psctl(processes, str(folder), "--until=soon")
        assert code == ExitCode.USAGE
        assert "neither a version" in processes.log("psctl")
