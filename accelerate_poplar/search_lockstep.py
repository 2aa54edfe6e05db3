"""The exact optimum where all ranks wait for each other in every micro-step (ZeRO-2 and ZeRO-3).

If the slowest rank of a micro-step computes for t seconds, every other rank may as well run the largest micro-batch
it can finish in t. A micro-step is therefore one of few candidates, each with a capacity in samples and a cost in
seconds, and the step is the cheapest collection of candidates whose capacities cover the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .curve import FloatArray
from .search_levels import IntArray, capacities, fill
from .step_model import RankType

_TIE = 1.0 + 1e-12
"""Costs closer than this factor are ties; the larger micro-step then wins, whatever the rounding."""

_MOST_COUNTS = 64
"""Possible numbers of micro-steps beyond which a bound per number is not worth its time."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Micro-steps worth running, in increasing order of capacity and of cost."""

    seconds: FloatArray
    """Compute time of the slowest rank, in seconds."""
    capacity: IntArray
    """Samples all ranks together can run in that time."""
    cost: FloatArray
    """Seconds of the micro-step, exposed communication included."""


def plan_lockstep(
    types: Sequence[RankType], global_batch_size: int, cost: Callable[[FloatArray], FloatArray]
) -> dict[int, tuple[int, ...]]:
    """Micro-batch sizes per rank with the least total cost of all micro-steps.

    Args:
        types: The ranks; at least one of them can hold a sample.
        global_batch_size: Samples to give out, at least 1.
        cost: Seconds of micro-steps, given the slowest rank's compute seconds; must not decrease.

    Returns:
        Rank -> micro-batch sizes, longest micro-step first; equally many for all ranks.
    """
    found = candidates(types, global_batch_size, cost)
    chosen = cheapest_cover(found.capacity, found.cost, global_batch_size)
    return build_steps(types, [float(found.seconds[index]) for index in chosen], global_batch_size)


def candidates(
    types: Sequence[RankType], global_batch_size: int, cost: Callable[[FloatArray], FloatArray]
) -> Candidates:
    """All micro-steps that are not beaten by one with at least the capacity at no more cost."""
    seconds, capacity = capacities([kind.curve.times() for kind in types], [kind.count for kind in types])
    costs = cost(seconds)
    enough = min(int(np.searchsorted(capacity, global_batch_size)) + 1, capacity.size)
    seconds, capacity, costs = seconds[:enough], capacity[:enough], costs[:enough]
    # Where communication hides behind compute, a longer micro-step can cost the same: keep the larger one.
    useful = np.append(costs[:-1] < costs[1:], True)
    return Candidates(seconds=seconds[useful], capacity=capacity[useful], cost=costs[useful])


def build_steps(types: Sequence[RankType], seconds: Sequence[float], need: int) -> dict[int, tuple[int, ...]]:
    """Turn micro-step durations that cover `need` samples into sizes per rank that sum to exactly `need`.

    All micro-steps but the shortest are full; the shortest holds what is left, given out so that it ends as early
    as possible.

    Args:
        types: The ranks.
        seconds: Compute time of the slowest rank per micro-step.
        need: Samples to give out; more than all micro-steps but the shortest can hold.
    """
    full = sorted(seconds, reverse=True)[:-1]
    sizes: dict[int, tuple[int, ...]] = {}
    largest = [tuple(kind.curve.largest_within(t) for t in full) for kind in types]
    left = need - sum(kind.count * sum(own) for kind, own in zip(types, largest, strict=True))
    shares = fill([kind.curve.times() for kind in types], [kind.count for kind in types], left)
    for kind, own, share in zip(types, largest, shares, strict=True):
        plain, more = (*own, share.base), (*own, share.base + 1)
        sizes.update({rank: more if i < share.extra else plain for i, rank in enumerate(kind.ranks)})
    return sizes


