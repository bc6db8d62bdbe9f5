"""All processes of a job are killed at once, and started again by the same lines."""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from pswire.exit_codes import ExitCode
from tests.doubles.children import Child, Nursery, kill, wait_until
from tests.doubles.free_addresses import free_address
from tests.fault.epochs_training import BATCH_SIZE, SAMPLE_COUNT

EPOCHS: Final = 4
WORKERS: Final = ("w0", "w1")
CLOCKS_OF_EPOCH: Final = SAMPLE_COUNT // BATCH_SIZE // len(WORKERS)
LAST_CLOCK: Final = EPOCHS * CLOCKS_OF_EPOCH

PACE_S: Final = 0.1
SCRIPT: Final = str(Path(__file__).with_name("epochs_training.py"))
GAN: Final = str(Path(__file__).with_name("gan_training.py"))


class WholeJob:
    """A job that is killed as a whole. A context manager: leaving it kills it.

    Attributes:
        lives: Of each start of all, its processes by name.
        killed: Processes that were replaced alone, by name.
        pace_s: Seconds that a step takes, of workers that are started from now on.
    """

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        *options: str,
        schedule: str = "step",
        every_steps: int = 4,
        script: str = SCRIPT,
        epochs: int = EPOCHS,
    ) -> None:
        self._script, self._epochs = script, epochs
        self._nursery = nursery
        self._folder = folder
        self._options = options
        self._schedule = schedule
        self._every_steps = every_steps
        self._address = str(free_address())
        self._shard_count = 0
        self.lives: list[dict[str, Child]] = []
        self.killed: list[tuple[str, Child]] = []
        self.pace_s = PACE_S

    def start(
        self,
        *,
        shard_count: int = 2,
        holds: Sequence[int] = (),
        holders: Collection[str] = WORKERS,
    ) -> None:
        """Starts everything, by lines that differ in nothing else.

        Args:
            shard_count: Shards.
            holds: Clocks at which workers stand still.
            holders: Which; the others go on as far as they can without them.
        """
        self.lives.append({})
        self._shard_count = shard_count
        self._start_coordinator()
        for index in range(shard_count):
            self._start_shard(index)
        for name in WORKERS:
            self._start_worker(name, holds=holds if name in holders else ())

    def replace(self, name: str, suffix: str) -> None:
        """SIGKILL of one process, and another by the same lines, under its name.

        Args:
            name: Which.
            suffix: Of the new one's files.
        """
        life = self.lives[-1]
        killed = life.pop(name)
        with suppress(ProcessLookupError):  # one that a failpoint has killed
            killed.send(signal.SIGKILL)
        killed.wait_end()
        self.killed.append((name, killed))
        if name == "coordinator":
            self._start_coordinator(suffix)
        elif name in WORKERS:
            self._start_worker(name, suffix)
        else:
            self._start_shard(int(name.removeprefix("shard-")), suffix)
        life[name] = life.pop(name + suffix)

    def kill(self) -> None:
        """SIGKILL of all processes, at once."""
        children = self.lives[-1].values()
        for child in children:
            with suppress(ProcessLookupError):  # one that a failpoint has killed
                child.send(signal.SIGKILL)
        for child in children:
            child.wait_end()

    def replace_shard(self, index: int) -> None:
        """SIGKILL of one shard, and another process in its place."""
        killed = self.lives[-1].pop(f"shard-{index}")
        killed.send(signal.SIGKILL)
        killed.wait_end()
        self._start_shard(index, suffix="-again")

    def lose_state(self) -> None:
        shutil.rmtree(self._folder / "state")

    def damage_state(self) -> str:
        """Kills the coordinator, overwrites its state, and has the job formed again.

        Returns:
            What the coordinator and `psserver form` say of that.
        """
        killed = self.lives[-1].pop("coordinator")
        killed.send(signal.SIGKILL)
        killed.wait_end()
        state = self._folder / "state" / "coordinator"
        (state / "job.sqlite").write_bytes(b"no database" * 100)
        refused = self._start_coordinator("-refused")
        assert refused.wait_end() == ExitCode.BAD_CONFIGURATION
        said = refused.log
        for name, flags in (("-plan", []), ("-formed", ["--yes"])):
            form = self._start(
                f"form{name}",
                *("-m", "psserver", "form", f"--listen={self._address}", *flags),
                *(f"--state-dir={state}", "--wait=30"),
                f"--checkpoint-dir={self._folder / 'checkpoints'}",
            )
            assert form.wait_end() == 0, form.log
            said += form.out
        for each in ("coordinator-refused", "form-plan", "form-formed"):
            del self.lives[-1][each]
        self.lives[-1]["coordinator"] = self._start_coordinator("-again")
        return said

    def wait_clock(self, clock: int) -> None:
        """Returns once a worker has reached a clock."""
        self.wait(
            lambda: any(each["clock"] >= clock for each in self.steps(-1)),
            f"clock {clock}",
        )

    def wait_told(self, clock: int) -> None:
        """Returns once all workers have told of a clock."""
        life = self.lives[-1]
        self.wait(
            lambda: all(
                any(each["clock"] == clock for each in life[name].events("step"))
                for name in WORKERS
            ),
            f"clock {clock} of all",
        )

    def wait_checkpoint(self, above: int = 0, *, file: str = "manifest.json") -> None:
        """Returns once there is a checkpoint of this version, or a newer one.

        Args:
            above: The version.
            file: What there is of it: by default all, `part-*` where it may wait for
                what scripts have registered.
        """
        self.wait(
            lambda: any(
                int(each.name[5:17]) >= above for each in self.checkpoints(file)
            ),
            f"a checkpoint of version {above}",
        )

    def checkpoints(self, file: str = "manifest.json") -> list[Path]:
        """Folders of checkpoints that have such a file, oldest first."""
        found = (self._folder / "checkpoints").glob(f"step-*/{file}")
        return sorted(each.parent for each in found)

    def wait_logged(self, text: str) -> None:
        """Returns once the coordinator has said something."""
        self.wait(lambda: text in self.log("coordinator"), text)

    def wait_held(self, count: int = 1) -> None:
        """Returns once all workers stand still, for this time."""
        life = self.lives[-1]
        self.wait(
            lambda: all(len(life[n].events("holds")) == count for n in WORKERS),
            "all to hold",
        )

    def go_on(self) -> None:
        """Has workers that stand still go on."""
        for name in WORKERS:
            self.lives[-1][name].send(signal.SIGUSR1)

    def ends(self) -> list[dict[str, Any]]:
        """What each worker says at its end."""
        life = self.lives[-1]
        self.wait(lambda: all(life[n].code is not None for n in WORKERS), "the end")
        assert [life[name].code for name in WORKERS] == [0, 0], self.logs()
        return [life[name].events("end")[0] for name in WORKERS]

    def steps(self, number: int) -> list[dict[str, Any]]:
        """Steps of one life, of all workers."""
        life = self.lives[number]
        return [each for name in WORKERS for each in life[name].events("step")]

    def joined(self, number: int) -> dict[str, Any]:
        """What the first worker says when it has joined."""
        return self.lives[number]["w0"].events("joined")[0]

    def log(self, name: str, number: int = -1) -> str:
        return self.lives[number][name].log

    def logs(self) -> str:
        life = self.lives[-1]
        return "\n".join(f"--- {n}\n{c.log[-4000:]}" for n, c in life.items())

    def __enter__(self) -> "WholeJob":
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.lives[-1].values() if self.lives else ():
            kill(child)

    def _start_coordinator(self, suffix: str = "") -> Child:
        return self._start(
            f"coordinator{suffix}",
            *("-m", "psserver", "coordinator", f"--listen={self._address}"),
            *(f"--shards={self._shard_count}", f"--min-workers={len(WORKERS)}"),
            *(f"--state-dir={self._folder / 'state' / 'coordinator'}", "--seed=5"),
            *(f"--checkpoint-dir={self._folder / 'checkpoints'}", "--lease-ttl=10"),
            f"--checkpoint-every={self._every_steps}steps",
            *self._options,
        )

    def _start_shard(self, index: int, suffix: str = "") -> None:
        state = self._folder / "state" / f"shard-{index}"
        self._start(
            f"shard-{index}{suffix}",
            *("-m", "psserver", "shard", f"--coordinator={self._address}"),
            *("--listen=127.0.0.1:0", f"--state-dir={state}"),
        )

    def _start_worker(
        self, name: str, suffix: str = "", *, holds: Sequence[int] = ()
    ) -> None:
        self._start(
            f"{name}{suffix}",
            *(self._script, str(self._epochs), str(self.pace_s)),
            *(self._schedule, *map(str, holds)),
            PS_COORDINATOR=self._address,
            PS_WORKER_ID=name,
        )

    def _start(self, name: str, *arguments: str, **environment: str) -> Child:
        folder = self._folder / f"life-{len(self.lives)}"
        folder.mkdir(exist_ok=True, parents=True)
        child = self._nursery.start(
            name, *arguments, folder=folder, environment=environment
        )
        self.lives[-1][name] = child
        return child

    def wait(self, is_over: Any, what: str) -> None:  # noqa: ANN401
        def is_so() -> bool:
            dead = [n for n, c in self.lives[-1].items() if c.code not in (None, 0)]
            assert not dead, f"{dead} ended before {what}:\n{self.logs()}"
            return bool(is_over())

        try:
            wait_until(is_so, what, 90)
        except AssertionError as error:
            error.add_note(self.logs())
            raise


