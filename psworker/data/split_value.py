"""A split of data: which positions are in which part, and the recipe behind it."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from psworker.errors import ConfigurationError

Indices = npt.NDArray[np.int64]

_DIGEST_FORMAT: Final = b"paramserver split 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRecipe:
    """What makes a split this split. Plain values: it is recorded as JSON.

    Attributes:
        by: `sample`, `class`, `dirichlet`, `group`, `time` or `window`.
        data_count: Samples of the data; rows for windows.
        parts: Names of the parts in order, each with its fraction or its count.
        folds: Number of folds, instead of parts.
        seed: Of the random numbers.
        gap: What is left out between parts: rows, or an amount of time.
        window: Rows of a window.
        stride: Rows between the starts of windows.
        horizon: Rows after a window that belong to it as well, such as its target.
        concentration: How alike parts by Dirichlet are.
        labels: Digest of the labels, if they matter.
        groups: Digest of the groups, if they matter.
        times: Digest of the times, if they matter.
        library: What drew it, for people: another release may draw another one.
    """

    by: str
    data_count: int
    parts: tuple[tuple[str, float], ...] = ()
    folds: int = 0
    seed: int = 0
    gap: float = 0
    window: int = 0
    stride: int = 1
    horizon: int = 0
    concentration: float = 0.0
    labels: str = ""
    groups: str = ""
    times: str = ""
    library: str = ""

    def to_json(self) -> str:
        """The recipe as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads a recipe.

        Raises:
            ValueError: It is none that this release knows.
        """
        try:
            values = json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        names = {each.name for each in fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= names:
            raise ValueError(f"{text[:200]!r} is no recipe of a split")
        parts = tuple((str(name), size) for name, size in values.pop("parts", ()))
        return cls(parts=parts, **values)

    def differences(self, other: "SplitRecipe") -> list[str]:
        """How this one differs from another, for people."""
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{name} is {_shown(mine[name])}, not {_shown(theirs[name])}"
            for name in mine
            if mine[name] != theirs[name]
        ]


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, tuple) else repr(dict(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


class Parts(Mapping[str, Indices]):
    """Positions by the name of their part, each in ascending order.

    `parts["train"]` and `parts.train` are the same array, int64.
    """

    def __init__(self, parts: Mapping[str, Indices]) -> None:
        self._parts = dict(parts)

    def __getitem__(self, name: str) -> Indices:
        try:
            return self._parts[name]
        except KeyError:
            raise KeyError(f"{name!r} is no part; there are {self._names}") from None

    def __getattr__(self, name: str) -> Indices:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._parts[name]
        except KeyError:
            raise AttributeError(
                f"{name!r} is no part; there are {self._names}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"<psworker.data.Parts {self.describe()}>"

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self._parts))

    def describe(self) -> str:
        """How many positions each part has."""
        return ", ".join(f"{name} {len(where)}" for name, where in self._parts.items())


class Split:
    """Which positions of the data are in which part.

    Of a split in parts, `split.train` and `split["train"]` are positions. Of one in
    folds, `split.folds[0].train` and `split.folds[0].test` are.

    Attributes:
        recipe: What makes it this split.
        item_count: Positions that there are: samples, or windows.
        folds: One for each fold; one that holds all parts where there are no folds.
    """

    def __init__(
        self,
        recipe: SplitRecipe,
        item_count: int,
        folds: Sequence[Mapping[str, Indices]],
    ) -> None:
        self.recipe = recipe
        self.item_count = item_count
        self.folds = tuple(Parts(each) for each in folds)

    def __getitem__(self, part: str) -> Indices:
        return self._only_fold[part]

    def __getattr__(self, name: str) -> Indices:
        if name.startswith("_") or "folds" not in vars(self):
            raise AttributeError(name)
        if self.recipe.folds:
            raise AttributeError(
                f"this split has {len(self.folds)} folds: take .folds[0].{name}"
            )
        found: Indices = getattr(self.folds[0], name)
        return found

    def __repr__(self) -> str:
        return f"<psworker.data.Split {self.describe()}>"

    @property
    def _only_fold(self) -> Parts:
        if self.recipe.folds:
            raise KeyError(
                f"this split has {len(self.folds)} folds: take one, as in .folds[0]"
            )
        return self.folds[0]

    def _fold(self, fold: int | None) -> Parts:
        count = len(self.folds)
        if fold is None and self.recipe.folds:
            raise ConfigurationError(
                f"this split has {count} folds: say which, fold=0 to fold={count - 1}"
            )
        if fold is not None and not 0 <= fold < count:
            raise ConfigurationError(
                f"fold={fold!r} is none of this split's {count}, which count from 0"
            )
        return self.folds[fold or 0]

    @property
    def digest(self) -> str:
        """SHA-256 of all positions of all parts: the same for equal splits only."""
        state = hashlib.sha256(_DIGEST_FORMAT)
        state.update(f"\0{self.item_count}\0{len(self.folds)}".encode())
        for fold in self.folds:
            for name, where in fold.items():
                state.update(f"\0{name}\0{len(where)}\0".encode())
                state.update(where.astype("<i8", copy=False).tobytes())
        return state.hexdigest()

    def subset(self, dataset: Any, part: str, *, fold: int | None = None) -> Any:  # noqa: ANN401
        """A part of a map-style dataset, as a `torch.utils.data.Subset`.

        Args:
            dataset: With an item for each position.
            part: Name of the part.
            fold: Which fold, if the split has folds.

        Raises:
            ConfigurationError: The dataset has another number of items.
        """
        from torch.utils.data import Subset

        if len(dataset) != self.item_count:
            what = "windows" if self.recipe.window else "samples"
            raise ConfigurationError(
                f"the dataset has {len(dataset)} items and the split is one of "
                f"{self.item_count} {what}; give it the data that was split"
            )
        parts = self._fold(fold)
        return Subset(dataset, parts[part].tolist())

    def rows(self, part: str, *, fold: int | None = None) -> Indices:
        """Rows of each window of a part, its horizon included.

        Returns:
            [windows, 2] int64: first row and the one after the last.

        Raises:
            ConfigurationError: It is no split of windows.
        """
        recipe = self.recipe
        if not recipe.window:
            raise ConfigurationError("only a split by='window' has windows")
        parts = self._fold(fold)
        starts = parts[part] * recipe.stride
        return np.stack([starts, starts + recipe.window + recipe.horizon], axis=1)

    def describe(self) -> str:
        """By what it was split, how many positions each part has, and its digest."""
        recipe = self.recipe
        what = "windows" if recipe.window else "samples"
        if recipe.folds:
            sizes = f"{recipe.folds} folds, the first: {self.folds[0].describe()}"
        else:
            sizes = self.folds[0].describe()
        return (
            f"{self.item_count} {what} by {recipe.by}, seed {recipe.seed}: {sizes}; "
            f"digest {self.digest[:12]}"
        )
