"""Step-time curves: from a few noisy measurements to one time for every micro-batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression

from .errors import ProfileError
from .profiles import Measurement

FloatArray = npt.NDArray[np.float64]


class StepTimeCurve:
    """Compute time of one micro-step as a non-decreasing function of the micro-batch size.

    Made by `fit`, or directly from a table of times.

    Args:
        times: Shape (max_micro_batch_size + 1,), seconds, index = micro-batch size; times[0] must be 0 and the
            times must not decrease.

    Raises:
        ProfileError: The table breaks one of these rules.
    """

    def __init__(self, times: Sequence[float] | FloatArray) -> None:
        table = np.array(times, dtype=np.float64)
        if table.ndim != 1 or table.size == 0 or table[0] != 0.0 or not np.all(np.isfinite(table)):
            raise ProfileError("a step-time table is one-dimensional, finite and starts with 0 for no samples.")
        if np.any(np.diff(table) < 0.0):
            size = int(np.argmax(np.diff(table) < 0.0)) + 1
            raise ProfileError(
                f"a step-time table must not decrease, but size {size} takes {table[size]} s after "
                f"{table[size - 1]} s; use StepTimeCurve.fit for raw measurements."
            )
        table.setflags(write=False)
        self._times = table

    @classmethod
    def fit(cls, points: Sequence[Measurement], *, max_micro_batch_size: int) -> StepTimeCurve:
        """The curve through measured points.

        - Times that decrease somewhere are replaced by their isotonic regression (least squares, equal weights);
          times that never decrease are used unchanged.
        - Between points: monotone cubic interpolation (PCHIP, Fritsch and Carlson 1980).
        - Beyond the last point: a straight line with the slope of the last two points. Points that the
          regression has pooled into one level count as one there, so that noise at the end of a curve does not
          make more samples look free; a curve of a single level continues in proportion to the size.
        - Below the first point: the line through the first two points, but never less than in proportion to
          the size. A single point therefore means a time proportional to the size.

        Args:
            points: Measurements with increasing micro-batch sizes; sizes above the largest allowed one help the
                fit and are not part of the curve.
            max_micro_batch_size: Largest size of the curve, in samples; 0 for a rank that cannot hold any.

        Raises:
            ProfileError: There is no point, sizes do not increase, a time is not finite or not above 0, or
                max_micro_batch_size is negative.
        """
        _check(points, max_micro_batch_size)
        sizes = np.array([p.micro_batch_size for p in points], dtype=np.float64)
        seconds = np.array([p.step_time_s for p in points], dtype=np.float64)
        if np.any(np.diff(seconds) < 0.0):
            seconds = np.asarray(isotonic_regression(seconds).x, dtype=np.float64)
        wanted = np.arange(1, max_micro_batch_size + 1, dtype=np.float64)
        times = np.zeros(max_micro_batch_size + 1)
        times[1:] = _evaluate(sizes, seconds, wanted)
        # Interpolation may fall below a neighbour by a rounding error; the curve may not.
        return cls(np.maximum.accumulate(times))

    @property
    def max_micro_batch_size(self) -> int:
        """Largest size of the curve, in samples."""
        return self._times.size - 1

    def times(self) -> FloatArray:
        """Seconds for every size: shape (max_micro_batch_size + 1,), index = size, times()[0] = 0; read-only."""
        return self._times

    def __call__(self, micro_batch_size: int) -> float:
        """Seconds of one micro-step with `micro_batch_size` samples.

        Raises:
            ProfileError: The size is negative or above max_micro_batch_size.
        """
        if not 0 <= micro_batch_size <= self.max_micro_batch_size:
            raise ProfileError(
                f"micro-batch size {micro_batch_size} is outside 0 to {self.max_micro_batch_size}, the sizes that fit."
            )
        return float(self._times[micro_batch_size])

    def largest_within(self, seconds: float) -> int:
        """Largest micro-batch size that takes at most `seconds`; 0 when not even one sample does."""
        return max(0, int(np.searchsorted(self._times, seconds, side="right")) - 1)

    def fastest_size(self) -> int:
        """The size with the most samples per second, the smallest such; 0 when no sample fits."""
        if self.max_micro_batch_size == 0:
            return 0
        return int(np.argmax(np.arange(1, self._times.size) / self._times[1:])) + 1


def _check(points: Sequence[Measurement], max_micro_batch_size: int) -> None:
    if max_micro_batch_size < 0:
        raise ProfileError(f"max_micro_batch_size is {max_micro_batch_size}; it must be at least 0.")
    if not points:
        raise ProfileError("`points` is empty; a step-time curve needs at least one measurement.")
    previous = 0
    for index, point in enumerate(points):
        if point.micro_batch_size <= previous:
            raise ProfileError(
                f"points[{index}]: `micro_batch_size` {point.micro_batch_size} follows {previous}; "
                "sizes must be at least 1 and increase."
            )
        if not math.isfinite(point.step_time_s) or point.step_time_s <= 0.0:
            raise ProfileError(
                f"points[{index}]: `step_time_s` is {point.step_time_s}; it must be finite and greater than 0."
            )
        previous = point.micro_batch_size


def _evaluate(sizes: FloatArray, seconds: FloatArray, wanted: FloatArray) -> FloatArray:
    first, last = sizes[0], sizes[-1]
    times = np.empty_like(wanted)
    below, above = wanted < first, wanted > last
    proportional = seconds[0] * wanted[below] / first
    slope = (seconds[1] - seconds[0]) / (sizes[1] - first) if sizes.size > 1 else seconds[0] / first
    times[below] = np.maximum(proportional, seconds[0] - slope * (first - wanted[below]))
    times[above] = seconds[-1] + _end_slope(sizes, seconds) * (wanted[above] - last)
    inside = ~below & ~above
    if sizes.size > 1 and not np.all(np.isin(wanted[inside], sizes)):
        times[inside] = PchipInterpolator(sizes, seconds)(wanted[inside])
    measured = np.isin(wanted, sizes)
    times[measured] = seconds[np.searchsorted(sizes, wanted[measured])]
    return times


def _end_slope(sizes: FloatArray, seconds: FloatArray) -> float:
    lower = np.flatnonzero(seconds < seconds[-1])
    if lower.size == 0:
        return float(seconds[-1] / sizes[-1])
    before = int(lower[-1])
    return float((seconds[-1] - seconds[before]) / (sizes[-1] - sizes[before]))
