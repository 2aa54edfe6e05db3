"""Measure every rank: time per micro-batch without collectives, what fits, and what each ZeRO stage adds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .borrow import undisturbed
from .collectives import StageTimes, measure_stages
from .comm import Ranks, agree
from .device import device_facts, peak_flops
from .emulation import Emulation
from .memory import DTYPE_NAMES, LossFunction, MakeBatch
from .model_state import ZeroSettings, model_size
from .probe import free_memory
from .profiles import ClusterProfile, RankProfile, StageProfile
from .rank_memory import RankMemory, explain
from .rank_probe import RankProber, RankReport

Clock = Callable[[], float]
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class MeasuredProfile(ClusterProfile):
    """A `ClusterProfile` fresh from the devices, with what explains its limits; its JSON form is the plain one."""

    memory: tuple[RankMemory, ...] = ()
    """One entry per rank, in rank order."""
    timed_micro_steps: tuple[int, ...] = ()
    """How many micro-steps each rank ran, warm-ups included."""
    seconds: float = 0.0
    """How long profiling took on the slowest rank."""


def profile_cluster(
    *,
    model: nn.Module,
    loss_fn: LossFunction,
    make_batch: MakeBatch,
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
    zero_stages: Sequence[int],
    largest_micro_batch: int,
    user_caps: Sequence[int] | None,
    memory_fraction: float,
    optimizer_bytes_per_parameter: float | None = None,
    budget_s: float,
    relative_error: float,
    model_name: str,
    seq_len: int,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
    emulation: Emulation | None = None,
    deepspeed_config: Mapping[str, Any] | None = None,
) -> MeasuredProfile:
    """Profile all ranks at the same time; every rank must call it and gets the same profile.

    The model, its gradients and every random number generator are as before afterwards.

    Args:
        model: Before DeepSpeed wraps it; on any device, also initialised by ZeRO-3.
        loss_fn: `loss_fn(model, batch)` -> scalar loss, by the path that training takes.
        make_batch: Size -> collated batch on the host, of the longest rows the data can produce.
        ranks: The other ranks.
        device: Where this rank trains.
        dtype: Compute dtype DeepSpeed will use: fp32, bf16 or fp16.
        zero_stages: ZeRO stages to find limits and communication times for.
        largest_micro_batch: Nothing larger is probed, in samples.
        user_caps: Largest micro-batch by hand, one per rank; None = no such cap.
        memory_fraction: Share of this rank's free memory that may be used, above 0 up to 1.
        optimizer_bytes_per_parameter: Optimizer state incl. fp32 master copy; None = AdamW.
        budget_s: Seconds after which this rank starts no further size.
        relative_error: Wanted error of the step-time curve.
        model_name: Label for the profile.
        seq_len: Tokens per sample; 0 when samples are not token rows.
        progress: Told what is being measured, on every rank.
        clock: Seconds of real time.
        emulation: What this rank pretends to be.
        deepspeed_config: The run's; its buffer sizes count towards memory and communication.

    Returns:
        The profile; a rank that cannot hold one sample at a stage has 0 there, see `explain_memory`. Where some rank
        holds none at any stage, nothing is timed.

    Raises:
        ProfileError: The model cannot be run on this rank.
        RankError: It cannot on another rank, which is named, or a rank is gone.
    """
    start = clock()
    stages = tuple(zero_stages)
    agree(ranks, (stages, DTYPE_NAMES[dtype], largest_micro_batch), "what to profile")
    hosts = ranks.gather(device_facts(device).host)
    prober = RankProber(
        model=model,
        loss_fn=loss_fn,
        make_batch=make_batch,
        ranks=ranks,
        device=device,
        dtype=dtype,
        zero_stages=stages,
        largest=min([largest_micro_batch, *([user_caps[ranks.rank]] if user_caps else [])]),
        memory_fraction=memory_fraction,
        optimizer_bytes_per_parameter=optimizer_bytes_per_parameter,
        ranks_on_host=hosts.count(hosts[ranks.rank]),
        deadline=start + budget_s,
        relative_error=relative_error,
        progress=lambda what: progress(f"rank {ranks.rank}/{ranks.world_size}: {what}") if progress else None,
        clock=clock,
        emulation=emulation,
        settings=ZeroSettings.from_config(deepspeed_config),
    )
    with undisturbed(model, device), _slowed(emulation, model):
        report = prober.run()
        reports = ranks.gather(report)
        times = {stage: StageTimes(per_micro_step_s=0.0, per_step_s=0.0) for stage in stages}
        if all(r.points for r in reports):
            times = measure_stages(
                model,
                zero_stages=stages,
                ranks=ranks,
                device=device,
                dtype=dtype,
                deepspeed_config=deepspeed_config,
                clock=clock,
                emulation=emulation,
                progress=prober.progress,
            )
    free_memory(device)
    overhead_s = max(r.step_overhead_s for r in reports)
    return MeasuredProfile(
        model=model_name,
        num_parameters=model_size(model).total,
        seq_len=seq_len,
        dtype=DTYPE_NAMES[dtype],
        ranks=tuple(_rank_profile(rank, r, dtype) for rank, r in enumerate(reports)),
        zero_stages={stage: _stage_profile(stage, reports, times[stage], overhead_s) for stage in stages},
        emulated=any(r.emulated for r in reports),
        memory=tuple(r.memory for r in reports),
        timed_micro_steps=tuple(r.micro_steps for r in reports),
        seconds=max(ranks.gather(clock() - start)),
    )


def explain_memory(profile: ClusterProfile, zero_stage: int) -> str:
    """One sentence per rank that cannot hold a single sample at a stage: bytes needed, bytes had, what would help.

    Returns:
        The sentences, one a line; empty when every rank can, or when the profile was read from a file.
    """
    memory = profile.memory if isinstance(profile, MeasuredProfile) else ()
    caps = profile.stage(zero_stage).max_micro_batch_size
    return "\n".join(
        explain(rank, profile.ranks[rank].device, memory[rank], zero_stage)
        for rank, cap in enumerate(caps)
        if cap == 0 and rank < len(memory)
    )


@contextlib.contextmanager
def _slowed(emulation: Emulation | None, model: nn.Module) -> Iterator[None]:
    if emulation is None:
        yield
        return
    with emulation.attach(model):
        try:
            yield
        finally:
            emulation.forget_memory()


def _rank_profile(rank: int, report: RankReport, dtype: torch.dtype) -> RankProfile:
    return RankProfile(
        rank=rank,
        host=report.facts.host,
        device=report.facts.device,
        memory_bytes=report.memory.device_bytes,
        peak_flops=peak_flops(report.facts.device, dtype),
        step_overhead_s=report.step_overhead_s,
        points=report.points,
    )


def _stage_profile(
    zero_stage: int, reports: Sequence[RankReport], times: StageTimes, step_overhead_s: float
) -> StageProfile:
    return StageProfile(
        max_micro_batch_size=tuple(report.caps[zero_stage] for report in reports),
        per_micro_step_s=times.per_micro_step_s,
        # The engine's step contains the optimizer, which the ranks' own overhead counts already.
        per_step_s=max(0.0, times.per_step_s - step_overhead_s),
        overlap=times.overlap,
    )