UNDISTURBED: Final[dict[str, list[dict[str, Any]]]] = {}
"""By schedule, what the workers of a job say at its end to which nothing happens."""


def undisturbed(nursery: Nursery, folder: Path, schedule: str) -> list[dict[str, Any]]:
    if schedule not in UNDISTURBED:
        with WholeJob(nursery, folder, schedule=schedule) as job:
            job.start()
            UNDISTURBED[schedule] = job.ends()
    return UNDISTURBED[schedule]


def counted(job: WholeJob, bases: Sequence[int]) -> list[Counter[int]]:
    """By epoch, how often each sample is behind a step that the last life goes on from.

    Args:
        job: A job in BSP whose last life has come to its end.
        bases: Of each life after the first, the clock that it began at.
    """
    found = [Counter[int]() for _ in range(EPOCHS)]
    for number in range(len(job.lives)):
        until = bases[number] if number < len(bases) else LAST_CLOCK
        for step in job.steps(number):
            if step["clock"] <= until:
                found[step["epoch"]].update(step["samples"])
    return found


@pytest.mark.parametrize("schedule", ["step", "epoch"])
def test_a_job_killed_three_times_ends_as_if_nothing_had_happened(
    nursery: Nursery, tmp_path: Path, schedule: str
) -> None:
    """In the middle of an epoch, with its state lost, and at the end of an epoch."""
    expected = undisturbed(nursery, tmp_path / "undisturbed", schedule)
    # At each clock: what is held at one has no later step to be due by.
    with WholeJob(
        nursery, tmp_path / "killed", schedule=schedule, every_steps=len(WORKERS)
    ) as job:
        # With one worker's push of the next clock there or on its way.
        for clock in (CLOCKS_OF_EPOCH - 1, CLOCKS_OF_EPOCH + 3):
            job.start(holds=[clock], holders=("w0",))
            job.wait_told(clock)
            job.wait_checkpoint()
            job.kill()
        job.lose_state()
        end_of_epoch = 3 * CLOCKS_OF_EPOCH
        job.start(shard_count=3, holds=[end_of_epoch])
        job.wait_held()
        job.wait_checkpoint(end_of_epoch * len(WORKERS))
        job.kill()
        job.start(shard_count=3)
        ends = job.ends()
        bases = [job.joined(number)["clock"] for number in (1, 2, 3)]
        generations = [job.joined(number)["generation"] for number in range(4)]

        assert bases[2] == end_of_epoch
        assert job.joined(3)["epoch"] == 3
        assert sorted(generations) == generations
        assert 0 < bases[0] <= bases[1] < end_of_epoch
        once = Counter(range(SAMPLE_COUNT))
        assert counted(job, bases) == [once] * EPOCHS
        assert ends == expected


