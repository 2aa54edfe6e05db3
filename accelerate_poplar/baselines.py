"""The strategies the optimum is compared with, each as published and no better.

All take the ranks sorted into types and the samples of one optimizer step, and return the micro-batch sizes of every
rank, equally many for all ranks where the ZeRO stage needs that.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from .errors import InsufficientMemoryError, PlanError
from .plan import LOCK_STEP_STAGES
from .profiles import StageProfile
from .search_levels import capacities
from .search_lockstep import build_steps
from .step_model import RankType, micro_step_cost

Sizes = dict[int, tuple[int, ...]]


def plan_even(types: Sequence[RankType], global_batch_size: int) -> Sizes:
    """What DeepSpeed does by itself: the same samples on every rank, in the same micro-batches.

    The largest micro-batch that fits on every rank fixes the number of micro-steps, over which the samples are then
    spread evenly. The last micro-step holds what is left of the global batch.

    Raises:
        InsufficientMemoryError: Some rank cannot hold one sample.
    """
    ranks = sorted(rank for kind in types for rank in kind.ranks)
    tightest = min(types, key=lambda kind: kind.curve.max_micro_batch_size)
    cap = tightest.curve.max_micro_batch_size
    if cap == 0:
        raise InsufficientMemoryError(
            f"rank {tightest.ranks[0]}: an even split gives every rank the same micro-batch, but not one sample fits "
            "there. Use the strategy `optimal`, a higher ZeRO stage, or leave the rank out."
        )
    steps = -(-global_batch_size // (len(ranks) * cap))
    size = -(-global_batch_size // (len(ranks) * steps))
    left = global_batch_size - (steps - 1) * size * len(ranks)
    base, extra = divmod(left, len(ranks))
    return {rank: (size,) * (steps - 1) + (base + (1 if i < extra else 0),) for i, rank in enumerate(ranks)}


def plan_by_flops(types: Sequence[RankType], zero_stage: int, global_batch_size: int) -> Sizes:
    """Whale's idea (Jia et al., USENIX ATC 2022): samples in proportion to the devices' peak FLOP/s.

    As few micro-steps as the memory of every rank allows, of nearly equal size.

    Raises:
        PlanError: The peak of a rank is unknown; names the ranks.
    """
    unknown = sorted(kind.ranks[0] for kind in types if kind.peak_flops <= 0.0)
    if unknown:
        raise PlanError(
            f"the strategy `flops` needs `peak_flops` of every rank, but it is 0 for rank {unknown[0]}"
            f"{f' and {len(unknown) - 1} other kinds of rank' if len(unknown) > 1 else ''}. Fill it in, or use "
            "`proportional` or `optimal`, which go by measured times."
        )
    return _in_proportion(types, [kind.peak_flops for kind in types], zero_stage, global_batch_size)


def plan_by_speed(types: Sequence[RankType], zero_stage: int, global_batch_size: int) -> Sizes:
    """Samples in proportion to the best measured samples per second; micro-steps as with `plan_by_flops`."""
    return _in_proportion(types, [_best_speed(kind) for kind in types], zero_stage, global_batch_size)


def plan_poplar_local(types: Sequence[RankType], global_batch_size: int) -> Sizes:
    """Poplar's greedy for ZeRO-0/1 (Zhang et al., AAAI 2025), as we understand it.

    Samples in proportion to peak speed, rounded down; what is left goes one by one to the rank that would finish
    first. Each rank runs micro-batches of its fastest size and one smaller one for the rest.
    """
    speeds = [_best_speed(kind) for kind in types]
    total_speed = sum(kind.count * speed for kind, speed in zip(types, speeds, strict=True))
    samples: dict[int, int] = {}
    queue: list[tuple[float, int, int]] = []
    for index, (kind, speed) in enumerate(zip(types, speeds, strict=True)):
        share = int(global_batch_size * speed / total_speed)
        samples.update(dict.fromkeys(kind.ranks, share))
        if speed > 0.0:
            finish = _finish_at_fastest(kind, share + 1)
            queue.extend((finish, index, rank) for rank in kind.ranks)
    heapq.heapify(queue)
    for _ in range(global_batch_size - sum(samples.values())):
        _, index, rank = queue[0]
        samples[rank] += 1
        heapq.heapreplace(queue, (_finish_at_fastest(types[index], samples[rank] + 1), index, rank))
    return {rank: _at_fastest(kind, samples[rank]) for kind in types for rank in kind.ranks}


def plan_poplar_lockstep(types: Sequence[RankType], stage: StageProfile, global_batch_size: int) -> Sizes:
    """Poplar's sweep for ZeRO-2/3 (Zhang et al., AAAI 2025), as we understand it.

    For every duration t that some micro-batch takes, all ranks run the largest micro-batch they finish in t, in
    as many micro-steps as the global batch needs. The cheapest t wins; the last micro-step is shrunk.
    """
    seconds, capacity = capacities([kind.curve.times() for kind in types], [kind.count for kind in types])
    steps = -(-global_batch_size // capacity)
    cheapest = int(np.argmin(steps * micro_step_cost(stage, seconds)))
    return build_steps(types, [float(seconds[cheapest])] * int(steps[cheapest]), global_batch_size)


def _in_proportion(
    types: Sequence[RankType], weights: Sequence[float], zero_stage: int, global_batch_size: int
) -> Sizes:
    usable = [w if kind.curve.max_micro_batch_size else 0.0 for kind, w in zip(types, weights, strict=True)]
    samples = _largest_remainder(types, usable, global_batch_size)
    steps = {
        rank: max(1, -(-samples[rank] // max(1, kind.curve.max_micro_batch_size)))
        for kind in types
        for rank in kind.ranks
    }
    if zero_stage in LOCK_STEP_STAGES:
        steps = dict.fromkeys(steps, max(steps.values()))
    return {rank: _nearly_equal(samples[rank], steps[rank]) for rank in steps}


def _largest_remainder(types: Sequence[RankType], weights: Sequence[float], total: int) -> dict[int, int]:
    """Whole shares in proportion to the weights: rounded down, the largest fractions get what is left."""
    whole = sum(kind.count * weight for kind, weight in zip(types, weights, strict=True))
    samples: dict[int, int] = {}
    fractions: list[tuple[float, int, int]] = []
    for index, (kind, weight) in enumerate(zip(types, weights, strict=True)):
        quota = total * weight / whole
        samples.update(dict.fromkeys(kind.ranks, int(quota)))
        if weight > 0.0:
            fractions.extend((int(quota) - quota, index, rank) for rank in kind.ranks)
    left = total - sum(samples.values())
    for _, _, rank in sorted(fractions)[:left]:
        samples[rank] += 1
    return samples


def _nearly_equal(samples: int, steps: int) -> tuple[int, ...]:
    size, larger = divmod(samples, steps)
    return (size + 1,) * larger + (size,) * (steps - larger)


def _best_speed(kind: RankType) -> float:
    size = kind.curve.fastest_size()
    return size / kind.curve(size) if size else 0.0


def _at_fastest(kind: RankType, samples: int) -> tuple[int, ...]:
    if samples == 0:
        return (0,)
    full, rest = divmod(samples, kind.curve.fastest_size())
    return (kind.curve.fastest_size(),) * full + ((rest,) if rest else ())


def _finish_at_fastest(kind: RankType, samples: int) -> float:
    size = kind.curve.fastest_size()
    full, rest = divmod(samples, size)
    return full * kind.curve(size) + kind.curve(rest) + kind.step_overhead_s
