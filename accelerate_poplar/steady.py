"""Times of micro-batch sizes without the differences that noise alone explains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_TOLD_APART = 3.0
"""Standard errors by which a larger size must be slower per sample to be believed."""
_LEAN = 0.5
"""Standard errors by which the first and the last of sizes that noise does not tell apart are moved from their mean."""
_OF_A_MEDIAN = math.sqrt(math.pi / 2.0)
"""Standard error of a median over that of a mean, for normal noise."""


@dataclass(frozen=True)
class _Level:
    """Sizes that noise does not tell apart."""

    sizes: tuple[int, ...]
    per_sample_s: float
    error: float
    """Standard error of the seconds per sample, relative to them."""

    def slower_by_noise_alone(self, smaller: _Level) -> bool:
        """True where these sizes take longer per sample than the smaller ones, but not by so much that it is believed."""
        slower = self.per_sample_s / smaller.per_sample_s - 1.0
        return 0.0 < slower <= _TOLD_APART * math.hypot(self.error, smaller.error)

    def leaning(self) -> list[float]:
        """Seconds per sample by size, from half a standard error more to half a standard error less."""
        leans = np.linspace(_LEAN, -_LEAN, len(self.sizes)) if len(self.sizes) > 1 else [0.0]
        return [self.per_sample_s * (1.0 + float(lean) * self.error) for lean in leans]

    def join(self, larger: _Level) -> _Level:
        """Both as one: the mean of their times, weighted by how exactly they are known."""
        own, other = self.error**-2, larger.error**-2
        return _Level(
            sizes=self.sizes + larger.sizes,
            per_sample_s=(own * self.per_sample_s + other * larger.per_sample_s) / (own + other),
            error=(own + other) ** -0.5,
        )


def steady_times(seconds: Mapping[int, float], repeats: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Seconds by size, where a sample takes longer in a larger micro-batch only if the repeats really say so.

    The fastest of many sizes is mostly the one that noise made fast, and a planner would follow it to many small
    micro-batches. Larger micro-batches use a device as well as smaller ones or better, so neighbours in the other order
    are pooled as in isotonic regression (pool adjacent violators, Ayer et al. 1955), unless they differ by more than
    three standard errors: a curve that gets worse, as at the edge of a cache, keeps its shape. Among pooled sizes the larger
    ones stay faster by what the repeats cannot tell, so that a plan has few micro-batches rather than many.

    Args:
        seconds: What stands for the repeats of a size, by micro-batch size.
        repeats: Seconds of every repeat, by micro-batch size. The typical spread of one size counts for all of them, since
            that of a few repeats is itself mostly luck; one repeat that took far too long, as the first of a size may,
            hardly adds to it.

    Returns:
        Seconds by size, in increasing order of size; as given where there are no two repeats, or these do not differ.
    """
    spreads = [_spread(own) for size, own in repeats.items() if size in seconds and len(own) > 1]
    spread = statistics.median(spreads) if spreads else 0.0
    if spread == 0.0:
        return {size: seconds[size] for size in sorted(seconds)}
    levels: list[_Level] = []
    for size in sorted(seconds):
        level = _Level((size,), seconds[size] / size, _OF_A_MEDIAN * spread / math.sqrt(len(repeats[size])))
        while levels and level.slower_by_noise_alone(levels[-1]):
            level = levels.pop().join(level)
        levels.append(level)
    found: dict[int, float] = {}
    per_sample, before = math.inf, math.inf
    for level in levels:
        # Levels that rise are told apart; where they fall, leaning does not turn them round.
        per_sample, before = math.inf if level.per_sample_s > before else per_sample, level.per_sample_s
        for size, leaning in zip(level.sizes, level.leaning(), strict=True):
            per_sample = min(per_sample, leaning)
            found[size] = size * per_sample
    return found


def _spread(seconds: Sequence[float]) -> float:
    """Standard deviation of two or more repeats relative to their middle.

    From three on by the median absolute deviation, which one outlier does not change; of few values it comes out too small,
    which about n / (n - 1) makes up for (0.95 to 1 of the deviation from 5 values on).
    """
    count = len(seconds)
    if count == 2:
        return statistics.stdev(seconds) / statistics.fmean(seconds)
    return _deviation(seconds) * count / (count - 1)


def standard_error(seconds: Sequence[float]) -> float:
    """Standard error of the median relative to it, estimated from the median absolute deviation."""
    return _deviation(seconds) / math.sqrt(len(seconds))


def _deviation(seconds: Sequence[float]) -> float:
    """Standard deviation relative to the median, estimated from the median absolute deviation."""
    middle = statistics.median(seconds)
    return 1.4826 * statistics.median(abs(s - middle) for s in seconds) / middle if middle > 0 else 0.0
