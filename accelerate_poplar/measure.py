"""Measure every rank: time per micro-batch without collectives, what fits, and what each ZeRO stage adds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from .borrow import undisturbed
from .collectives import StageTimes, measure_stages
from .comm import Ranks, agree
from .device import DeviceFacts, device_facts, peak_flops
from .emulation import Emulation
from .equals import Straggler, share_curves
from .memory import DTYPE_NAMES, LossFunction, MakeBatch
from .model_state import ZeroSettings, model_size
from .preflight import installed_versions
from .probe import free_memory
from .profile_cache import ProfileCache, cache_key, model_fingerprint
from .profiles import ClusterProfile, Measurement, RankProfile, StageProfile
from .rank_memory import RankMemory, explain
from .rank_probe import RankProber, RankReport

Clock = Callable[[], float]
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class MeasuredProfile(ClusterProfile):
    """A `ClusterProfile` with what explains its limits."""

    memory: tuple[RankMemory, ...] = ()
    """One entry per rank, in rank order."""
    timed_micro_steps: tuple[int, ...] = ()
    """How many micro-steps each rank ran, warm-ups included."""
    seconds: float = 0.0
    """How long profiling took on the slowest rank; 0 when the profile came from the cache."""
    stragglers: tuple[Straggler, ...] = ()
    """Ranks that are slower than others with the same device."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of `ClusterProfile` with a `memory` entry that its readers ignore."""
        return {**super().to_dict(), "memory": [memory.to_dict() for memory in self.memory]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "profile") -> MeasuredProfile:
        """As `ClusterProfile.from_dict`; a file without a `memory` entry has none."""
        plain = ClusterProfile.from_dict(data, source=source)
        return cls(
            **{field.name: getattr(plain, field.name) for field in fields(plain)},
            memory=tuple(RankMemory.from_dict(entry) for entry in data.get("memory", ())),
        )


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
    cache: ProfileCache | None = None,
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
        cache: Where profiles of earlier starts are; None = measure in any case.

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
    facts = ranks.gather(device_facts(device))
    hosts = [fact.host for fact in facts]
    key_parts = {
        "ranks": ranks.gather(_rank_key(facts[ranks.rank], emulation, memory_fraction)),
        "ranks_on_host": [hosts.count(host) for host in hosts],
        "user_caps": None if user_caps is None else list(user_caps),
        "model": model_fingerprint(model),
        "zero_stages": stages,
        "dtype": DTYPE_NAMES[dtype],
        "seq_len": seq_len,
        "largest_micro_batch": largest_micro_batch,
        "optimizer_bytes_per_parameter": optimizer_bytes_per_parameter,
        "deepspeed": (deepspeed_config or {}).get("zero_optimization"),
        "versions": installed_versions(),
    }
    key = cache_key(key_parts)
    known = cache.load(ranks, key, MeasuredProfile) if cache is not None else None
    if isinstance(known, MeasuredProfile):
        here = zip(known.ranks, hosts, strict=True)
        return replace(known, model=model_name, ranks=tuple(replace(rank, host=host) for rank, host in here))
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
    points, stragglers = share_curves(
        [r.points for r in reports], [(r.facts.device, r.memory.device_bytes, r.slowdown) for r in reports]
    )
    overhead_s = max(r.step_overhead_s for r in reports)
    profile = MeasuredProfile(
        model=model_name,
        num_parameters=model_size(model).total,
        seq_len=seq_len,
        dtype=DTYPE_NAMES[dtype],
        ranks=tuple(_rank_profile(rank, r, points[rank], dtype) for rank, r in enumerate(reports)),
        zero_stages={stage: _stage_profile(stage, reports, times[stage], overhead_s) for stage in stages},
        emulated=any(r.emulated for r in reports),
        memory=tuple(r.memory for r in reports),
        timed_micro_steps=tuple(r.micro_steps for r in reports),
        seconds=max(ranks.gather(clock() - start)),
        stragglers=tuple(stragglers),
    )
    if cache is not None:
        cache.store(ranks, key, key_parts, profile)
    return profile


def _rank_key(facts: DeviceFacts, emulation: Emulation | None, memory_fraction: float) -> dict[str, Any]:
    """What one rank adds to the name of a stored profile."""
    return {
        "device": facts.device,
        "memory_bytes": facts.memory_bytes,
        "memory_fraction": memory_fraction,
        "emulated": None if emulation is None else [emulation.slowdown, emulation.memory_bytes],
    }


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


def _rank_profile(rank: int, report: RankReport, points: tuple[Measurement, ...], dtype: torch.dtype) -> RankProfile:
    return RankProfile(
        rank=rank,
        host=report.facts.host,
        device=report.facts.device,
        memory_bytes=report.memory.device_bytes,
        peak_flops=peak_flops(report.facts.device, dtype),
        step_overhead_s=report.step_overhead_s,
        points=points,
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