def cheapest_cover(capacity: IntArray, cost: FloatArray, need: int) -> list[int]:
    """Indices, with repetition, of the cheapest collection whose capacities sum to at least `need`.

    Exact: an unbounded covering knapsack by dynamic programming. It is kept small by a common divisor of the
    capacities, by dropping candidates that a bound rules out, and by setting aside copies of the candidate with the
    best cost per sample of which any optimal collection must hold so many.

    Args:
        capacity: Samples per candidate, shape (n,), increasing, at least 1.
        cost: Seconds per candidate, shape (n,), increasing, above 0.
        need: Samples to cover, at least 1.
    """
    divisor = int(np.gcd.reduce(capacity))
    units, target = capacity // divisor, -(-need // divisor)
    bound = _upper_bound(units, cost, target) * _TIE
    per_unit = cost / units
    best = int(np.flatnonzero(per_unit <= per_unit.min() * _TIE)[-1])
    waste = cost - cost[best] / units[best] * units
    slack = bound - cost[best] / units[best] * target + cost[best] * 1e-12
    kept = np.flatnonzero(waste <= slack)
    kept = kept[_may_take_part(units[kept], cost[kept], target, bound)]
    aside = _copies_of_best(units[kept], waste[kept], slack, int(units[best]), target) if best in kept else 0
    least = _cover_costs(units[kept], cost[kept], target - aside * int(units[best]))
    return [best] * aside + [int(kept[i]) for i in _trace(units[kept], cost[kept], least)]


def _upper_bound(units: IntArray, cost: FloatArray, target: int) -> float:
    """Cost of the best collection of equal micro-steps and one smaller last one."""
    full = target // units
    left = target - full * units
    last = np.searchsorted(units, left)
    return float(np.min(full * cost + np.where(left > 0, cost[np.minimum(last, units.size - 1)], 0.0)))


def _may_take_part(units: IntArray, cost: FloatArray, target: int, bound: float) -> npt.NDArray[np.bool_]:
    """Which candidates a collection of cost `bound` or less may contain; True where that is not known.

    With h the lower convex hull of the candidates' costs, K micro-steps that cover x units cost at least K h(x / K)
    (Jensen). Few numbers K are possible where micro-steps are large, and with few micro-steps the best ones are
    nearly alike.
    """
    hull = _lower_hull(units, cost)

    def at_least(steps: IntArray, covered: IntArray) -> FloatArray:
        mean = np.maximum(0, covered) / np.maximum(1, steps)
        each = np.interp(mean, units[hull], cost[hull])
        return np.where(mean <= units[-1], np.where(covered > 0, steps * each, 0.0), np.inf)

    fewest, most = -(-target // int(units[-1])), int(bound / cost[0])
    if most - fewest >= _MOST_COUNTS:
        return np.ones(units.size, dtype=bool)
    counts = np.arange(fewest, most + 1, dtype=np.int64)
    counts = counts[at_least(counts, np.full(counts.size, target)) <= bound]
    others = at_least(np.maximum(0, counts - 1)[:, None], (target - units)[None, :])
    others[counts == 1] = np.where(units >= target, 0.0, np.inf)
    return np.asarray((cost + others).min(axis=0, initial=np.inf) <= bound)


def _lower_hull(units: IntArray, cost: FloatArray) -> list[int]:
    """Indices of the lower convex hull of the points (units, cost), by increasing units."""
    hull: list[int] = []
    x, y = units.tolist(), cost.tolist()
    for i in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    return hull


def _copies_of_best(units: IntArray, waste: FloatArray, slack: float, best: int, target: int) -> int:
    """Copies of the best candidate that some optimal collection must contain.

    Everything else in a collection adds its waste, and the sum of wastes may not exceed the slack. Besides, among
    `best` other candidates some subset has a sum divisible by `best` (pigeonhole) and could be replaced.
    """
    others = waste > slack * 1e-9
    room = (best - 1) * int(units.max())
    # Candidates as good as the best one (their waste is rounding) escape the first argument, not the second.
    if np.count_nonzero(~others) == 1 and slack > 0.0:
        room = min(room, int(slack * np.max(units[others] / waste[others], initial=0.0)) + 1)
    return max(0, (target - room) // best)


def _cover_costs(units: IntArray, cost: FloatArray, target: int) -> FloatArray:
    """Least cost to cover 0, 1, ..., target units; shape (target + 1,)."""
    least = np.full(target + 1, np.inf)
    least[0] = 0.0
    for size, price in zip(units.tolist(), cost.tolist(), strict=True):
        np.minimum(least[1 : size + 1], price, out=least[1 : size + 1])
        # Block by block, so that a block may build on copies of the same candidate in the one before it.
        for start in range(size + 1, target + 1, size):
            block = least[start : start + size]
            np.minimum(block, least[start - size : start - size + block.size] + price, out=block)
    return least


def _trace(units: IntArray, cost: FloatArray, least: FloatArray) -> list[int]:
    chosen: list[int] = []
    left = least.size - 1
    while left > 0:
        options = cost + least[np.maximum(0, left - units)]
        pick = int(np.flatnonzero(options <= options.min() * _TIE)[-1])
        chosen.append(pick)
        left -= int(units[pick])
    return chosen
