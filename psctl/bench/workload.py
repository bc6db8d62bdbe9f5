"""What a workload of `psctl bench all` is: contenders that take turns, and targets.

A workload is one file of `workloads`. The command starts what its contenders talk to;
processes of their own, the members, do the measured work.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from psctl.bench.limited_link import Link
from psctl.daemons import ShardPlace, start_daemons
from psctl.processes import Children

if TYPE_CHECKING:
    import torch

WARM_UP_COUNT: Final = 3
"""Repetitions before the first that counts: buffers and connections exist then."""


OVER_TCP: Final = {"PS_SHARED_MEMORY": "0"}
"""Environment of workers and shards that use no shared memory, though on one host."""


class CannotRunError(Exception):
    """A contender can't run on this machine; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        mebibyte_count: Of the big tensors.
        parameter_count: Of the model that is trained, about.
        batch_size: Samples of a worker's training step.
        small_count: Parameters of the small model.
        call_count: Steps or calls of one repetition, where a single one is too short.
        repetition_count: Measured repetitions of each contender, at least 2.
    """

    mebibyte_count: int = 64
    parameter_count: int = 25_000_000
    batch_size: int = 256
    small_count: int = 10_000
    call_count: int = 50
    repetition_count: int = 15

    @property
    def element_count(self) -> int:
        """Elements of a big float32 tensor."""
        return self.mebibyte_count * (1 << 20) // 4

    def to_json(self) -> dict[str, int]:
        """For another process, and for the reader of the figures."""
        return asdict(self)


class Quantity(StrEnum):
    """Of what a target's ratio is."""

    TIME = "time"
    RATE = "rate"


class Bound(StrEnum):
    """Which side of the limit a ratio must be on."""

    AT_MOST = "at most"
    AT_LEAST = "at least"


@dataclass(frozen=True, slots=True)
class Target:
    """What a ratio of two contenders' medians is to be.

    Attributes:
        contender: The numerator.
        baseline: The denominator.
        quantity: Time of one thing, or things in a second.
        bound: Which side of the limit is good.
        limit: The ratio.
    """

    contender: str
    baseline: str
    quantity: Quantity
    bound: Bound
    limit: float

    @property
    def text(self) -> str:
        """The target as a person says it."""
        return (
            f"{self.contender} {self.bound} {self.limit:g} x the {self.quantity} of "
            f"{self.baseline}"
        )


def time_at_most(contender: str, limit: float, baseline: str) -> Target:
    """A contender takes at most so many times as long as the baseline."""
    return Target(contender, baseline, Quantity.TIME, Bound.AT_MOST, limit)


def rate_at_least(contender: str, limit: float, baseline: str) -> Target:
    """A contender does at least so many times as much in a second."""
    return Target(contender, baseline, Quantity.RATE, Bound.AT_LEAST, limit)


@dataclass(frozen=True, slots=True)
class Contender:
    """One side of a comparison, ready to be measured.

    Attributes:
        run: Does one repetition. Seconds that it took if it has counted them itself,
            `None` for all of its time.
        amount: Things of a repetition, over all members; figures are of one thing.
        before: Done before each repetition, unmeasured.
        values: Tensors that it has computed so far. Those of all contenders that
            have some must agree.
    """

    run: Callable[[], float | None]
    amount: int = 1
    before: Callable[[], None] = lambda: None
    values: "Callable[[], list[torch.Tensor]] | None" = None


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a workload starts what its contenders talk to.

    Attributes:
        children: Its processes.
        scratch: Folder for their files.
        sizes: How much is measured.
        environment: Of all processes, added to this one's.
        link: Between workers and shards, `None` for loopback as it is.
    """

    children: Children
    scratch: Path
    sizes: Sizes
    environment: Mapping[str, str]
    link: Link | None = None

    def start(self, name: str, *command: str) -> None:
        """Starts a module of Python with its arguments, under a name."""
        self.children.start(name, command, self.environment)

    def start_job(
        self,
        *,
        shard_count: int = 1,
        worker_count: int = 1,
        mode: str = "bsp",
        name: str = "job",
        places: Sequence[ShardPlace] = (),
    ) -> str:
        """Starts a coordinator and its shards; the coordinator's address.

        Args:
            shard_count: Shards.
            worker_count: Workers that the job waits for.
            mode: How workers keep together.
            name: Of the job, where there are several.
            places: Where each shard listens and is reached; by default any free port,
                behind the link if there is one.

        Raises:
            CommandError: The coordinator didn't start.
        """
        if self.link is not None and not places:
            places = [self.link.shard_place(self.children) for _ in range(shard_count)]
        folder = self.scratch / name
        folder.mkdir()
        address = start_daemons(
            self.children,
            folder,
            shard_count=shard_count,
            worker_count=worker_count,
            mode=mode,
            environment=dict(self.environment),
            prefix=f"{name} ",
            places=places,
        )
        return str(address)


@dataclass(frozen=True, slots=True)
class Member:
    """One of the processes that do the measured work.

    Attributes:
        rank: From 0.
        count: Members of this workload.
        sizes: How much is measured.
        places: What the workload's `start` returned.
        stack: Closed when all is measured.
    """

    rank: int
    count: int
    sizes: Sizes
    places: Mapping[str, str]
    stack: ExitStack


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender before it runs.

    Attributes:
        name: Short, as in JSON.
        text: What it does.
        begin: Makes it ready in a member. Raises `CannotRunError`, in all members
            or in none.
    """

    name: str
    text: str
    begin: Callable[[Member], Contender]


def begun_elsewhere(member: Member) -> Contender:
    """For a contender that the workload's own `member_module` makes ready."""
    raise AssertionError("this workload has a member module of its own")


def nothing_to_start(ground: Ground) -> dict[str, str]:
    """For a workload whose contenders talk to nobody."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured, against what, and what it should show.

    Attributes:
        name: Short, as in `--only`.
        title: What is measured.
        about_s: Seconds that it takes on two cores with the default sizes, about.
        entries: Its contenders.
        targets: What it should show.
        start: Starts what contenders talk to; places that members are told.
        member_count: Processes that do the measured work. More than one are in a
            gloo process group, and begin each repetition together.
        member_module: What a member runs, with the name of the workload, its rank and
            a JSON text as arguments.
        tolerance: Largest difference of values, over the largest value, between
            contenders.
        thread_count: Torch's threads in each member, `None` for its own choice.
        environment: Of all processes, added to the command's own.
        link_mbit: Speed of the link between workers and shards in each direction, in
            Mbit/s; `None` for loopback as it is.
    """

    name: str
    title: str
    about_s: int
    entries: tuple[Entry, ...]
    targets: tuple[Target, ...]
    start: Callable[[Ground], dict[str, str]] = nothing_to_start
    member_count: int = 1
    member_module: str = "psctl.bench.member"
    tolerance: float = 0.0
    thread_count: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    link_mbit: float | None = None