def test_a_gan_goes_on_from_between_two_batches(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Checkpoints are due at each clock, and every second is the middle of a batch."""
    with WholeJob(nursery, tmp_path / "undisturbed", script=GAN, epochs=2) as job:
        job.start()
        expected = job.ends()
    with WholeJob(
        nursery, tmp_path / "killed", every_steps=len(WORKERS), script=GAN, epochs=2
    ) as job:
        for clock in (5, 13):
            # Slowly, so that it does not end before it is killed. It can't be held: a
            # cut waits for who may step again on its batch.
            job.pace_s = 0.8
            job.start()
            job.wait_checkpoint()
            job.wait_clock(clock)
            job.kill()
        job.pace_s = PACE_S
        job.start()
        ends = job.ends()
        bases = [job.joined(number)["clock"] for number in (1, 2)]
        assert 0 < bases[0] <= bases[1] < LAST_CLOCK
        assert [base % 2 for base in bases] == [0, 0]
        assert ends == expected


def test_what_a_script_has_registered_goes_on_with_it(
    nursery: Nursery, tmp_path: Path
) -> None:
    """A schedule, noise and counters of its own, in the middle and near an end."""
    expected = undisturbed(nursery, tmp_path / "undisturbed", "registered")
    with WholeJob(nursery, tmp_path / "killed", schedule="registered") as job:
        # Held, so that a slow machine does not come to the end before it is killed.
        job.start(holds=(2 * CLOCKS_OF_EPOCH,))
        job.wait_checkpoint()
        job.wait_clock(CLOCKS_OF_EPOCH - 1)
        job.kill()
        job.start(holds=(LAST_CLOCK - 2,))
        job.wait_clock(1)
        base = job.joined(1)["clock"]
        job.wait_checkpoint(base * len(WORKERS) + 1)
        job.kill()
        job.lose_state()
        job.start(shard_count=3)
        ends = job.ends()

        assert 0 < base < job.joined(2)["clock"] < LAST_CLOCK
        assert all((each / "state.safetensors").exists() for each in job.checkpoints())
        assert ends == expected


@pytest.mark.parametrize("is_state_lost", [False, True])
def test_a_damaged_checkpoint_is_left_out_and_the_one_before_is_used(
    nursery: Nursery, tmp_path: Path, is_state_lost: bool
) -> None:
    with WholeJob(nursery, tmp_path, every_steps=len(WORKERS)) as job:
        job.start(holds=[CLOCKS_OF_EPOCH, 2 * CLOCKS_OF_EPOCH])
        for count in (1, 2):
            job.wait_held(count)
            job.wait_checkpoint(count * len(WORKERS) * CLOCKS_OF_EPOCH)
            if count == 1:
                job.go_on()
        job.kill()
        newest = job.checkpoints()[-1]
        part = next(newest.glob("part-*"))
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
        if is_state_lost:
            job.lose_state()
        job.start(holds=[2 * CLOCKS_OF_EPOCH])
        job.wait_held()
        assert newest.name in job.log("coordinator")
        assert "not those that were written" in job.log("coordinator")
        assert CLOCKS_OF_EPOCH <= job.joined(1)["clock"] < 2 * CLOCKS_OF_EPOCH
        before, after = (
            {(s["clock"], *s["samples"]) for s in job.steps(number)}
            for number in range(2)
        )
        assert after < before, "another batch than at the first time"


@pytest.mark.parametrize("mode", ["asp", pytest.param("ssp", marks=pytest.mark.repeat)])
def test_every_sample_is_seen_once_though_fast_workers_get_more(
    nursery: Nursery, tmp_path: Path, mode: str
) -> None:
    with WholeJob(nursery, tmp_path, f"--mode={mode}") as job:
        job.start(holds=[CLOCKS_OF_EPOCH + 2], holders=("w0",))
        job.wait_checkpoint()
        job.wait_clock(CLOCKS_OF_EPOCH + 2)
        job.kill()
        job.start()
        job.ends()
        told = [
            f"epoch {n} of 'loader' is over: of 48 positions 48 seen once"
            for n in range(EPOCHS)
        ]
        logs = job.log("coordinator", 0) + job.log("coordinator", 1)
        assert [each for each in told if each not in logs] == []
        assert logs.count("is over") - logs.count("48 seen once") == 0


@pytest.mark.parametrize(
    ("schedule", "first", "later"),
    [
        ("epoch", CLOCKS_OF_EPOCH - 1, CLOCKS_OF_EPOCH + 2),
        ("registered", CLOCKS_OF_EPOCH + 1, CLOCKS_OF_EPOCH + 3),
    ],
)
def test_a_job_whose_shard_is_killed_goes_on_in_the_same_processes(
    nursery: Nursery, tmp_path: Path, schedule: str, first: int, later: int
) -> None:
    """Another shard takes the place; all others live, and give up what they have.

    The checkpoint is of an epoch before the one that the workers are in, or of that.
    """
    expected = undisturbed(nursery, tmp_path / "undisturbed", schedule)
    with WholeJob(
        nursery, tmp_path / "killed", schedule=schedule, every_steps=2 * first
    ) as job:
        job.start(holds=[first, later])
        job.wait_held()
        job.wait_checkpoint(2 * first, file="part-*")
        job.go_on()
        job.wait_held(2)
        job.wait_checkpoint(2 * first)
        job.replace_shard(1)
        # Until then steps may still do without that shard, which may have no chunk.
        job.wait_logged("the job returns to checkpoint")
        job.go_on()
        for count in (3, 4):  # at both clocks again
            job.wait_held(count)
            job.go_on()
        assert job.ends() == expected
        log = job.log("coordinator")
        assert log.count("the job returns to checkpoint") == 1
        assert "generation 2 in bsp: w0/2, w1/2" in log
        for name in WORKERS:
            assert job.log(name).count("the job has returned to checkpoint step-") == 1
        told = [f"epoch {n} of 'loader' is over: of 48" in log for n in range(EPOCHS)]
        assert all(told)
        over_count = EPOCHS + (first < CLOCKS_OF_EPOCH)  # the first one again
        assert log.count("is over: of 48 positions 48 seen once") == over_count


def test_a_job_whose_coordinators_state_is_damaged_is_formed_in_the_same_processes(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Shards and workers live; the checkpoint is of an epoch before theirs."""
    first, later = CLOCKS_OF_EPOCH - 1, CLOCKS_OF_EPOCH + 2
    with WholeJob(nursery, tmp_path, every_steps=2 * first) as job:
        job.start(holds=[first, later])
        job.wait_held()
        job.wait_checkpoint(2 * first)
        job.go_on()
        job.wait_held(2)
        said = job.damage_state()
        # Until then the shards go on with what they have.
        for index in range(2):
            job.wait_logged(f"shard {index} registered")
        job.go_on()
        for count in (3, 4):  # at both clocks again
            job.wait_held(count)
            job.go_on()
        ends = job.ends()

        assert "job.sqlite in state folder" in said
        assert "go on from the newest checkpoint by `psserver form`" in said
        for index in range(2):
            assert (
                f"shard {index} lives, at clock {later} (version {2 * later})" in said
            )
        assert f"{2 * (later - first)} steps of all workers since" in said
        assert "nothing was changed; with --yes" in said
        state = tmp_path / "state" / "coordinator"
        kept = state / "damaged-1" / "job.sqlite"
        assert kept.read_bytes() == b"no database" * 100
        assert ends[0] == ends[1]
        log = job.log("coordinator")
        assert log.count("is over: of 48 positions 48 seen once") == EPOCHS


def shard_of(local: Child, index: int) -> int | None:
    """Process id of a shard that `psserver local` has started, if it runs."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            line = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if parent == local.pid and f"--index={index}".encode() in line:
            return int(folder.name)
    return None


def test_local_starts_a_killed_shard_again(nursery: Nursery, tmp_path: Path) -> None:
    """Also one that is killed again as soon as it is there."""
    address = str(free_address())
    local = nursery.start(
        "local",
        *("-m", "psserver", "local", "--shards=2", f"--listen={address}"),
        *(f"--state-dir={tmp_path / 'state'}", "--checkpoint-every=4steps"),
        *(f"--checkpoint-dir={tmp_path / 'checkpoints'}", "--lease-ttl=10"),
        folder=tmp_path,
        environment={},
    )
    worker = nursery.start(
        "w0",
        *(SCRIPT, "2", "0.6", "step"),
        folder=tmp_path,
        environment={"PS_COORDINATOR": address, "PS_WORKER_ID": "w0"},
    )
    try:
        wait_until(lambda: len(worker.events("step")) >= 12, "twelve steps", 90)
        first = shard_of(local, 1)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: shard_of(local, 1) not in (None, first), "a new one", 30)
        again = shard_of(local, 1)
        assert again is not None
        os.kill(again, signal.SIGKILL)
        assert worker.wait_end(90) == 0
        assert "the job has returned to checkpoint" in worker.log
        assert "shard 1 was killed by signal 9: it is started again now" in local.log
        assert "shard 1 was killed by signal 9: it is started again in 1 s" in local.log
        assert "are trained again: shard 1 was lost" in local.log
        assert "shard 0 (lost" not in local.log
        assert len(worker.events("end")) == 1
    except AssertionError as error:
        error.add_note(f"{local.log[-6000:]}\n{worker.log}")
        raise
    finally:
        kill(worker)
        kill(local)
