"""`psctl mode`: changes how workers keep together while the job runs."""

from dataclasses import dataclass
from typing import Final

from psctl.failures import CommandError
from psctl.status import ask, mode_text, read_document
from pswire.addresses import Address
from pswire.exit_codes import ExitCode
from pswire.limits import STALENESS_BOUND_DEFAULT
from pswire.membership import BOUNDED_MODES, Mode
from psworker.transport.status_client import change_mode

SCHEMA_VERSION: Final = 1

RATES_OF_SINGLE_UPDATES: Final = (
    "N updates of one worker each go N times as far as their mean: with N workers "
    "divide the learning rate by N and leave momentum out; see docs/modes.md"
)
RATES_OF_MEANS: Final = (
    "one update with the mean of N workers goes as far as one of their own: with N "
    "workers multiply the learning rate by N again, momentum may come back; see "
    "docs/modes.md"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedMode:
    """The mode that holds after `mode_clock`, from `generation` on."""

    coordinator: Address
    mode: Mode
    previous_mode: Mode
    staleness_bound: int | None
    generation: int
    mode_clock: int

    def to_json(self) -> dict[str, object]:
        return {
            "schema_version": SCHEMA_VERSION,
            "coordinator": str(self.coordinator),
            "mode": self.mode.label,
            "previous_mode": self.previous_mode.label,
            "staleness_bound": self.staleness_bound,
            "generation": self.generation,
            "mode_clock": self.mode_clock,
        }

    @property
    def text(self) -> str:
        return (
            f"{mode_text(self.mode, self.staleness_bound)}, after clock "
            f"{self.mode_clock} (generation {self.generation})"
        )

    @property
    def rate_hint(self) -> str:
        """What the change means for learning rates; empty when nothing.

        A mode with clocks applies means, the others the updates of single workers.
        """
        if self.previous_mode.rules.is_clocked == self.mode.rules.is_clocked:
            return ""
        return RATES_OF_MEANS if self.mode.rules.is_clocked else RATES_OF_SINGLE_UPDATES


def set_mode(
    coordinator: Address, mode: Mode, *, staleness: int | None, timeout_s: float
) -> ChangedMode:
    """Changes the mode; returns when the coordinator has it on disk.

    The staleness is in clocks, with SSP only; None is the default.
    """
    bound = _bound(mode, staleness)
    previous = Mode.labelled(read_document(coordinator)["mode"])
    changed = ask(
        coordinator,
        change_mode(str(coordinator), mode, bound, timeout_s=timeout_s),
        timeout_s=timeout_s,
    )
    return ChangedMode(
        coordinator=coordinator,
        mode=mode,
        previous_mode=previous,
        staleness_bound=mode.rules.lag_max(bound),
        generation=changed.generation,
        mode_clock=changed.mode_clock,
    )


def _bound(mode: Mode, staleness: int | None) -> int:
    if not mode.rules.takes_bound:
        if staleness is not None:
            raise CommandError(
                f"--staleness {staleness} has no meaning in {mode.label}: only "
                f"{BOUNDED_MODES} bounds how far workers are apart; leave it out, or "
                f"say {BOUNDED_MODES}",
                ExitCode.USAGE,
            )
        return 0
    return STALENESS_BOUND_DEFAULT if staleness is None else staleness
