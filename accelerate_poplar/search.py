"""From a profile to a plan: `find_plan`, its strategies, and what holds a plan back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from .baselines import plan_by_flops, plan_by_speed, plan_even, plan_poplar_local, plan_poplar_lockstep
from .errors import InsufficientMemoryError, PlanError, raise_together
from .plan import LOCK_STEP_STAGES, Plan, RankPlan
from .profiles import ClusterProfile, StageProfile
from .search_local import plan_local
from .search_lockstep import plan_lockstep
from .step_model import RankType, break_down, group_ranks, micro_step_cost
from .units import gib

STRATEGIES = ("optimal", "poplar", "proportional", "flops", "even")
"""Names `find_plan` knows: the exact optimum, Poplar's published search, shares by measured speed, shares by peak
FLOP/s (Whale), and DeepSpeed's equal shares."""

ZeroStage = int | Literal["auto"]

_NAMED_RANKS = 8
"""Ranks a message names one by one."""


def find_plan(
    profile: ClusterProfile,
    *,
    global_batch_size: int,
    zero_stage: ZeroStage,
    strategy: str = "optimal",
    max_micro_batch_size: Sequence[int] | None = None,
) -> Plan:
    """Decide which micro-batches every rank runs in one optimizer step.

    With the strategy `optimal` no plan within the memory caps has a shorter step under the step-time model. Ranks
    of one type differ by no more samples than needed to hit the global batch, and renumbering ranks renumbers
    the plan.

    Args:
        profile: What was measured.
        global_batch_size: Samples per optimizer step over all ranks; at least 1.
        zero_stage: 0 to 3, or "auto": the profiled stage with the least predicted step time among those at which
            every rank fits at least one sample. At a stage asked for by number, a rank that fits none gets none.
        strategy: One of `STRATEGIES`.
        max_micro_batch_size: Further caps, one per rank; the profile's own caps hold as well.

    Returns:
        The plan, with its predicted step time.

    Raises:
        PlanError: A setting is out of range, or the strategy lacks a figure it needs.
        InsufficientMemoryError: No rank (for "auto": not every rank at any profiled stage) can hold one sample.
        ProfileError: The stage was not profiled, or a rank's points cannot be a curve.
    """
    check_request(profile, global_batch_size, zero_stage, strategy, max_micro_batch_size)
    if zero_stage != "auto":
        return _plan_stage(profile, global_batch_size, zero_stage, strategy, max_micro_batch_size)
    fitting = _fitting_stages(profile, max_micro_batch_size)
    plans = [_plan_stage(profile, global_batch_size, stage, strategy, max_micro_batch_size) for stage in fitting]
    return min(plans, key=lambda plan: (plan.predicted_step_time_s, plan.zero_stage))


def _plan_stage(
    profile: ClusterProfile,
    global_batch_size: int,
    zero_stage: int,
    strategy: str,
    extra_caps: Sequence[int] | None,
) -> Plan:
    stage = profile.stage(zero_stage)
    # More than the global batch is never run at once, so the curve need not go further.
    caps = [min(cap, global_batch_size) for cap in _caps(stage, extra_caps)]
    if not any(caps):
        raise InsufficientMemoryError(_nothing_fits(profile, zero_stage, range(profile.world_size)))
    types = group_ranks(profile, caps)
    sizes = _search(types, stage, zero_stage, global_batch_size, strategy)
    return Plan(
        zero_stage=zero_stage,
        global_batch_size=global_batch_size,
        predicted_step_time_s=break_down(types, stage, zero_stage, sizes).step_time_s,
        strategy=strategy,
        ranks=tuple(RankPlan(rank=rank, micro_batch_sizes=sizes[rank]) for rank in range(profile.world_size)),
    )


def _search(
    types: Sequence[RankType], stage: StageProfile, zero_stage: int, global_batch_size: int, strategy: str
) -> Mapping[int, tuple[int, ...]]:
    if strategy == "even":
        return plan_even(types, global_batch_size)
    if strategy == "flops":
        return plan_by_flops(types, zero_stage, global_batch_size)
    if strategy == "proportional":
        return plan_by_speed(types, zero_stage, global_batch_size)
    if strategy == "poplar" and zero_stage in LOCK_STEP_STAGES:
        return plan_poplar_lockstep(types, stage, global_batch_size)
    if strategy == "poplar":
        return plan_poplar_local(types, global_batch_size)
    if zero_stage in LOCK_STEP_STAGES:
        return plan_lockstep(types, global_batch_size, lambda seconds: micro_step_cost(stage, seconds))
    return plan_local(types, global_batch_size)


