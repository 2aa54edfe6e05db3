"""Which micro-batch sizes to time next: doubling up to the cap, then where interpolation is least certain."""

from __future__ import annotations

import itertools
from collections.abc import Mapping


class PointPicker:
    """Asked for the next size to time, told what was measured; knows no clock and no device.

    After the doubling phase, the middle of every gap is a candidate. How wrong interpolation is there is judged by
    the points themselves: each inner point is predicted from its two neighbours, and a gap is as uncertain as the
    worse of its two ends. Halving a gap of a smooth curve leaves a quarter of its error. What is within the noise of
    the measurements is not an error of the interpolation.

    Args:
        largest: Never ask for more; 0 = nothing to ask.
        relative_error: Stop when every gap's estimated relative error is at most this.
    """

    def __init__(self, *, largest: int, relative_error: float) -> None:
        self.largest = largest
        self.relative_error = relative_error
        self._times: dict[int, float] = {}
        self._noise: dict[int, float] = {}
        self._skipped: set[int] = set()

    def tell(self, micro_batch_size: int, step_time_s: float, noise: float = 0.0) -> None:
        """Record a measurement and its relative standard error."""
        self._times[micro_batch_size] = step_time_s
        self._noise[micro_batch_size] = noise

    def skip(self, micro_batch_size: int) -> None:
        """Never ask for this size again."""
        self._skipped.add(micro_batch_size)

    def lower_cap(self, largest: int) -> None:
        """Sizes above `largest` turned out not to fit."""
        self.largest = min(self.largest, largest)
        self._times = {size: seconds for size, seconds in self._times.items() if size <= self.largest}

    def ask(self) -> int | None:
        """The next size to time, or None when the curve is known well enough."""
        if self.largest < 1:
            return None
        size = 1
        while size < self.largest:
            if self._is_new(size):
                return size
            size *= 2
        return self.largest if self._is_new(self.largest) else self._least_certain()

    def _is_new(self, size: int) -> bool:
        return size not in self._times and size not in self._skipped

    def _least_certain(self) -> int | None:
        errors = interpolation_errors(self._times)
        best: tuple[float, int] | None = None
        for low, high in itertools.pairwise(sorted(self._times)):
            middle = (low + high) // 2
            if high - low < 2 or not self._is_new(middle):
                continue
            error = max(errors.get(size, 0.0) - 2.0 * self._noise[size] for size in (low, high)) / 4.0
            if error > self.relative_error and (best is None or error > best[0]):
                best = (error, middle)
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
    for (low, middle), high in zip(itertools.pairwise(sizes), sizes[2:], strict=False):
        share = (middle - low) / (high - low)
        predicted = times[low] + share * (times[high] - times[low])
        errors[middle] = abs(predicted - times[middle]) / times[middle]
    return errors
