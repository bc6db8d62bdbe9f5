"""`psctl mode`: changes how workers keep together while the job runs."""

from dataclasses import dataclass
from typing import Final

from psctl.failures import CommandError
from psctl.status import ask, read_document
from pswire.addresses import Address
from pswire.exit_codes import ExitCode
from pswire.limits import QUORUM_DEFAULT, STALENESS_BOUND_DEFAULT
from pswire.membership import BOUNDED_MODES, QUORUM_MODES, Mode, ModeTerms
from pswire.status_document import terms_document
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
    terms: ModeTerms
    previous_mode: Mode
    generation: int
    mode_clock: int

    def to_json(self) -> dict[str, object]:
        return {
            "schema_version": SCHEMA_VERSION,
            "coordinator": str(self.coordinator),
            **terms_document(self.terms),
            "previous_mode": self.previous_mode.label,
            "generation": self.generation,
            "mode_clock": self.mode_clock,
        }

    @property
    def text(self) -> str:
        since = f", after clock {self.mode_clock}" if self.mode_clock else ""
        return f"{self.terms}{since} (generation {self.generation})"

    @property
    def rate_hint(self) -> str:
        """What the change means for learning rates; empty when nothing.

        A mode with clocks applies means, the others the updates of single workers.
        """
        is_clocked = self.terms.mode.rules.is_clocked
        if self.previous_mode.rules.is_clocked == is_clocked:
            return ""
        return RATES_OF_MEANS if is_clocked else RATES_OF_SINGLE_UPDATES


def set_mode(
    coordinator: Address, terms: ModeTerms, *, timeout_s: float
) -> ChangedMode:
    """Changes the mode; returns when the coordinator has it on disk."""
    previous = Mode.labelled(read_document(coordinator)["mode"])
    changed = ask(
        coordinator,
        change_mode(str(coordinator), terms, timeout_s=timeout_s),
        timeout_s=timeout_s,
    )
    return ChangedMode(
        coordinator=coordinator,
        terms=terms,
        previous_mode=previous,
        generation=changed.generation,
        mode_clock=changed.mode_clock,
    )


def terms_given(
    mode: Mode,
    *,
    staleness: int | None,
    quorum: int | None,
    grace_window_s: float | None,
) -> ModeTerms:
    """A mode with what was said of it; None is the default.

    Raises:
        CommandError: Something was said that the mode has not.
    """
    bounds = f"only {BOUNDED_MODES} bounds how far workers are apart"
    closes = f"only {QUORUM_MODES} closes a clock by a quorum"
    for option, value, why, modes in (
        ("--staleness", staleness, bounds, BOUNDED_MODES),
        ("--quorum", quorum, closes, QUORUM_MODES),
        ("--grace-window", grace_window_s, closes, QUORUM_MODES),
    ):
        if value is not None and mode.label not in modes:
            raise CommandError(
                f"{option} {value:g} has no meaning in {mode.label}: {why}; leave it "
                f"out, or say {modes}",
                ExitCode.USAGE,
            )
    return ModeTerms.of(
        mode,
        staleness_bound=STALENESS_BOUND_DEFAULT if staleness is None else staleness,
        quorum=QUORUM_DEFAULT if quorum is None else quorum,
        grace_window_ms=round((grace_window_s or 0) * 1000),
    )
