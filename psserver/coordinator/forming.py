"""`psserver form`: a job whose coordinator has lost its state goes on.

What is in the state folder alone, such as which data is used, no shard knows: a job of
which every sample is to be seen once an epoch goes on from its newest checkpoint, which
has all of it as of one cut. Values of shards that live are given up for that, so that
it is said first, and done only when it is asked for.
"""

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from psserver.config import ListenConfig
from psserver.coordinator.core.start_point import SavedJob
from psserver.coordinator.host.restored_job import newest_saved
from psserver.coordinator.rpc.living_shards import LivingShard, LivingShards
from psserver.coordinator.storage.job_store import (
    DATABASE,
    IDENTITY,
    WRITE_AHEAD_LOG,
    DamagedStateError,
    JobStore,
)
from psserver.edge.access import Access, watch_tokens
from psserver.edge.descriptors import descriptors, fitted
from psserver.edge.lifecycle import bind, stop
from psserver.edge.limits import DEFAULT_LIMITS, Limits
from psserver.edge.open_calls import OpenCalls
from psserver.edge.server import ServerKind, make_server
from psserver.edge.state_folder import StateFolderError, held_folder
from pswire.checkpoint.errors import MissingError
from pswire.checkpoint.folder import CheckpointFolder
from pswire.checkpoint.storage import Disk
from pswire.names import printable

SCHEMA_VERSION: Final = 1