def _caps(stage: StageProfile, extra_caps: Sequence[int] | None) -> list[int]:
    if extra_caps is None:
        return list(stage.max_micro_batch_size)
    return [min(own, extra) for own, extra in zip(stage.max_micro_batch_size, extra_caps, strict=True)]


def misfits(profile: ClusterProfile, max_micro_batch_size: Sequence[int] | None = None) -> dict[int, tuple[int, ...]]:
    """Ranks that cannot hold one sample, by profiled ZeRO stage; stages at which every rank fits are left out.

    Args:
        profile: What was measured.
        max_micro_batch_size: Further caps, one per rank.
    """
    found = {
        number: tuple(rank for rank, cap in enumerate(_caps(stage, max_micro_batch_size)) if cap == 0)
        for number, stage in sorted(profile.zero_stages.items())
    }
    return {number: ranks for number, ranks in found.items() if ranks}


def _fitting_stages(profile: ClusterProfile, extra_caps: Sequence[int] | None) -> list[int]:
    refused = misfits(profile, extra_caps)
    fitting = [number for number in sorted(profile.zero_stages) if number not in refused]
    if not fitting:
        highest = max(refused)
        raise InsufficientMemoryError(_nothing_fits(profile, highest, refused[highest]))
    return fitting


def _nothing_fits(profile: ClusterProfile, zero_stage: int, ranks: Sequence[int]) -> str:
    lines = []
    for number in ranks[:_NAMED_RANKS]:
        rank = profile.ranks[number]
        first = rank.points[0] if rank.points else None
        more = ""
        if first is not None and first.peak_memory_bytes:
            more = (
                f"; a micro-batch of {first.micro_batch_size} alone takes {gib(first.peak_memory_bytes)}, optimizer "
                "state not counted"
            )
        lines.append(f"rank {number} ({rank.device or 'device unknown'}, {gib(rank.memory_bytes)}{more})")
    if len(ranks) > _NAMED_RANKS:
        lines.append(f"{len(ranks) - _NAMED_RANKS} more ranks")
    return (
        f"not a single sample fits at ZeRO stage {zero_stage} on {'; '.join(lines)}. Use a higher ZeRO stage, "
        "gradient checkpointing, shorter sequences or optimizer offload (state_offload: auto), or leave these ranks out."
    )


def check_request(
    profile: ClusterProfile,
    global_batch_size: int,
    zero_stage: ZeroStage,
    strategy: str,
    extra_caps: Sequence[int] | None,
) -> None:
    """Refuse a request no plan can be made for, naming everything that is wrong; arguments as `find_plan`.

    Raises:
        PlanError: A setting is out of range, or the profile does not hold together.
    """
    problems = []
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
        problems.append(f"global_batch_size is {global_batch_size!r}; it must be a whole number of at least 1.")
    if zero_stage not in (0, 1, 2, 3, "auto") or isinstance(zero_stage, bool):
        problems.append(f"zero_stage is {zero_stage!r}; it must be 0, 1, 2, 3 or 'auto'.")
    if strategy not in STRATEGIES:
        problems.append(f"strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}.")
    if not profile.ranks:
        problems.append("the profile has no ranks; there is nobody to plan for.")
    if not profile.zero_stages:
        problems.append("the profile has no `zero_stages`; profile at least one.")
    for number, stage in sorted(profile.zero_stages.items()):
        if len(stage.max_micro_batch_size) != profile.world_size:
            problems.append(
                f"ZeRO stage {number}: `max_micro_batch_size` has {len(stage.max_micro_batch_size)} entries for "
                f"{profile.world_size} ranks."
            )
    if [rank.rank for rank in profile.ranks] != list(range(profile.world_size)):
        problems.append(f"ranks are {[rank.rank for rank in profile.ranks]}; they must be 0, 1, 2, ... in order.")
    if extra_caps is not None:
        problems.extend(_cap_problems(extra_caps, profile.world_size))
    raise_together(problems, PlanError)


def _cap_problems(extra_caps: Sequence[int], world_size: int) -> list[str]:
    if len(extra_caps) != world_size:
        return [f"max_micro_batch_size has {len(extra_caps)} entries for {world_size} ranks; give one per rank."]
    return [
        f"rank {rank}: max_micro_batch_size is {cap!r}; it must be at least 0."
        for rank, cap in enumerate(extra_caps)
        if cap < 0
    ]
