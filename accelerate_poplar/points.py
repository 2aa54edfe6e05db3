"""Which micro-batch sizes to time next: doubling up to the cap, then where interpolation is least certain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np


class PointPicker:
    """Asked for the next size to time, told what was measured; knows no clock and no device.

    After the doubling phase, the middle of every gap is a candidate. How wrong interpolation is there is judged by
    the points themselves: each inner point is predicted from its neighbours, and a gap is as uncertain as the worse
    of its two ends, less the more gaps were halved already.

    Args:
        largest: Never ask for more.
        relative_error: Stop when every gap's estimated relative error is at most this.
    """

    def __init__(self, *, largest: int, relative_error: float) -> None:
        self.largest = largest
        self.relative_error = relative_error
        self._times: dict[int, float] = {}

    def tell(self, micro_batch_size: int, step_time_s: float) -> None:
        """Record a measurement."""
        self._times[micro_batch_size] = step_time_s

    def lower_cap(self, largest: int) -> None:
        """A size above `largest` turned out not to fit."""
        self.largest = min(self.largest, largest)
        self._times = {size: seconds for size, seconds in self._times.items() if size <= self.largest}

    def ask(self) -> int | None:
        """The next size to time, or None when the curve is known well enough."""
        if self.largest < 1:
            return None
        size = 1
        while size < self.largest:
            if size not in self._times:
                return size
            size *= 2
        if self.largest not in self._times:
            return self.largest
        return self._least_certain()

    def _least_certain(self) -> int | None:
        errors = interpolation_errors(self._times)
        sizes = sorted(self._times)
        best: tuple[float, int] | None = None
        for low, high in itertools.pairwise(sizes):
            if high - low < 2:
                continue
            error = max(errors.get(low, 0.0), errors.get(high, 0.0))
            # Halving a gap of a smooth curve leaves about a quarter of the error.
            if error / 4.0 > self.relative_error and (best is None or error > best[0]):
                best = (error, (low + high) // 2)
        return None if best is None else best[1]


def interpolation_errors(times: Mapping[int, float]) -> dict[int, float]:
    """Relative error of predicting each inner point linearly from its two neighbours.

    Args:
        times: Seconds by micro-batch size, all greater than 0.

    Returns:
        Error by size, at least 0, without the first and the last size.
    """
    sizes = sorted(times)
    errors: dict[int, float] = {}
    for low, middle, high in zip(sizes, sizes[1:], sizes[2:], strict=False):
        predicted = float(np.interp(middle, [low, high], [times[low], times[high]]))
        error = abs(predicted - times[middle]) / times[middle]
        errors[middle] = error if math.isfinite(error) else math.inf
    return errors
