"""The exact optimum where ranks do not wait for each other within a step (ZeRO-0 and ZeRO-1).

Each rank's least time for n samples is an unbounded knapsack over its micro-batch sizes. Those least times never
decrease in n, so the best finishing time is found by counting what every rank can do within it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .curve import FloatArray
from .search_levels import fill
from .step_model import RankType

_TIE = 1.0 + 1e-12
"""Times closer than this factor are ties; the larger micro-batch then wins, whatever the rounding."""


def plan_local(types: Sequence[RankType], global_batch_size: int) -> dict[int, tuple[int, ...]]:
    """Micro-batch sizes per rank with the least max_i(sum_k t_i(b_ik) + o_i).

    Args:
        types: The ranks; at least one of them can hold a sample.
        global_batch_size: Samples to give out, at least 1.

    Returns:
        Rank -> micro-batch sizes, largest first; (0,) for a rank without samples.
    """
    limits = _sample_limits(types, global_batch_size)
    least = [least_times(kind.curve.times(), limit) for kind, limit in zip(types, limits, strict=True)]
    finish = [times + kind.step_overhead_s for times, kind in zip(least, types, strict=True)]
    shares = fill(finish, [kind.count for kind in types], global_batch_size)
    sizes: dict[int, tuple[int, ...]] = {}
    for kind, times, share in zip(types, least, shares, strict=True):
        for total in {share.of(0), share.of(kind.count - 1)}:
            micro_batches = _split(kind.curve.times(), times, total)
            sizes.update({r: micro_batches for position, r in enumerate(kind.ranks) if share.of(position) == total})
    return sizes


def least_times(times: FloatArray, limit: int) -> FloatArray:
    """Least seconds for n samples in micro-batches of any sizes, for n = 0 ... limit; shape (limit + 1,).

    Args:
        times: Seconds per micro-batch size, shape (max_micro_batch_size + 1,).
        limit: Largest n wanted; 0 if no sample fits.
    """
    fastest, regular = _fastest(times)
    best = np.full(min(limit, regular + fastest) + 1, np.inf)
    best[0] = 0.0
    for size in range(1, min(times.size - 1, limit) + 1):
        # A size that smaller ones already match cannot improve anything.
        if times[size] < best[size]:
            _allow(best, size, float(times[size]))
    beyond = np.arange(best.size, limit + 1)
    copies = -(-(beyond - best.size + 1) // max(1, fastest))
    best = np.append(best, best[beyond - copies * fastest] + copies * times[fastest])
    # Fewer samples never take longer than more; rounding must not say otherwise.
    return np.minimum.accumulate(best[::-1])[::-1]


def _fastest(times: FloatArray) -> tuple[int, int]:
    """The size with the most samples per second, and the samples beyond which more of it is always best.

    Among as many other micro-batches as that size has samples, some have a sum divisible by it (pigeonhole), and could be
    replaced by micro-batches of that size at no cost. So fewer than that many others are ever needed.
    """
    if times.size == 1:
        return 0, 0
    speeds = np.arange(1, times.size) / times[1:]
    fastest = int(np.flatnonzero(speeds * _TIE >= speeds.max())[-1]) + 1
    return fastest, fastest * (times.size - 1)


def _allow(best: FloatArray, size: int, seconds: float) -> None:
    """Let any number of micro-batches of `size` improve `best`, in place."""
    rows = -(-best.size // size)
    padded = np.full(rows * size, np.inf)
    padded[: best.size] = best
    grid = padded.reshape(rows, size)
    so_far = seconds * np.arange(rows)[:, None]
    grid -= so_far
    np.minimum.accumulate(grid, axis=0, out=grid)
    grid += so_far
    np.minimum(best, padded[: best.size], out=best)


def _sample_limits(types: Sequence[RankType], global_batch_size: int) -> list[int]:
    """Per type, more samples than one rank can have in an optimal plan.

    A rank with best size b and speed v = b / t(b) finishes at least v (T - o) - b samples within T. Asking for the
    global batch gives a T that is reached; nobody works longer than that, at no more than speed v.
    """
    best = [kind.curve.fastest_size() for kind in types]
    speed = [b / kind.curve(b) if b else 0.0 for b, kind in zip(best, types, strict=True)]
    samples = float(global_batch_size)
    for kind, b, v in zip(types, best, speed, strict=True):
        samples += kind.count * (b + v * kind.step_overhead_s)
    reached = samples / sum(kind.count * v for kind, v in zip(types, speed, strict=True))
    return [
        min(global_batch_size, max(0, int(v * (reached - kind.step_overhead_s) * (1.0 + 1e-9)) + 1)) if v else 0
        for kind, v in zip(types, speed, strict=True)
    ]


def _split(times: FloatArray, least: FloatArray, total: int) -> tuple[int, ...]:
    """The micro-batches behind least[total], largest first."""
    if total == 0:
        return (0,)
    fastest, regular = _fastest(times)
    sizes = [fastest] * max(0, (total - regular) // fastest)
    total -= fastest * len(sizes)
    while total > 0:
        top = min(total, times.size - 1)
        options = times[1 : top + 1] + least[total - top : total][::-1]
        size = int(np.flatnonzero(options <= options.min() * _TIE)[-1]) + 1
        sizes.append(size)
        total -= size
    return tuple(sorted(sizes, reverse=True))
