"""A run's plan where the ranks' shares of the training state need not be even: asked for, or chosen with the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import InsufficientMemoryError, ProfileError
from .plan import Plan
from .profiles import ClusterProfile
from .rank_memory import RankMemory
from .search import find_plan
from .state_budget import state_memory
from .state_plan import find_state_plan, plan_with_fractions


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A plan with its shares of the training state."""

    plan: Plan
    """The plan; even shares have no fractions."""
    profile: ClusterProfile
    """The profile with the limits and communication times that hold under these shares."""
    passed_over: dict[int, str] = field(default_factory=dict)
    """ZeRO stages without room, and why."""


def choose_plan(
    profile: ClusterProfile,
    *,
    global_batch_size: int,
    stages: Sequence[int],
    strategy: str,
    fractions: Sequence[float] | None = None,
    max_micro_batch_size: Sequence[int] | None = None,
    offload: bool = False,
) -> ChosenPlan:
    """The plan with the least predicted step time over ZeRO stages and shares of the training state.

    Args:
        profile: What was measured, with every rank's memory.
        global_batch_size: Samples per optimizer step.
        stages: The ZeRO stages that may be used.
        strategy: As `find_plan`.
        fractions: Shares that are given, one per rank, which stage 0 cannot have; None: free. Even ones win wherever
            uneven ones do not make the step shorter.
        max_micro_batch_size: Limits that have nothing to do with shares, one per rank; None: none.
        offload: Ranks may keep their optimizer on the host where no stage has room without; then the plan is the fastest of
            those in which the fewest do.

    Raises:
        InsufficientMemoryError: At none of the stages is there room on every rank for one sample.
        ProfileError: The profile has no figures of the ranks' memory.
    """
    memory: tuple[RankMemory, ...] = getattr(profile, "memory", ())
    if len(memory) != profile.world_size:
        raise ProfileError(
            "the profile says nothing of the ranks' memory, which shares of the training state are found from. Set "
            "reprofile: true, or state_shards: even."
        )
    at_stage = _AtStage(
        profile=profile,
        memory=memory,
        global_batch_size=global_batch_size,
        strategy=strategy,
        fractions=fractions,
        limits=_limits(memory, global_batch_size, max_micro_batch_size),
    )
    passed_over: dict[int, str] = {}
    for offloads in (False, True) if offload else (False,):
        found: list[ChosenPlan] = []
        for stage in stages:
            try:
                found.append(at_stage.plan(stage, offload=offloads))
            except InsufficientMemoryError as problem:
                passed_over[stage] = str(problem)
        if found:
            best = min(found, key=lambda one: (len(one.plan.offloading_ranks), *_time_and_stage(one)))
            passed_over.pop(best.plan.zero_stage, None)
            return ChosenPlan(plan=best.plan, profile=best.profile, passed_over=passed_over)
    raise InsufficientMemoryError(passed_over[stages[-1]])


def _time_and_stage(one: ChosenPlan) -> tuple[float, int]:
    return one.plan.predicted_step_time_s, one.plan.zero_stage


@dataclass(frozen=True, kw_only=True)
class _AtStage:
    """What is planned for at every stage alike."""

    profile: ClusterProfile
    memory: Sequence[RankMemory]
    global_batch_size: int
    strategy: str
    fractions: Sequence[float] | None
    limits: Sequence[int]

    def plan(self, stage: int, *, offload: bool) -> ChosenPlan:
        """The best plan at a stage.

        Raises:
            InsufficientMemoryError: There is no room for the state beside one sample on every rank.
        """
        if stage == 0:
            return _whole_state(self.profile, self.global_batch_size, self.strategy)
        largest = self.global_batch_size
        asked: dict[str, Any] = {
            "global_batch_size": self.global_batch_size,
            "zero_stage": stage,
            "strategy": self.strategy,
            "max_micro_batch_size": self.limits,
        }
        if offload:
            asked["offloaded"] = state_memory(self.memory, stage, largest_micro_batch=largest, offloaded=True)
        budgets = state_memory(self.memory, stage, largest_micro_batch=largest)
        if self.fractions is None:
            chosen = find_state_plan(self.profile, budgets, **asked)
        else:
            chosen = plan_with_fractions(self.profile, budgets, self.fractions, **asked)
        return ChosenPlan(plan=chosen.plan, profile=chosen.profile)


def _whole_state(profile: ClusterProfile, global_batch_size: int, strategy: str) -> ChosenPlan:
    """ZeRO stage 0, where every rank keeps all of the state."""
    short = [rank for rank, cap in enumerate(profile.stage(0).max_micro_batch_size) if cap == 0]
    if short:
        raise InsufficientMemoryError(
            f"at ZeRO stage 0 not even one sample fits on rank {', '.join(map(str, short))}."
        )
    plan = find_plan(profile, global_batch_size=global_batch_size, zero_stage=0, strategy=strategy)
    return ChosenPlan(plan=plan, profile=profile)


def _limits(memory: Sequence[RankMemory], global_batch_size: int, user_caps: Sequence[int] | None) -> tuple[int, ...]:
    """Every rank's largest micro-batch whatever its share: by the settings, and where memory really ran out."""
    limits = []
    for rank, own in enumerate(memory):
        limit = global_batch_size if user_caps is None else min(global_batch_size, user_caps[rank])
        limits.append(limit if own.proven_cap is None else min(limit, own.proven_cap))
        if limits[-1] == 0:
            raise InsufficientMemoryError(f"rank {rank}: memory ran out in a micro-batch of one sample.")
    return tuple(limits)
