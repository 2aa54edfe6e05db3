"""Time of what a ZeRO stage communicates, measured on the real process group for the model's real byte counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .comm import Ranks
from .memory import ModelSize

_LARGEST_BUFFER_ELEMENTS = 2**24
"""Larger messages are timed with a buffer of this many elements and scaled: beyond it only bandwidth counts."""
_REPEATS = 5

Clock = Callable[[], float]
# torch 2.13 renamed both and warns of the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Communication of one ZeRO stage, as the step-time model wants it."""

    per_micro_step_s: float
    """Seconds in every micro-step."""
    per_step_s: float
    """Seconds once per optimizer step."""
    overlap: float
    """Seconds of per-micro-step communication hidden by one second of compute, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """Seconds of the three collectives ZeRO uses, over a whole model; the slowest rank's."""

    all_reduce_s: float
    """Seconds to all-reduce all gradients."""
    reduce_scatter_s: float
    """Seconds to reduce-scatter all gradients."""
    all_gather_s: float
    """Seconds to gather all parameters from equal shards."""


def time_collectives(
    size: ModelSize, *, ranks: Ranks, device: torch.device, dtype: torch.dtype, clock: Clock = time.perf_counter
) -> CollectiveTimes:
    """Time the three collectives on the default process group; zeros where no group exists or it has one rank.

    Every rank must call it at the same point.
    """
    if ranks.world_size == 1 or not dist.is_available() or not dist.is_initialized():
        return CollectiveTimes(all_reduce_s=0.0, reduce_scatter_s=0.0, all_gather_s=0.0)
    world = ranks.world_size

    def timed(elements: int, call: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
        used = max(world, min(elements, _LARGEST_BUFFER_ELEMENTS) // world * world)
        whole = torch.zeros(used, dtype=dtype, device=device)
        shard = torch.zeros(used // world, dtype=dtype, device=device)
        seconds = []
        for _ in range(_REPEATS + 1):
            dist.barrier()
            start = clock()
            call(whole, shard)
            synchronize(device)
            seconds.append(clock() - start)
        # The first call sets up connections.
        return statistics.median(seconds[1:]) * max(elements, 1) / used

    local = (
        timed(size.trainable, lambda whole, shard: dist.all_reduce(whole)),
        timed(size.trainable, lambda whole, shard: _reduce_scatter(shard, whole)),
        timed(size.total, lambda whole, shard: _all_gather(whole, shard)),
    )
    slowest = [max(values) for values in zip(*ranks.gather(local), strict=True)]
    return CollectiveTimes(all_reduce_s=slowest[0], reduce_scatter_s=slowest[1], all_gather_s=slowest[2])


def stage_times(times: CollectiveTimes, zero_stage: int) -> StageTimes:
    """What a stage communicates and when.

    Stage 0 all-reduces gradients once per step; stage 1 also gathers parameters once; stage 2 reduces gradients in
    every micro-step and gathers parameters once; stage 3 gathers parameters twice and reduce-scatters gradients in
    every micro-step. DeepSpeed's stages 1 and 2 reduce whole buckets with an all-reduce.
    """
    if zero_stage == 0:
        return StageTimes(per_micro_step_s=0.0, per_step_s=times.all_reduce_s, overlap=0.0)
    if zero_stage == 1:
        return StageTimes(per_micro_step_s=0.0, per_step_s=times.all_reduce_s + times.all_gather_s, overlap=0.0)
    if zero_stage == 2:
        return StageTimes(per_micro_step_s=times.all_reduce_s, per_step_s=times.all_gather_s, overlap=0.0)
    per_micro_step = 2.0 * times.all_gather_s + times.reduce_scatter_s
    return StageTimes(per_micro_step_s=per_micro_step, per_step_s=0.0, overlap=0.0)


def time_optimizer(elements: int, *, device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Seconds of one AdamW step over `elements` fp32 values, timed on a scratch tensor and scaled."""
    used = max(1, min(elements, _LARGEST_BUFFER_ELEMENTS // 4))
    scratch = torch.nn.Parameter(torch.zeros(used, device=device))
    scratch.grad = torch.zeros_like(scratch)
    optimizer = torch.optim.AdamW([scratch], lr=1e-3)
    seconds = []
    for _ in range(_REPEATS + 1):
        synchronize(device)
        start = clock()
        optimizer.step()
        synchronize(device)
        seconds.append(clock() - start)
    return statistics.median(seconds[1:]) * elements / used


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
