"""What a workload of `psctl bench` is: contenders that take turns, and targets.

A workload is one value in a file of `workloads`. The command starts the processes that
its contenders talk to; processes of their own, the members, do the measured work.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from psctl.bench.limited_link import Link
from psctl.daemons import ShardPlace, start_daemons
from psctl.processes import Children
from psctl.protection import Protection

if TYPE_CHECKING:
    import torch

    from psworker import Connection

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
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Target:
    """What the ratio of two contenders' medians, to the baseline's, is to be.

    Attributes:
        limit: The most that a ratio of times may be, or the least of rates.
        is_rate: Whether it is of things in a second, and not of the time of one.
    """

    contender: str
    baseline: str
    limit: float
    is_rate: bool

    @property
    def quantity(self) -> str:
        return "rate" if self.is_rate else "time"

    @property
    def bound(self) -> str:
        return "at least" if self.is_rate else "at most"

    @property
    def text(self) -> str:
        return (
            f"{self.contender} {self.bound} {self.limit:g} x the {self.quantity} of "
            f"{self.baseline}"
        )


def time_at_most(contender: str, limit: float, baseline: str) -> Target:
    return Target(contender, baseline, limit, is_rate=False)


def rate_at_least(contender: str, limit: float, baseline: str) -> Target:
    return Target(contender, baseline, limit, is_rate=True)


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
    """Where a workload starts the processes that its contenders talk to.

    Attributes:
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
        options: Sequence[str] = (),
        protection: Protection | None = None,
    ) -> str:
        """Starts a coordinator and its shards; the coordinator's address.

        Shards without places listen on free ports, behind the link if there is one.
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
            options=options,
            environment=self.environment,
            prefix=f"{name} ",
            places=places,
            protection=protection,
        )
        return str(address)


@dataclass(frozen=True, slots=True)
class Member:
    """One of the processes that do the measured work.

    Attributes:
        count: Members of this workload.
        places: What the workload's `start` returned.
        stack: Closed when all is measured.
    """

    rank: int
    count: int
    sizes: Sizes
    places: Mapping[str, str]
    stack: ExitStack

    def connect(self, place: str = "coordinator") -> "Connection":
        """Connects a worker to the job whose coordinator is at a place."""
        import psworker

        return self.stack.enter_context(
            psworker.connect(self.places[place], f"bench-{self.rank}")
        )


def _begun_elsewhere(member: Member) -> Contender:
    raise AssertionError("this workload has a member module of its own")


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender before it runs.

    Attributes:
        begin: Makes it ready in a member. Raises `CannotRunError`, in all members
            or in none. Not called where the workload has a `member_module`.
    """

    name: str
    text: str
    begin: Callable[[Member], Contender] = _begun_elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured, against what, and what it should show.

    Attributes:
        about_s: Seconds that it takes on two cores with the default sizes, about.
        start: Starts the processes that contenders talk to; their places, by name.
        member_count: Processes that do the measured work. More than one are in a
            gloo process group, and begin each repetition together.
        member_module: What a member runs, with the name of the workload, its rank and
            a JSON text as arguments.
        tolerance: Largest difference of values, over the largest value, between
            contenders.
        thread_count: Torch's threads in each member, `None` for its own choice.
        environment: Of all processes, added to the command's own.
        link: Sets up the link between workers and shards, if there is one.
    """

    name: str
    title: str
    about_s: int
    entries: tuple[Entry, ...]
    targets: tuple[Target, ...] = ()
    start: Callable[[Ground], dict[str, str]] = lambda ground: {}
    member_count: int = 1
    member_module: str = "psctl.bench.member"
    tolerance: float = 0.0
    thread_count: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    link: Callable[[], AbstractContextManager[Link | None]] = nullcontext
