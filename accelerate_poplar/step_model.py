"""The step-time model: what one optimizer step of a plan takes. The one definition that everything shares.

With t_i(b) rank i's compute time for a micro-batch of b samples, o_i its per-step overhead, and m, s, w the stage's
per-micro-step communication, per-step communication and overlap:

- ZeRO-0/1: T = max_i(sum_k t_i(b_ik) + o_i) + s
- ZeRO-2/3: T = sum_k(t*_k + max(0, m - w t*_k)) + max_i o_i + s, with t*_k = max_i t_i(b_ik)

A rank without samples still runs its optimizer, so its o_i counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .curve import FloatArray, StepTimeCurve
from .errors import PlanError, ProfileError
from .plan import LOCK_STEP_STAGES, Plan
from .profiles import ClusterProfile, RankProfile, StageProfile


@dataclass(frozen=True, kw_only=True)
class RankType:
    """Ranks that the planner cannot tell apart: equal curve, cap, overhead and peak."""

    ranks: tuple[int, ...]
    """Global ranks of this type, in increasing order."""
    curve: StepTimeCurve
    """Step-time curve up to the cap."""
    step_overhead_s: float
    """Seconds a step costs each of these ranks once; at least 0."""
    peak_flops: float
    """Dense peak in FLOP/s; 0 when unknown."""

    @property
    def count(self) -> int:
        """Number of ranks of this type."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """Where the time of one optimizer step goes under the step-time model."""

    step_time_s: float
    """Seconds of the whole step."""
    compute_time_s: tuple[float, ...]
    """Seconds of forward and backward per rank, indexed by rank."""
    micro_step_time_s: tuple[float, ...]
    """Compute seconds of the slowest rank in each micro-step; empty at ZeRO-0/1, where ranks do not wait."""
    exposed_communication_s: float
    """Seconds of communication that no compute hides, per-step communication included."""
    overhead_s: float
    """Largest per-step overhead of any rank, in seconds."""


def group_ranks(profile: ClusterProfile, caps: Sequence[int]) -> tuple[RankType, ...]:
    """Sort ranks into types, in an order that does not depend on how ranks are numbered.

    Args:
        profile: The cluster.
        caps: Largest micro-batch per rank, shape (world_size,).

    Raises:
        ProfileError: A rank's points cannot be a curve; names the rank.
    """
    members: dict[tuple[object, ...], list[int]] = {}
    for rank, cap in zip(profile.ranks, caps, strict=True):
        sizes = tuple([p.micro_batch_size for p in rank.points])
        seconds = tuple([p.step_time_s for p in rank.points])
        key = (cap, sizes, seconds, rank.step_overhead_s, rank.peak_flops)
        members.setdefault(key, []).append(rank.rank)
    types = [_make_type(profile.ranks[ranks[0]], caps[ranks[0]], ranks) for _, ranks in sorted(members.items())]
    return tuple(types)


def _make_type(rank: RankProfile, cap: int, ranks: Sequence[int]) -> RankType:
    try:
        curve = StepTimeCurve.fit(rank.points, max_micro_batch_size=cap)
    except ProfileError as problem:
        raise ProfileError(f"rank {rank.rank}: {problem}") from None
    return RankType(ranks=tuple(ranks), curve=curve, step_overhead_s=rank.step_overhead_s, peak_flops=rank.peak_flops)


def micro_step_cost(stage: StageProfile, seconds: FloatArray) -> FloatArray:
    """Cost of lock-step micro-steps whose slowest rank computes for `seconds`: t + max(0, m - w t)."""
    hidden = stage.overlap * seconds
    return seconds + np.maximum(0.0, stage.per_micro_step_s - hidden)


def break_down(
    types: Sequence[RankType], stage: StageProfile, zero_stage: int, sizes: Mapping[int, Sequence[int]]
) -> StepBreakdown:
    """Apply the model to micro-batch sizes given per rank.

    Args:
        types: All ranks, sorted into types.
        stage: Communication figures of the stage.
        zero_stage: 0 to 3.
        sizes: Rank -> micro-batch sizes of one optimizer step.

    Raises:
        PlanError: A micro-batch is above what fits on its rank.
    """
    compute = [0.0] * sum(kind.count for kind in types)
    slowest: FloatArray | None = None
    busiest = 0.0
    for kind in types:
        known: dict[tuple[int, ...], float] = {}
        for rank in kind.ranks:
            own = tuple(sizes[rank])
            if own not in known:
                seconds = _micro_step_times(kind, rank, own)
                known[own] = float(seconds.sum())
                busiest = max(busiest, known[own] + kind.step_overhead_s)
                if zero_stage in LOCK_STEP_STAGES:
                    slowest = seconds if slowest is None else np.maximum(slowest, seconds)
            compute[rank] = known[own]
    overhead = max(kind.step_overhead_s for kind in types)
    if slowest is None:
        step, exposed = busiest + stage.per_step_s, stage.per_step_s
    else:
        in_micro_steps = float(micro_step_cost(stage, slowest).sum())
        step = in_micro_steps + overhead + stage.per_step_s
        exposed = in_micro_steps - float(slowest.sum()) + stage.per_step_s
    return StepBreakdown(
        step_time_s=step,
        compute_time_s=tuple(compute),
        micro_step_time_s=() if slowest is None else tuple(float(t) for t in slowest),
        exposed_communication_s=exposed,
        overhead_s=overhead,
    )


def _micro_step_times(kind: RankType, rank: int, sizes: tuple[int, ...]) -> FloatArray:
    largest = max(sizes)
    if largest > kind.curve.max_micro_batch_size:
        raise PlanError(
            f"rank {rank}: micro-batch size {largest} is above {kind.curve.max_micro_batch_size}, the largest that "
            "fits. Use a smaller one, or plan again with the profile at hand."
        )
    return kind.curve.times()[np.array(sizes, dtype=np.int64)]


def break_down_plan(profile: ClusterProfile, plan: Plan) -> StepBreakdown:
    """Apply the model to a plan.

    Raises:
        PlanError: The plan is for another number of ranks, or a micro-batch does not fit on its rank.
        ProfileError: The plan's ZeRO stage was not profiled.
    """
    if plan.world_size != profile.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, the profile for {profile.world_size}; make a new plan."
        )
    stage = profile.stage(plan.zero_stage)
    types = group_ranks(profile, stage.max_micro_batch_size)
    return break_down(types, stage, plan.zero_stage, {r.rank: r.micro_batch_sizes for r in plan.ranks})


def step_time(profile: ClusterProfile, plan: Plan) -> float:
    """Predicted seconds of one optimizer step of `plan` on the profiled cluster; errors as `break_down_plan`."""
    return break_down_plan(profile, plan).step_time_s
