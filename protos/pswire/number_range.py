"""Which numbers a setting may have, and what is said of others.

One form wherever a number comes from: what was given, what is allowed, and why where it
is not plain.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Numbers from a least to a most one, both included unless it is said.

    Attributes:
        least: The least one.
        most: The most one.
        unit: What they count, as in `seconds`; empty where the setting says it.
        why: Why others are refused, and what to do; empty where it is plain.
        is_above: Whether `least` itself is refused.
        is_below: Whether `most` itself is refused.
    """

    least: float
    most: float
    unit: str = ""
    why: str = ""
    is_above: bool = False
    is_below: bool = False

    def problem(self, given: object) -> str:
        """Why a value is refused, in words; empty where it may be."""
        if isinstance(given, int | float) and not isinstance(given, bool):
            is_kind = isinstance(given, int) or not self.is_whole
            is_enough = given > self.least if self.is_above else given >= self.least
            fits = given < self.most if self.is_below else given <= self.most
            if is_kind and is_enough and fits:  # nan is neither
                return ""
        return self._problem(repr(given))

    def parsed(self, text: str) -> float:
        """The number that a text stands for, an `int` where those are wanted.

        Raises:
            ValueError: It stands for none, or for one that is refused; the text says
                what is allowed.
        """
        try:
            # Python refuses thousands of digits, by a text of its own.
            number = int(text) if self.is_whole else float(text)
        except ValueError:
            raise ValueError(self._problem(_shown(text))) from None
        if self.problem(number):
            raise ValueError(self._problem(_shown(text)))
        return number

    @property
    def is_whole(self) -> bool:
        """Whether they are whole numbers: those whose limits are."""
        return isinstance(self.least, int)

    def _problem(self, given: str) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        unit = f" of {self.unit}" if self.unit else ""
        least = f"{'above' if self.is_above else 'from'} {_plain(self.least)}"
        to = " to" if not self.is_above else ", at most"
        most = f"{', less than' if self.is_below else to} {_plain(self.most)}"
        why = f": {self.why}" if self.why else ""
        return f"{given} is not {kind}{unit} {least}{most}{why}"


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.10g}"


def _shown(text: str) -> str:
    """As it was typed, or quoted where it is not a number's beginning."""
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    try:
        float(text)
    except ValueError:
        return repr(shown)
    return shown
