"""Sharing samples out up to a common finishing time: the step both exact searches have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .curve import FloatArray

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What the ranks of one type get: all get `base`, the first `extra` of them one sample more."""

    base: int
    """Samples every rank of the type gets."""
    extra: int
    """Number of ranks that get one sample more."""

    def of(self, position: int) -> int:
        """Samples of the rank at `position` within its type."""
        return self.base + (1 if position < self.extra else 0)


def fill(finish: Sequence[FloatArray], counts: Sequence[int], need: int) -> list[Share]:
    """Give out `need` samples so that the last rank finishes as early as possible.

    Everything that can be done strictly before the finishing time is done; what is left goes to ranks that
    finish exactly then, type by type and evenly within a type.

    Args:
        finish: Per type, shape (n + 1,): seconds at which a rank finishes its first 0, 1, ..., n samples;
            non-decreasing. Together the ranks must be able to hold `need` samples.
        counts: Ranks per type.
        need: Samples to give out, at least 0.

    Returns:
        One share per type.
    """
    level = _finishing_time(finish, counts, need)
    lows = [int(np.searchsorted(times[1:], level, side="left")) for times in finish]
    highs = [int(np.searchsorted(times[1:], level, side="right")) for times in finish]
    left = need - sum(low * count for low, count in zip(lows, counts, strict=True))
    shares = []
    for low, high, count in zip(lows, highs, counts, strict=True):
        taken = min(left, (high - low) * count)
        left -= taken
        shares.append(Share(base=low + taken // count, extra=taken % count))
    return shares


def capacities(finish: Sequence[FloatArray], counts: Sequence[int]) -> tuple[FloatArray, IntArray]:
    """What all ranks together can do by when.

    Args:
        finish: Per type, shape (n + 1,): seconds at which a rank finishes its first 0, 1, ..., n samples.
        counts: Ranks per type.

    Returns:
        The different times at which some rank finishes a sample, increasing, and the samples finished by then.
    """
    values = np.concatenate([times[1:] for times in finish])
    sizes = [times.size - 1 for times in finish]
    weights = np.repeat(np.array(counts, dtype=np.int64), sizes)
    order = np.argsort(values, kind="stable")
    values, reached = values[order], np.cumsum(weights[order])
    last = np.append(values[:-1] < values[1:], True)
    return values[last], reached[last]


def _finishing_time(finish: Sequence[FloatArray], counts: Sequence[int], need: int) -> float:
    if need == 0:
        return 0.0
    seconds, reached = capacities(finish, counts)
    return float(seconds[np.searchsorted(reached, need, side="left")])
