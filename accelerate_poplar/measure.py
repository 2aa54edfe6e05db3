"""Measure every rank: time per micro-batch without collectives, what fits, and what each ZeRO stage adds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
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
from .model_state import model_size
from .preflight import installed_versions
from .probe import ShortestRow, free_memory
from .profile_cache import ProfileCache, cache_key, model_fingerprint
from .profiles import ClusterProfile, Measurement, RankProfile, StageProfile
from .rank_memory import RankMemory, explain
from .rank_probe import ProfileRequest, RankProber, RankReport

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
    remarks: tuple[str, ...] = ()
    """What the user should know of it, stragglers included, a sentence each; none when the profile came from the cache."""
    shortest: tuple[ShortestRow | None, ...] = ()
    """What a micro-batch of one of the shortest rows takes, indexed by rank; None where that was not timed."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of `ClusterProfile` with entries `memory` and, for unequal rows, `shortest` that its readers ignore."""
        data = {**super().to_dict(), "memory": [memory.to_dict() for memory in self.memory]}
        if any(self.shortest):
            data["shortest"] = [None if row is None else asdict(row) for row in self.shortest]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "profile") -> MeasuredProfile:
        """As `ClusterProfile.from_dict`; a file without the entries `memory` and `shortest` has none."""
        plain = ClusterProfile.from_dict(data, source=source)
        return cls(
            **{field.name: getattr(plain, field.name) for field in fields(plain)},
            memory=tuple(RankMemory.from_dict(entry) for entry in data.get("memory", ())),
            shortest=tuple(
                None if row is None else ShortestRow(**row)
                for row in data.get("shortest") or (None,) * plain.world_size
            ),
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
    compile_options: Mapping[str, Any] | None = None,
    cache: ProfileCache | None = None,
    uneven_state: bool = False,
    shortest: Any = None,
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
        compile_options: Arguments of `torch.compile` that the run compiles the model with; None = it does not.
        cache: Where profiles of earlier starts are; None = measure in any case.
        uneven_state: The ranks' shares of the training state need not be even, so that a rank with little memory is
            timed as well.
        shortest: Collated batch on the host of one of the shortest rows, where rows differ in length: from what it takes, the
            cost of a micro-step with little in it is known. None: not timed.

    Returns:
        The profile; a rank that cannot hold one sample at a stage beside an even share of the training state has 0
        there, see `explain_memory`. Where some rank holds none at any stage, nothing is timed, unless `uneven_state`
        gives it a chance.

    Raises:
        ProfileError: The model cannot be run on this rank.
        RankError: It cannot on another rank, which is named, or a rank is gone.
    """
    start = clock()
    agree(ranks, (tuple(zero_stages), DTYPE_NAMES[dtype], largest_micro_batch, user_caps), "what to profile")
    request = ProfileRequest(
        model=model,
        loss_fn=loss_fn,
        make_batch=make_batch,
        shortest=shortest,
        ranks=ranks,
        device=device,
        dtype=dtype,
        zero_stages=tuple(zero_stages),
        largest=largest_micro_batch if user_caps is None else min(largest_micro_batch, user_caps[ranks.rank]),
        memory_fraction=memory_fraction,
        optimizer_bytes_per_parameter=optimizer_bytes_per_parameter,
        relative_error=relative_error,
        progress=lambda what: progress(f"rank {ranks.rank}/{ranks.world_size}: {what}") if progress else None,
        clock=clock,
        emulation=emulation,
        deepspeed_config=deepspeed_config,
        compile_options=compile_options,
        uneven_state=uneven_state,
        all_slowed=all(ranks.gather(emulation is not None and emulation.slowdown > 1.0)),
    )
    facts = ranks.gather(device_facts(device))
    parts = _cache_parts(request, facts, seq_len)
    known = cache.load(ranks, cache_key(parts), MeasuredProfile) if cache is not None else None
    if isinstance(known, MeasuredProfile):
        here = zip(known.ranks, facts, strict=True)
        return replace(known, model=model_name, ranks=tuple(replace(rank, host=fact.host) for rank, fact in here))
    reports, times = _measure(request, facts, deadline=start + budget_s)
    profile = replace(
        _assemble(request, reports, times, budget_s),
        model=model_name,
        seq_len=seq_len,
        seconds=max(ranks.gather(clock() - start)),
    )
    if cache is not None:
        cache.store(ranks, cache_key(parts), parts, profile)
    return profile


def _measure(
    request: ProfileRequest, facts: Sequence[DeviceFacts], *, deadline: float
) -> tuple[list[RankReport], dict[int, StageTimes]]:
    """Every rank's report, and what each stage adds; zeros where some rank has nothing to time."""
    ranks = request.ranks
    hosts = [fact.host for fact in facts]
    prober = RankProber(
        request=request,
        facts=facts[ranks.rank],
        ranks_on_host=hosts.count(hosts[ranks.rank]),
        deadline=deadline,
    )
    with undisturbed(request.model, request.device), _not_slowed(request.emulation, request.model):
        reports = ranks.gather(prober.run())
        times = {stage: StageTimes(per_micro_step_s=0.0, per_step_s=0.0) for stage in request.zero_stages}
        if all(report.points for report in reports):
            times = measure_stages(
                request.model,
                zero_stages=request.zero_stages,
                ranks=ranks,
                device=request.device,
                dtype=request.dtype,
                deepspeed_config=request.deepspeed_config,
                clock=request.clock,
                slowdown=request.emulation.slowdown if request.emulation and request.all_slowed else 1.0,
                progress=request.progress,
            )
    free_memory(request.device)
    return reports, times


def _assemble(
    request: ProfileRequest, reports: Sequence[RankReport], times: Mapping[int, StageTimes], budget_s: float
) -> MeasuredProfile:
    emulated = any(report.emulated for report in reports)
    points, stragglers = share_curves(
        [report.points for report in reports],
        [(report.facts.device, report.facts.memory_bytes) for report in reports],
        [report.slowdown for report in reports] if emulated else None,
    )
    overhead_s = max(report.step_overhead_s for report in reports)
    return MeasuredProfile(
        model="",
        num_parameters=model_size(request.model).total,
        seq_len=0,
        dtype=DTYPE_NAMES[request.dtype],
        ranks=tuple(_rank_profile(rank, r, points[rank], request.dtype) for rank, r in enumerate(reports)),
        zero_stages={s: _stage_profile(s, reports, times[s], overhead_s) for s in request.zero_stages},
        emulated=emulated,
        memory=tuple(report.memory for report in reports),
        timed_micro_steps=tuple(report.micro_steps for report in reports),
        shortest=tuple(report.shortest for report in reports),
        stragglers=tuple(stragglers),
        remarks=(*map(str, stragglers), *_remarks(reports, budget_s)),
    )


def _remarks(reports: Sequence[RankReport], budget_s: float) -> Iterator[str]:
    """Sizes that were left out or timed in a hurry, in sentences."""
    for rank, report in enumerate(reports):
        for size, reason in report.skipped.items():
            yield f"rank {rank}: a micro-batch of {size} could not be run and was not timed: {reason}"
    hurried = {rank: report.unrepeated for rank, report in enumerate(reports) if report.unrepeated}
    if hurried:
        sizes = sorted(set().union(*hurried.values()))
        yield (
            f"the profiling budget of {budget_s:g} s ended before micro-batches of {', '.join(map(str, sizes))} could be timed "
            f"again on rank {', '.join(map(str, hurried))}, so their times may be off; raise profile_budget_s"
        )


def _cache_parts(request: ProfileRequest, facts: Sequence[DeviceFacts], seq_len: int) -> dict[str, Any]:
    """Everything a profile depends on; the same on every rank."""
    hosts = [fact.host for fact in facts]
    emulation = request.emulation
    own = {
        "device": facts[request.ranks.rank].device,
        "memory_bytes": facts[request.ranks.rank].memory_bytes,
        "memory_fraction": request.memory_fraction,
        "largest": request.largest,
        "emulated": None if emulation is None else [emulation.slowdown, emulation.memory_bytes],
        **({} if request.shortest is None else {"shortest": True}),
    }
    return {
        "ranks": request.ranks.gather(own),
        "ranks_on_host": [hosts.count(host) for host in hosts],
        "model": model_fingerprint(request.model),
        "zero_stages": request.zero_stages,
        "dtype": DTYPE_NAMES[request.dtype],
        "seq_len": seq_len,
        "optimizer_bytes_per_parameter": request.optimizer_bytes_per_parameter,
        "deepspeed": (request.deepspeed_config or {}).get("zero_optimization"),
        "compiled": None
        if request.compile_options is None
        else {k: str(v) for k, v in request.compile_options.items()},
        "versions": installed_versions(),
        **({"uneven_state": True} if request.uneven_state else {}),
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
def _not_slowed(emulation: Emulation | None, model: nn.Module) -> Iterator[None]:
    """A slowed rank is timed at full speed, and what it pretends to be is worked out from that."""
    if emulation is None:
        yield
        return
    with emulation.attach(model):
        emulation.expect(0.0)
        try:
            yield
        finally:
            emulation.expect(None)
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
