"""Ranks with the same device: they share one curve when they agree, and a straggler among them is named."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from .profiles import Measurement

_SHARED_WITHIN = 0.05
"""Equal ranks whose times differ by no more than this share one curve, so that the planner sees one type."""
_SHARED_WITHIN_EMULATED = 0.3
"""The same for emulated ranks: one machine stands in for several, and what it does beside has no part in the emulation."""
_STRAGGLER_FROM = 1.1
"""A rank this many times slower than its equals is called a straggler."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that is slower than others with the same device."""

    rank: int
    """The slow rank."""
    equals: tuple[int, ...]
    """The ranks it was compared with."""
    factor: float
    """How many times longer its micro-steps take."""
    extra_s: float
    """Seconds more per micro-step, median over the compared sizes."""

    def __str__(self) -> str:
        """A sentence for the log."""
        others = ", ".join(map(str, self.equals))
        return (
            f"rank {self.rank} takes {self.factor:.2f} times as long as rank{'s' if len(self.equals) > 1 else ''} "
            f"{others} with the same device ({1e3 * self.extra_s:.0f} ms more per micro-step): look for another "
            "program on it, a power or temperature limit, or a slower host."
        )


def share_curves(
    points: Sequence[tuple[Measurement, ...]], kinds: Sequence[Hashable], slowdowns: Sequence[float] | None = None
) -> tuple[list[tuple[Measurement, ...]], list[Straggler]]:
    """Give equal ranks that agree the same points, and find those that do not.

    Args:
        points: Every rank's measurements, in rank order.
        kinds: Every rank's device; equal entries mean equal ranks.
        slowdowns: Every rank's emulated slowdown; None = nothing is emulated. Equal ranks are compared without it, and
            those that agree have the same points but for it.

    Returns:
        The points to use, in rank order, and the stragglers; emulated ranks, which are as slow as they are told, have
        none.
    """
    if slowdowns is not None:
        own = [_times(points[rank], 1.0 / factor) for rank, factor in enumerate(slowdowns)]
        # Where all are slowed, pauses leave room for what else the machine does: the fastest is undisturbed.
        if min(slowdowns) > 1.0:
            shared, _ = _share(own, kinds, math.inf, min)
        else:
            shared, _ = _share(own, kinds, _SHARED_WITHIN_EMULATED, statistics.median)
        return [_times(shared[rank], factor) for rank, factor in enumerate(slowdowns)], []
    return _share(points, kinds, _SHARED_WITHIN, statistics.median)


def _times(points: Sequence[Measurement], factor: float) -> tuple[Measurement, ...]:
    return tuple(replace(point, step_time_s=point.step_time_s * factor) for point in points)


def _share(
    points: Sequence[tuple[Measurement, ...]],
    kinds: Sequence[Hashable],
    within: float,
    merge: Callable[[Iterable[float]], float],
) -> tuple[list[tuple[Measurement, ...]], list[Straggler]]:
    result = list(points)
    stragglers: list[Straggler] = []
    for kind in dict.fromkeys(kinds):
        members = [rank for rank, other in enumerate(kinds) if other == kind]
        times = {rank: {p.micro_batch_size: p.step_time_s for p in points[rank]} for rank in members}
        common = set.intersection(*(set(own) for own in times.values()))
        if len(members) < 2 or not common:
            continue
        # The lower median: of two ranks, the faster one is what the device can do.
        reference = {size: statistics.median_low(times[rank][size] for rank in members) for size in common}
        ratios = {rank: statistics.median(times[rank][s] / reference[s] for s in common) for rank in members}
        # Where noise makes one rank faster at some sizes and another one at others, none is at the reference itself.
        usual = statistics.median_low(ratios.values())
        factors = {rank: ratio / usual for rank, ratio in ratios.items()}
        stragglers += [
            Straggler(
                rank=rank,
                equals=tuple(other for other in members if factors[other] < _STRAGGLER_FROM),
                factor=factors[rank],
                extra_s=statistics.median(times[rank][s] - reference[s] for s in common),
            )
            for rank in members
            if factors[rank] >= _STRAGGLER_FROM
        ]
        alike = [rank for rank in members if abs(factors[rank] - 1.0) <= within]
        shared = _merged_points([points[rank] for rank in alike], merge)
        for rank in alike if len(alike) > 1 else []:
            result[rank] = shared
    return result, stragglers


def _merged_points(
    points: Sequence[tuple[Measurement, ...]], merge: Callable[[Iterable[float]], float]
) -> tuple[Measurement, ...]:
    """One time for each size; sizes that only some have measured are left out where all have measured larger ones."""
    reach = min(own[-1].micro_batch_size for own in points)
    by_size: dict[int, list[Measurement]] = {}
    for point in sorted((p for own in points for p in own), key=lambda p: p.micro_batch_size):
        by_size.setdefault(point.micro_batch_size, []).append(point)
    return tuple(
        Measurement(
            micro_batch_size=size,
            step_time_s=merge(p.step_time_s for p in found),
            peak_memory_bytes=max(p.peak_memory_bytes for p in found),
        )
        for size, found in by_size.items()
        if len(found) == len(points) or size > reach
    )
