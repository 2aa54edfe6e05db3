"""Which micro-batch sizes to time next: doubling up to the cap, then where interpolation is least certain."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.interpolate import PchipInterpolator


class PointPicker:
    """Asked for the next size to time, told what was measured; knows no clock and no device.

    After the doubling phase, the middle of every gap between two measured sizes is a candidate, and the gap where
    interpolation may be most wrong comes first (`interpolation_errors`).

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
        best: tuple[float, int] | None = None
        for (low, high), error in interpolation_errors(self._times, self._noise).items():
            middle = (low + high) // 2
            if high - low < 2 or not self._is_new(middle):
                continue
            if error > self.relative_error and (best is None or error > best[0]):
                best = (error, middle)
        return None if best is None else best[1]


@dataclass(frozen=True)
class _Gap:
    """Two neighbouring points."""

    low: int
    high: int
    slope: float
    doubt: float
    """How far noise may have bent the slope."""

    def bend(self, other: _Gap) -> float:
        """Change of slope beyond what noise explains."""
        return max(0.0, abs(self.slope - other.slope) - 2.0 * (self.doubt + other.doubt))


def interpolation_errors(times: Mapping[int, float], noise: Mapping[int, float]) -> dict[tuple[int, int], float]:
    """How wrong a curve may be between neighbouring points, relative to its value.

    A convex or concave curve lies between the chord of a gap and the lines of the two gaps next to it; the height of
    that triangle is the most it can be off. At the ends, where one side is missing, a kink in the middle is assumed.
    If the curve has its kink at a measured point, monotone cubic interpolation (PCHIP, which step-time curves use)
    rounds it off; how far it leaves the chord counts too.

    Args:
        times: Seconds by micro-batch size, all greater than 0.
        noise: Relative standard error of these times.

    Returns:
        Error by gap, at least 0; 0 for straight lines and for fewer than three points.
    """
    sizes = sorted(times)
    if len(sizes) < 3:
        return dict.fromkeys(itertools.pairwise(sizes), 0.0)
    rounded = PchipInterpolator(sizes, [times[size] for size in sizes])
    gaps = []
    for low, high in itertools.pairwise(sizes):
        doubt = (times[low] * noise.get(low, 0.0) + times[high] * noise.get(high, 0.0)) / (high - low)
        gaps.append(_Gap(low, high, (times[high] - times[low]) / (high - low), doubt))
    errors: dict[tuple[int, int], float] = {}
    for position, gap in enumerate(gaps):
        bends = [gap.bend(gaps[other]) for other in (position - 1, position + 1) if 0 <= other < len(gaps)]
        if len(bends) == 2:
            height = bends[0] * bends[1] / sum(bends) if sum(bends) > 0.0 else 0.0
        else:
            height = sum(bends) / 4.0
        width, middle = gap.high - gap.low, (times[gap.low] + times[gap.high]) / 2.0
        off_chord = abs(float(rounded((gap.low + gap.high) / 2.0)) - middle) - 2.0 * gap.doubt * width
        errors[gap.low, gap.high] = max(width * height, off_chord) / middle
    return errors