_FILES: Final = (
    DATABASE,
    WRITE_AHEAD_LOG,
    f"{DATABASE}-shm",
    f"{IDENTITY}.new",
    IDENTITY,
)
"""In the order in which they are set aside: after each of them a coordinator finds the
folder damaged still, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormingPlan:
    """How a job goes on.

    Attributes:
        state_dir: State folder of its coordinator.
        problem: What is wrong with it; empty where it has no job.
        checkpoint_dir: Folder of the checkpoints, for people.
        saved: The job as the newest good one has it.
        shards: Shards of it that live.
    """

    state_dir: Path
    problem: str
    checkpoint_dir: str
    saved: SavedJob
    shards: tuple[LivingShard, ...]

    @property
    def lost_steps(self) -> int | None:
        """Steps of all workers that are trained again, as far as shards have said."""
        versions = [each.version for each in self.shards if each.version is not None]
        if not versions:
            return None
        return max(0, max(versions) - self.saved.point.version)

    def figures(self, set_aside: Path | None) -> dict[str, object]:
        """For programs."""
        point = self.saved.point
        return {
            "schema_version": SCHEMA_VERSION,
            "state_dir": str(self.state_dir),
            "problem": self.problem or None,
            "job_id": self.saved.job_id,
            "checkpoint": {
                "url": self.checkpoint_dir,
                "name": point.place.name,
                "clock": point.clock,
                "version": point.version,
            },
            "shards": [asdict(each) for each in self.shards],
            "lost_steps": self.lost_steps,
            "set_aside": None if set_aside is None else str(set_aside),
        }

    def text(self) -> str:
        """For people."""
        state = self.problem or f"state folder {self.state_dir} has no job"
        lines = [
            state,
            f"job {self.saved.job_id} can go on from {self.saved.point} in "
            f"{self.checkpoint_dir}, every byte of which was read",
            *map(_shard_text, self.shards),
        ]
        if not self.shards:
            lines.append(
                "no shard of it has called: none lives that knows this address"
            )
        elif self.lost_steps is None:
            lines.append("what they have trained since is trained again")
        else:
            lines.append(
                f"{self.lost_steps} steps of all workers since are trained again: the "
                "shards give up their values and load those of the checkpoint, and "
                "workers that live join again by themselves"
            )
        return "\n".join(lines)


async def form(
    *,
    listen: ListenConfig,
    state_dir: Path,
    checkpoint_url: str,
    wait_s: float,
    is_wanted: bool,
    as_json: bool,
    limits: Limits = DEFAULT_LIMITS,
) -> None:
    """Says how a job goes on without its coordinator's state, and prepares it.

    Args:
        listen: Where its coordinator listens, which is where its shards call.
        state_dir: State folder of its coordinator.
        checkpoint_url: Folder of its checkpoints.
        wait_s: Longest wait for shards that live.
        is_wanted: Whether to do it.
        limits: What callers may make it hold.
        as_json: Whether to say it for programs.

    Raises:
        CheckpointError: There is no good checkpoint, or the folder can't be read.
        OptionError: It would listen beyond loopback.
        ConfigurationError: The address can't be bound.
        StateFolderError: The state is whole, of another job than the checkpoints or
            than the shards that call, or in use.
    """
    listen.validate()
    with held_folder(state_dir):
        problem = _problem_of(state_dir)
        folder = CheckpointFolder(checkpoint_url)
        saved = await asyncio.to_thread(newest_saved, folder, checkpoint_url)
        if saved is None:
            raise MissingError(
                f"there are no checkpoints in {folder.url}: without one the job can't "
                "go on from anywhere. Put the state folder's files back from a copy; "
                "shards that live keep their values until then"
            )
        shard_count = folder.manifest(saved.point.place.name).shard_count
        plan = FormingPlan(
            state_dir=state_dir,
            problem=problem,
            checkpoint_dir=folder.url,
            saved=saved,
            shards=await _living_shards(
                listen, saved.job_id, shard_count, wait_s, limits
            ),
        )
        set_aside = _set_aside(state_dir) if is_wanted and problem else None
    if as_json:
        print(json.dumps(plan.figures(set_aside), indent=2))
        return
    print(plan.text())
    if set_aside is not None:
        print(f"the damaged files are in {set_aside} now")
    if is_wanted or not problem:
        print("start the coordinator by its command line, and the job goes on so")
    else:
        print(
            "nothing was changed; with --yes the damaged files are set aside for that"
        )


def _problem_of(state_dir: Path) -> str:
    """What is wrong with a state folder, in words; empty where it has no job.

    Raises:
        StateFolderError: Nothing is, or it can't be read now.
    """
    if (state_dir / "coordinator" / DATABASE).exists():
        raise StateFolderError(
            f"{state_dir} is the folder of `psserver local`, and its coordinator's is "
            f"{state_dir / 'coordinator'}: name that one"
        )
    if not any((state_dir / name).exists() for name in _FILES):
        return ""
    try:
        with JobStore(state_dir) as store:
            stored = store.load()
            store.load_epochs()
            store.load_splits()
    except DamagedStateError as error:
        return str(error)
    if stored is None:
        return ""
    raise StateFolderError(
        f"the state of job {printable(stored.job_id)} in {state_dir} is whole: start "
        "the coordinator by its command line, and the job goes on without losing "
        "anything"
    )


async def _living_shards(
    listen: ListenConfig,
    job_id: str,
    shard_count: int,
    wait_s: float,
    limits: Limits,
) -> tuple[LivingShard, ...]:
    """Shards that call the coordinator's address, until all have said where they stand.

    Raises:
        ConfigurationError: The address can't be bound.
        StateFolderError: Some are of another job.
    """
    living = LivingShards()
    access = Access.of(listen)
    calls = OpenCalls(fitted(limits, descriptors()[1]), access)
    server = make_server(ServerKind.COORDINATOR, [living], calls)
    bind(server, listen)
    await server.start()
    watching = asyncio.create_task(watch_tokens(access))
    try:
        await living.changes.wait_until(
            lambda: living.known_count >= shard_count, timeout_s=wait_s
        )
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await stop(server)
    found = tuple(sorted(living.found.values()))
    for each in found:
        if each.job_id != job_id:
            raise StateFolderError(
                f"shard {each.shard_index} that calls here is of job "
                f"{printable(each.job_id)}, and the checkpoints are of job {job_id}: "
                "name the folder of that job's checkpoints, or another --listen"
            )
    return found


def _set_aside(state_dir: Path) -> Path:
    """Moves the files of a state folder into one within it, which nobody reads."""
    number = 1
    while (target := state_dir / f"damaged-{number}").exists():
        number += 1
    try:
        target.mkdir(mode=0o700)
        for name in _FILES:
            if (state_dir / name).exists():
                (state_dir / name).rename(target / name)
        for folder in (target, state_dir):
            Disk().sync_folder(folder)
    except OSError as error:
        raise StateFolderError(
            f"the damaged files can't be moved to {target}: {error.strerror or error}"
        ) from error
    return target


def _shard_text(shard: LivingShard) -> str:
    if shard.clock is None:
        return f"shard {shard.shard_index} lives, and has not said where it stands"
    return (
        f"shard {shard.shard_index} lives, at clock {shard.clock} (version "
        f"{shard.version})"
    )
