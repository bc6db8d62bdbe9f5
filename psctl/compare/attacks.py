"""What some workers of a comparison send in place of their gradients.

In the run of an attack the first workers make it: the longest ones, by whose settings
a job goes that trusts its workers.
"""

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from pswire.aggregation import Aggregation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

FLIP_FACTOR: Final = -4.0
"""With -1 two of eight would only halve the mean; with this they turn it round."""
SCALE_FACTOR: Final = 100.0
CONSTANT: Final = 1.0

ATTACKER_COUNT_DEFAULT: Final = 2

_TEXT: Final = re.compile(r"(?P<name>[a-z-]+)(?::workers=(?P<count>[1-9]\d{0,3}))?")


class AttackKind(NamedTuple):
    """An attack: what it is, and what it makes of a gradient, in place."""

    described: str
    change: "Callable[[torch.Tensor], object]"


_KINDS: Final = {
    "sign-flip": AttackKind(
        f"{FLIP_FACTOR:g} times the gradient", lambda g: g.mul_(FLIP_FACTOR)
    ),
    "scale": AttackKind(
        f"{SCALE_FACTOR:g} times the gradient", lambda g: g.mul_(SCALE_FACTOR)
    ),
    "constant": AttackKind(
        f"{CONSTANT:g} for every element", lambda g: g.fill_(CONSTANT)
    ),
}

EXAMPLES: Final = "sign-flip, scale, constant or sign-flip:workers=2"


class Attack(NamedTuple):
    """An attack and how many workers make it."""

    name: str
    attacker_count: int = ATTACKER_COUNT_DEFAULT

    @property
    def described(self) -> str:
        """What the attackers send, for people."""
        return _KINDS[self.name].described

    def is_made_by(self, worker_index: int) -> bool:
        """Whether a worker makes it."""
        return worker_index < self.attacker_count

    def carry_out(self, gradients: "Iterable[torch.Tensor | None]") -> None:
        """Changes what a worker is about to push."""
        for each in gradients:
            if each is not None:
                _KINDS[self.name].change(each)


def parse_attacks(text: str, worker_count: int) -> tuple[Attack, ...]:
    """Reads attacks that are separated by commas.

    Raises:
        ValueError: One is none, twice there, or made by all workers.
    """
    found = []
    for part in map(str.strip, text.split(",")):
        matched = _TEXT.fullmatch(part)
        if matched is None or matched["name"] not in _KINDS:
            raise ValueError(f"{part!r} is no attack; there are {EXAMPLES}")
        count = int(matched["count"] or ATTACKER_COUNT_DEFAULT)
        if count >= worker_count:
            raise ValueError(
                f"{part!r} needs more workers than the {worker_count} there are: at "
                "least one must train"
            )
        found.append(Attack(matched["name"], count))
    if len({each.name for each in found}) < len(found):
        raise ValueError(f"{text!r} names an attack twice")
    return tuple(found)


def parse_rules(text: str, worker_count: int) -> tuple[Aggregation, ...]:
    """Reads rules of aggregation that are separated by spaces or semicolons.

    Raises:
        ValueError: One is none, twice there, or needs more workers.
    """
    rules = tuple(Aggregation.parse(part) for part in re.split(r"[\s;]+", text.strip()))
    if len(set(rules)) < len(rules):
        raise ValueError(f"{text!r} names a rule twice")
    for rule in rules:
        if rule.members_min > worker_count:
            raise ValueError(
                f"{rule} needs 2f + 3 = {rule.members_min} workers, there are "
                f"{worker_count}"
            )
    return rules
