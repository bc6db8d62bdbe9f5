"""The modes that are compared, as the command line names them."""

import re
from dataclasses import dataclass
from typing import Final

EXAMPLES: Final = "bsp, bsp+1 (one backup worker), ssp:3 (staleness bound 3) or asp"

_NAME: Final = re.compile(
    r"bsp|bsp\+(?P<backups>\d+)|ssp:(?P<bound>\d+)|asp"
    r"|(?P<has_quorum>quorum)(?::(?P<quorum>\d+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedMode:
    """How the workers of one run keep together; named as in `ssp:3` or `bsp+1`."""

    name: str
    mode: str
    staleness_bound: int = 0
    backup_worker_count: int = 0
    quorum: int = 0

    @property
    def label(self) -> str:
        """For people, such as `SSP(3)`."""
        if self.mode == "ssp":
            return f"SSP({self.staleness_bound})"
        if self.quorum:
            return f"quorum of {self.quorum}"
        backups = f" + {self.backup_worker_count}" if self.backup_worker_count else ""
        return f"{self.mode.upper()}{backups}"

    @property
    def is_synchronous(self) -> bool:
        """Whether the gradients of several workers make one update."""
        return self.mode == "bsp"

    def gradients_per_update(self, worker_count: int) -> int:
        """Of how many workers' gradients an update is the mean."""
        return worker_count - self.backup_worker_count if self.is_synchronous else 1

    def coordinator_options(self) -> list[str]:
        """Options of `psserver coordinator` besides `--mode`."""
        if self.mode == "ssp":
            return ["--staleness", str(self.staleness_bound)]
        if self.backup_worker_count:
            return ["--backup-workers", str(self.backup_worker_count)]
        if self.quorum:
            return ["--quorum", str(self.quorum)]
        return []


def parse_modes(text: str, worker_count: int) -> tuple[ComparedMode, ...]:
    """Reads names that are separated by commas.

    Raises:
        ValueError: One is no mode, twice there, or needs more workers.
    """
    modes = tuple(parse_mode(name.strip(), worker_count) for name in text.split(","))
    names = [mode.name for mode in modes]
    if len(set(names)) < len(names):
        raise ValueError(f"{text!r} names a mode twice")
    for mode in modes:
        if mode.quorum:
            raise ValueError(
                f"{mode.name!r} is compared by --strategies: no arithmetic says what "
                "pace it should have"
            )
    return modes


def parse_mode(name: str, worker_count: int) -> ComparedMode:
    """Reads a name; a quorum that is not said is half of the workers.

    Raises:
        ValueError: It is no mode, or needs more workers.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no mode to compare; there are {EXAMPLES}")
    backups, bound = int(found["backups"] or 0), int(found["bound"] or 0)
    quorum = int(found["quorum"] or -(-worker_count // 2)) if found["has_quorum"] else 0
    if backups >= worker_count:
        raise ValueError(
            f"{name} needs more workers than the {worker_count} there are: a clock "
            "needs one that is no backup"
        )
    if found["has_quorum"] and not 1 <= quorum <= worker_count:
        raise ValueError(
            f"{name} is no quorum of {worker_count} workers: give 1 to {worker_count}"
        )
    return ComparedMode(
        name=f"bsp+{backups}"
        if backups
        else f"ssp:{bound}"
        if found["bound"]
        else name.split("+")[0],
        mode=name.split("+")[0].split(":")[0],
        staleness_bound=bound,
        backup_worker_count=backups,
        quorum=quorum,
    )
