"""What holds each rank of a plan back: its memory or its speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .plan import Plan
from .profiles import ClusterProfile
from .search import STRATEGIES, find_plan
from .step_model import group_ranks

NOTICEABLE = 1e-3
"""Relative gain in step time below which more memory is not worth mentioning."""


def limited_by(
    profile: ClusterProfile, plan: Plan, *, max_micro_batch_size: Sequence[int] | None = None
) -> tuple[str, ...]:
    """What would have to grow for the step to become shorter, per rank.

    `memory`: planning again with twice the largest micro-batch on this rank and its equals (one sample where none
    fits), everything else unchanged and their curves continued, shortens the step by more than 0.1%. `speed`: it
    does not. A plan made by hand is judged by the strategy `optimal`.

    Args:
        profile: What the plan was made from.
        plan: The plan.
        max_micro_batch_size: Further caps the plan was made with, one per rank.

    Returns:
        `memory` or `speed`, indexed by rank.

    Raises:
        PlanError, ProfileError: As `find_plan`.
    """
    strategy = plan.strategy if plan.strategy in STRATEGIES else "optimal"
    stage = profile.stage(plan.zero_stage)
    caps = list(stage.max_micro_batch_size)
    if max_micro_batch_size is not None:
        caps = [min(own, extra) for own, extra in zip(caps, max_micro_batch_size, strict=True)]

    def predict(with_caps: Sequence[int]) -> float:
        changed = replace(
            profile, zero_stages={plan.zero_stage: replace(stage, max_micro_batch_size=tuple(with_caps))}
        )
        found = find_plan(
            changed, global_batch_size=plan.global_batch_size, zero_stage=plan.zero_stage, strategy=strategy
        )
        return found.predicted_step_time_s

    now = predict(caps)
    verdicts = ["speed"] * profile.world_size
    for kind in group_ranks(profile, caps):
        roomier = list(caps)
        for rank in kind.ranks:
            roomier[rank] = max(1, 2 * caps[rank])
        if predict(roomier) < now * (1.0 - NOTICEABLE):
            for rank in kind.ranks:
                verdicts[rank] = "memory"
    return tuple(verdicts)
