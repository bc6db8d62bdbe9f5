"""What processes take of the memory: the peak of each, and of all together.

`RssAnon` is memory of a process alone. Pages of shared memory count in `RssShmem` of
every process that has touched them, so for all together they are counted once, as the
system does.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

MIB: Final = 1 << 20
_INTERVAL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Resident:
    """Memory of a process, in bytes: of its own, and shared."""

    own: int
    shared: int

    def largest(self, other: "Resident") -> "Resident":
        return Resident(max(self.own, other.own), max(self.shared, other.shared))


def resident_of(pid: int) -> Resident:
    """Memory of a process now; nothing of one that has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return Resident(0, 0)
    fields = {
        name: int(value.split()[0]) << 10
        for name, _, value in (line.partition(":") for line in text.splitlines())
        if name in ("RssAnon", "RssShmem")
    }
    return Resident(fields.get("RssAnon", 0), fields.get("RssShmem", 0))


def shared_on_machine() -> int:
    """Shared memory of all processes of the machine, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Shmem":
            return int(value.split()[0]) << 10
    raise AssertionError("no Shmem in /proc/meminfo")


class PeakMemory:
    """Looks at processes all the time. A context manager.

    Attributes:
        by_name: Peak of each process.
        together: Peak of the sum of all processes' own memory and what they share.
    """

    def __init__(
        self, pids: Mapping[str, int], shared_before: int | None = None
    ) -> None:
        """Begins to look when it is entered.

        Args:
            pids: Processes by name.
            shared_before: Bytes of shared memory on the machine that are not theirs;
                None for those that there are now.
        """
        self._pids = dict(pids)
        if shared_before is None:
            shared_before = shared_on_machine()
        self._shared_before = shared_before
        self.by_name = dict.fromkeys(pids, Resident(0, 0))
        self.together = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_often)

    def _look_often(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        found = {name: resident_of(pid) for name, pid in self._pids.items()}
        shared = shared_on_machine() - self._shared_before
        total = shared + sum(each.own for each in found.values())
        self.together = max(self.together, total)
        for name, each in found.items():
            self.by_name[name] = self.by_name[name].largest(each)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()  # the thread may have had no turn since what is there came

    def lines(self) -> list[str]:
        """The peaks, for people."""
        return [
            *(
                f"{name:12} own {each.own / MIB:7.0f} MiB, "
                f"shared {each.shared / MIB:7.0f} MiB"
                for name, each in self.by_name.items()
            ),
            f"{'together':12}     {self.together / MIB:7.0f} MiB",
        ]
