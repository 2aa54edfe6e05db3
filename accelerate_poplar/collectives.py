"""Time of what a ZeRO stage adds to a run, measured on the real process group for the model's real byte counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .comm import Ranks
from .device import synchronize
from .engine_cost import EngineTimes, time_engine
from .model_state import ModelSize, model_size

_LARGEST_BUFFER_ELEMENTS = 2**24
"""Larger messages are timed with a buffer of this many elements and scaled: beyond it only bandwidth counts."""
_REPEATS = 5

Clock = Callable[[], float]
# torch 2.13 renamed both and warns of the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """What one ZeRO stage adds to the ranks' own time, as the step-time model wants it."""

    per_micro_step_s: float
    """Seconds in every micro-step."""
    per_step_s: float
    """Seconds once per optimizer step, the optimizer included."""
    overlap: float = 0.0
    """Seconds of per-micro-step communication hidden by one second of compute, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """Seconds of the three collectives ZeRO uses, over a whole model; the slowest rank's."""

    all_reduce_s: float
    """To all-reduce all gradients."""
    reduce_scatter_s: float
    """To reduce-scatter all gradients."""
    all_gather_s: float
    """To gather all parameters from equal shards."""


def measure_stages(
    model: nn.Module,
    *,
    zero_stages: Sequence[int],
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
    deepspeed_config: Mapping[str, Any] | None = None,
    clock: Clock = time.perf_counter,
    slowdown: float = 1.0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[int, StageTimes]:
    """Time every stage with a real DeepSpeed engine around the husk of the model; all ranks must call it together.

    A model too large for that is timed as a smaller one; the communication of the rest is added from collectives
    timed on their own. Zeros where there is one rank or no process group. `slowdown` as for `time_engine`.

    Returns:
        Figures by stage, the same on every rank: the slowest rank's.
    """
    if ranks.world_size == 1 or not dist.is_available() or not dist.is_initialized():
        return {stage: StageTimes(per_micro_step_s=0.0, per_step_s=0.0) for stage in zero_stages}
    measured: dict[int, EngineTimes] = {}
    for stage in zero_stages:
        progress(f"communication of ZeRO stage {stage}")
        measured[stage] = time_engine(
            model,
            zero_stage=stage,
            world_size=ranks.world_size,
            device=device,
            dtype=dtype,
            deepspeed_config=deepspeed_config,
            clock=clock,
            slowdown=slowdown,
        )
    missing = {stage: 1.0 - times.shrink for stage, times in measured.items()}
    rest = None
    if any(share > 0.0 for share in missing.values()):
        progress("communication")
        rest = time_collectives(model_size(model), ranks=ranks, device=device, dtype=dtype, clock=clock)
    everywhere = ranks.gather({stage: (t.micro_step_s, t.step_s, t.overlap) for stage, t in measured.items()})
    result = {}
    for stage in zero_stages:
        micro_step_s, step_s = (max(times[stage][part] for times in everywhere) for part in (0, 1))
        overlap = min(times[stage][2] for times in everywhere)
        if rest is not None:
            whole = communication_of(rest, stage)
            micro_step_s += missing[stage] * whole.per_micro_step_s
            step_s += missing[stage] * whole.per_step_s
        # Stages 0 and 1 have no per-micro-step term in the step-time model: a step has at least one micro-step.
        result[stage] = (
            StageTimes(per_micro_step_s=micro_step_s, per_step_s=step_s, overlap=overlap)
            if stage >= 2
            else StageTimes(per_micro_step_s=0.0, per_step_s=micro_step_s + step_s)
        )
    return result


def time_collectives(
    size: ModelSize, *, ranks: Ranks, device: torch.device, dtype: torch.dtype, clock: Clock = time.perf_counter
) -> CollectiveTimes:
    """Time the three collectives on the default process group; every rank must call it at the same point."""
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


def communication_of(times: CollectiveTimes, zero_stage: int) -> StageTimes:
    """What a stage communicates and when.

    Stage 0 all-reduces gradients once per step; stage 1 also gathers parameters once; stage 2 reduces gradients in
    every micro-step and gathers parameters once; stage 3 gathers parameters twice and reduce-scatters gradients in
    every micro-step. DeepSpeed's stages 1 and 2 reduce whole buckets with an all-reduce.
    """
    if zero_stage == 0:
        return StageTimes(per_micro_step_s=0.0, per_step_s=times.all_reduce_s)
    if zero_stage == 1:
        return StageTimes(per_micro_step_s=0.0, per_step_s=times.all_reduce_s + times.all_gather_s)
    if zero_stage == 2:
        return StageTimes(per_micro_step_s=times.all_reduce_s, per_step_s=times.all_gather_s)
    return StageTimes(per_micro_step_s=2.0 * times.all_gather_s + times.reduce_scatter_s, per_step_s=0.0)


def time_optimizer(elements: int, *, device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Seconds of one AdamW step over `elements` fp32 values, timed on a scratch tensor and scaled."""
    used = max(1, min(elements, _LARGEST_BUFFER_ELEMENTS // 4))
    scratch = nn.Parameter(torch.zeros(used, device=device))
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
