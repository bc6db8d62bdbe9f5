"""What users give along with the data: labels, groups and times, checked."""

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from psworker.data.split_value import Indices
from psworker.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Column:
    """A value for each sample, as a code.

    Attributes:
        codes: [n] int64: position of the sample's value among the distinct ones.
        values: The distinct values, for texts, ascending.
        digest: Of the values in their order.
    """

    codes: Indices
    values: npt.NDArray[Any]
    digest: str

    @property
    def counts(self) -> Indices:
        """How many samples have each of the values."""
        return np.bincount(self.codes, minlength=len(self.values)).astype(np.int64)

    def shown(self, code: int) -> str:
        """A value, for texts."""
        return repr(self.values[code].tolist())[:64]


def read_column(name: str, given: object, count: int) -> Column:
    """Labels or groups.

    Raises:
        ConfigurationError: They are of another length, or some are missing.
    """
    array = _one_for_each(name, given, count)
    missing = np.flatnonzero(_is_missing(array))
    if len(missing):
        raise ConfigurationError(
            f"{name}[{missing[0]}] is missing (None or NaN), and {len(missing) - 1} "
            f"more are; leave these samples out, or give them a value of their own"
        )
    try:
        values, codes = np.unique(array, return_inverse=True)
    except TypeError:
        raise ConfigurationError(
            f"{name} are of kinds that can't be compared; make them all numbers or all "
            "strings"
        ) from None
    codes = codes.reshape(-1).astype(np.int64)
    shown = "\0".join(map(str, values.tolist())).encode()
    return Column(codes, values, hashlib.sha256(shown + codes.tobytes()).hexdigest())


@dataclass(frozen=True, slots=True)
class Times:
    """A time for each sample, as a number.

    Attributes:
        numbers: [n] float64, or int64 for dates, whose unit is the nanosecond.
        gap: The gap in the same unit.
        digest: Of the times; empty where the order of samples is that of time.
    """

    numbers: npt.NDArray[Any]
    gap: float
    digest: str


def read_times(given: object, gap: object, count: int) -> Times:
    """Times and the gap between parts; without times, the samples' own order.

    Raises:
        ConfigurationError: They are of another length or no times, or some are missing.
    """
    if given is None:
        return Times(np.arange(count), read_gap(gap, "rows"), "")
    array = _one_for_each("times", given, count)
    if array.dtype == object:
        try:
            array = array.astype("datetime64[ns]")
        except (TypeError, ValueError):
            raise ConfigurationError(_NO_TIMES) from None
    if array.dtype.kind == "M":
        is_missing = np.isnat(array)
        numbers: npt.NDArray[Any] = array.astype("datetime64[ns]").astype(np.int64)
        length = _nanoseconds(gap)
    elif array.dtype.kind in "iuf":
        is_missing = ~np.isfinite(array.astype(np.float64))
        numbers = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
        length = read_gap(gap, "the unit of the times")
    else:
        raise ConfigurationError(_NO_TIMES)
    if is_missing.any():
        raise ConfigurationError(
            f"times[{np.flatnonzero(is_missing)[0]}] is no time (NaN or NaT), as are "
            f"{int(is_missing.sum()) - 1} more; leave these samples out"
        )
    digest = hashlib.sha256(numbers.astype(numbers.dtype.newbyteorder("<")).tobytes())
    return Times(numbers, length, digest.hexdigest())


_NO_TIMES = "times must be numbers or dates (numpy.datetime64 or datetime)"


def read_gap(gap: object, unit: str) -> float:
    """A gap that is a number.

    Raises:
        ConfigurationError: It is none, or below 0.
    """
    if isinstance(gap, int | float) and not isinstance(gap, bool) and 0 <= gap < 2**63:
        return gap
    raise ConfigurationError(f"gap={gap!r} must be a number from 0, in {unit}")


def _nanoseconds(gap: object) -> float:
    if isinstance(gap, timedelta | np.timedelta64):
        length = int(np.timedelta64(gap, "ns").astype(np.int64))
    elif gap == 0:
        length = 0
    else:
        length = -1
    if length < 0:
        raise ConfigurationError(
            f"gap={gap!r} must be a timedelta from 0 on, since the times are dates"
        )
    return length


def _one_for_each(name: str, given: object, count: int) -> npt.NDArray[Any]:
    array = np.asarray(given)
    if array.ndim != 1 or len(array) != count:
        raise ConfigurationError(
            f"{name} of shape {list(array.shape)} do not fit {count} samples; give one "
            "value for each"
        )
    return array


def _is_missing(array: npt.NDArray[Any]) -> Any:  # noqa: ANN401, of numpy's stubs
    if array.dtype == object:
        # Only NaN differs from itself.
        return np.array([each is None or each != each for each in array], dtype=bool)
    if array.dtype.kind in "fc":
        return np.isnan(array)
    if array.dtype.kind == "M":
        return np.isnat(array)
    return np.zeros(len(array), dtype=bool)
