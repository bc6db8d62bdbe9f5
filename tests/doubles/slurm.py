"""A Slurm of one node, for as long as a test lasts."""

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Final, Self

from tests.debian import require
from tests.doubles.children import wait_until

START_TIMEOUT_S: Final = 30.0
END_TIMEOUT_S: Final = 20.0

CONFIGURATION: Final = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=15
SchedulerParameters=sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class Slurm:
    """A controller, a node and munge. A context manager: leaving it ends them.

    Attributes:
        environment: Of commands that shall find this Slurm.
    """

    def __init__(self, folder: Path) -> None:
        require("munge", "munged")
        require("slurm-wlm", "slurmctld")
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Self:
        folder = self._folder
        folder.chmod(0o755)
        for name in ("controller", "node"):
            (folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        with (
            socket.create_server(("127.0.0.1", 0)) as first,
            socket.create_server(("127.0.0.1", 0)) as second,
        ):
            ports = [each.getsockname()[1] for each in (first, second)]
        text = CONFIGURATION.format(
            host=host,
            folder=folder,
            controller_port=ports[0],
            node_port=ports[1],
            cpus=os.cpu_count(),
        )
        (folder / "slurm.conf").write_text(text)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        self._start(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
        )
        wait_until((folder / "munge.socket").exists, "munge listening", START_TIMEOUT_S)
        self._start("slurmctld", "-D", "-c")
        self._start("slurmd", "-D", "-c", "-N", host)
        wait_until(self._is_idle, "a node that is idle", START_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if error is not None:
            for log in self._folder.glob("*.log"):
                error.add_note(f"--- {log.name}\n{log.read_text()}")
        self.run("scancel", "--full", "--signal=KILL", "--user=root", check=False)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=END_TIMEOUT_S,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """The fields of a job that are words, as `scontrol show job` prints them."""
        text = self.run("scontrol", "show", "job", job)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def _is_idle(self) -> bool:
        for daemon in self._daemons:
            assert daemon.poll() is None, f"{daemon.args!r} ended"
        return self.run("sinfo", "--noheader", "--format=%t", check=False).strip() == (
            "idle"
        )

    def _start(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            )
