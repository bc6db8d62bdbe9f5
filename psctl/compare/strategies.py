"""What `psctl compare --strategies` compares, as the command line names it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from psctl.compare.modes import ComparedMode, parse_mode
from pswire.encodings.known import ENCODINGS
from psworker.errors import ConfigurationError
from psworker.strategies.known import KNOWN, strategy_named

if TYPE_CHECKING:
    from psworker.strategies.strategy import Strategy

_EXAMPLES: Final = (
    "diloco:50 (50 steps a round), diloco:10% (as many as keep traffic under a tenth "
    "of the time), streaming-diloco:50:taken_after=12 (with options of the class), "
    "diloco:50+int8 (compressed), model-averaging:20@asp (in a mode), and the modes "
    "bsp, bsp+1, ssp:3, asp and quorum:2, compressed or not"
)

_WHOLE: Final = 100  # percent

_COMPRESSION: Final = r"(?:\+(?P<compression>[a-z][a-z0-9]*))?"
_MODE: Final = re.compile(
    rf"(?P<mode>bsp(?:\+\d+)?|ssp:\d+|asp|quorum(?::\d+)?){_COMPRESSION}"
)
_STRATEGY: Final = re.compile(
    r"(?P<strategy>[a-z][a-z0-9-]*)"
    r"(?::(?:(?P<every>[1-9]\d*)|(?P<percent>[1-9]\d?)%))?"
    r"(?P<options>(?::[a-z_]+=[\w.-]+)*)"
    rf"{_COMPRESSION}(?:@(?P<mode>[a-z0-9:+]+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to train, as in `diloco:50:lr=0.5+int8@bsp`.

    Attributes:
        name: As it was typed.
        mode: How the workers keep together.
        strategy: Its name in `psworker.strategies.known`; empty for a push at each
            step.
        every: Steps of a round; None for those of its paper.
        share: Of the time, that traffic may have, in place of `every`.
        compression: Of pushes and pulls; empty for none.
        options: Of the strategy, beside `every` or `share`.
    """

    name: str
    mode: ComparedMode
    strategy: str = ""
    every: int | None = None
    share: float | None = None
    compression: str = ""
    options: Mapping[str, float | str] = field(default_factory=dict)

    def made(self) -> "Strategy | None":
        """The strategy; None for a push at each step.

        Raises:
            ValueError: The class takes no such numbers.
        """
        if not self.strategy:
            return None
        # psworker asks for torch, which a command line that ends here does not need.
        from psworker.strategies.pace import ShareOfTime
        from psworker.strategies.strategy import check_strategy

        make: Any = strategy_named(self.strategy)
        known = signature(make).parameters
        given: dict[str, Any] = dict(self.options)
        every = self.every if self.share is None else ShareOfTime(self.share)
        if every is not None:
            # Downpour's is `n_push`.
            given["every" if "every" in known else next(iter(known))] = every
        try:
            strategy: Strategy = make(**given)
            check_strategy(strategy)
        except (TypeError, ConfigurationError) as error:
            raise ValueError(f"{self.name!r} can't be made: {error}") from None
        return strategy


def parse_contenders(text: str, worker_count: int) -> tuple[Contender, ...]:
    """Reads names that are separated by commas.

    Args:
        text: Such as `bsp,diloco:50`.
        worker_count: Workers of each run.

    Raises:
        ValueError: One is none, twice there, or needs more workers.
    """
    found = tuple(_contender(part.strip(), worker_count) for part in text.split(","))
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ValueError(f"{text!r} names one twice")
    for each in found:
        if each.compression and each.compression not in list(ENCODINGS):
            raise ValueError(
                f"{each.name!r} compresses in no way there is: give one of "
                f"{', '.join(ENCODINGS)}"
            )
        strategy = each.made()
        if strategy is not None and each.mode.mode not in strategy.modes:
            raise ValueError(
                f"{each.name!r}: {each.strategy} works in mode "
                f"{' or '.join(strategy.modes)}, not in {each.mode.mode}"
            )
    return found


def _contender(name: str, worker_count: int) -> Contender:
    if plain := _MODE.fullmatch(name):
        return Contender(
            name=name,
            mode=parse_mode(plain["mode"], worker_count),
            compression=plain["compression"] or "",
        )
    found = _STRATEGY.fullmatch(name)
    if found is None or found["strategy"] not in KNOWN:
        raise ValueError(
            f"{name!r} is no strategy to compare; there are {', '.join(KNOWN)}, as in "
            f"{_EXAMPLES}"
        )
    options = (each.partition("=") for each in found["options"].split(":")[1:])
    return Contender(
        name=name,
        mode=parse_mode(found["mode"] or _mode_of(found["strategy"]), worker_count),
        strategy=found["strategy"],
        every=int(found["every"]) if found["every"] else None,
        share=int(found["percent"]) / _WHOLE if found["percent"] else None,
        compression=found["compression"] or "",
        options={option: _value(text) for option, _, text in options},
    )


def _mode_of(strategy: str) -> str:
    """Its first mode that needs no bound."""
    return next(each for each in strategy_named(strategy).modes if each != "ssp")


def _value(text: str) -> float | str:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
