"""From settings to a plan that all ranks share: which batch, which ZeRO stages, profile, search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .comm import Ranks, decide
from .config import PoplarConfig
from .ds_config import stage_of
from .errors import ConfigError, InsufficientMemoryError
from .plan import Plan, RankPlan
from .profiles import ClusterProfile
from .search import find_plan

MANUAL = "manual"
PROFILED_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """The batch figures of a run as the user gave them."""

    per_device_micro_batch_size: int
    """Samples per micro-step and rank without Poplar (`per_device_train_batch_size`, or the loader's batch size)."""
    gradient_accumulation_steps: int
    """Micro-steps per optimizer step without Poplar."""
    world_size: int
    """Number of ranks."""

    def global_batch_size(
        self, config: PoplarConfig, *, resumed: Plan | None = None, given: Plan | None = None
    ) -> int:
        """Samples per optimizer step.

        A given plan has its own; sizes by hand give their sum times the accumulation steps; else the setting; else what
        a resumed run had; else what the run would have had without Poplar.

        Raises:
            ConfigError: Two of them contradict each other.
        """
        stock = self.per_device_micro_batch_size * self.gradient_accumulation_steps * self.world_size
        asked = config.global_batch_size
        sizes = config.sizes_by_rank(self.world_size) if config.enabled else None
        if sizes is not None:
            by_hand = sum(sizes) * self.gradient_accumulation_steps
            if asked is not None and asked != by_hand:
                raise ConfigError(
                    f"global_batch_size is {asked}, but per_rank_micro_batch_sizes {list(sizes)} over "
                    f"{self.gradient_accumulation_steps} accumulation steps make {by_hand} samples. "
                    "Remove global_batch_size, or change the sizes."
                )
            asked = by_hand
        if given is not None and asked is not None and asked != given.global_batch_size:
            raise ConfigError(
                f"the given plan is for a global batch of {given.global_batch_size} samples, the settings ask for "
                f"{asked}. Remove one of the two."
            )
        asked = asked if given is None else given.global_batch_size
        if resumed is not None and asked is not None and asked != resumed.global_batch_size:
            raise ConfigError(
                f"the checkpoint was trained with a global batch of {resumed.global_batch_size} samples, this run asks "
                f"for {asked}: the next sample and the learning rate could not be continued. Set global_batch_size: "
                f"{resumed.global_batch_size}, or start a new run."
            )
        if resumed is not None:
            return resumed.global_batch_size
        return stock if asked is None else asked


def candidate_stages(
    config: PoplarConfig, deepspeed_config: Mapping[str, Any] | None, *, partitioned_model: bool = False
) -> tuple[int, ...]:
    """The ZeRO stages a plan may use.

    Args:
        config: The settings.
        deepspeed_config: The run's DeepSpeed config, if there is one.
        partitioned_model: The model was created under `deepspeed.zero.Init`, which only stage 3 can train.

    Raises:
        ConfigError: The setting and the model contradict each other.
    """
    asked = config.zero_stage if config.zero_stage is not None else stage_of(deepspeed_config)
    stages = PROFILED_STAGES if asked is None or asked == "auto" else (int(asked),)
    if partitioned_model:
        if 3 not in stages:
            raise ConfigError(
                f"the model was created with partitioned parameters (deepspeed.zero.Init), which needs ZeRO stage 3, "
                f"but zero_stage is {asked}. Set zero_stage: 3, or create the model without zero.Init."
            )
        return (3,)
    return stages


def plan_conflicts(plan: Plan | None, stages: tuple[int, ...], world_size: int) -> list[str]:
    """What about a plan made beforehand does not fit the run, one sentence each."""
    if plan is None:
        return []
    problems = []
    if plan.world_size != world_size:
        problems.append(
            f"the given plan is for {plan.world_size} ranks, the run has {world_size}. Plan again for this cluster."
        )
    if plan.zero_stage not in stages:
        problems.append(
            f"the given plan is for ZeRO stage {plan.zero_stage}, the settings ask for stage "
            f"{' or '.join(str(stage) for stage in stages)}. Make the two equal."
        )
    return problems


def plan_by_hand(sizes: Sequence[int], *, accumulation: int, zero_stage: int) -> Plan:
    """The plan of per-rank micro-batch sizes given by hand, repeated for every accumulation step."""
    return Plan(
        zero_stage=zero_stage,
        global_batch_size=sum(sizes) * accumulation,
        predicted_step_time_s=0.0,
        strategy=MANUAL,
        ranks=tuple(RankPlan(rank=rank, micro_batch_sizes=(size,) * accumulation) for rank, size in enumerate(sizes)),
    )


def even_plan(*, global_batch_size: int, world_size: int, micro_batch_size: int, zero_stage: int) -> Plan:
    """An even split that nothing has to be measured for.

    Args:
        global_batch_size: Samples per optimizer step.
        world_size: Number of ranks.
        micro_batch_size: Largest micro-batch of any rank.
        zero_stage: ZeRO stage of the plan.
    """
    micro_steps = -(-global_batch_size // (world_size * micro_batch_size))
    share, extra = divmod(global_batch_size, world_size)
    ranks = []
    for rank in range(world_size):
        size, larger = divmod(share + (rank < extra), micro_steps)
        ranks.append(RankPlan(rank=rank, micro_batch_sizes=(size + 1,) * larger + (size,) * (micro_steps - larger)))
    return Plan(
        zero_stage=zero_stage,
        global_batch_size=global_batch_size,
        predicted_step_time_s=0.0,
        strategy="even",
        ranks=tuple(ranks),
    )


def find_shared_plan(
    *,
    ranks: Ranks,
    config: PoplarConfig,
    batch: BatchRequest,
    stages: tuple[int, ...],
    global_batch_size: int,
    profile: Callable[[tuple[int, ...]], ClusterProfile],
    given: Plan | None = None,
    explain: Callable[[ClusterProfile, int], str] | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Plan, ClusterProfile | None]:
    """The plan of a run, the same on every rank.

    Args:
        ranks: The other ranks.
        config: The settings.
        batch: The batch figures without Poplar.
        stages: The ZeRO stages that may be used.
        global_batch_size: Samples per optimizer step.
        profile: Measures the cluster at the given stages; called on every rank, and only where a plan needs it.
        given: A plan made beforehand.
        explain: Profile and stage -> why a rank cannot hold one sample at that stage.
        say: Told, on every rank, when a stage had to be passed over.

    Returns:
        The plan, and the profile it was made from (None where nothing was measured).

    Raises:
        InsufficientMemoryError: At none of the stages does every rank have room for one sample.
        PlanError: A rank cannot be given its share.
    """
    if given is not None:
        return given, None
    if not config.enabled:
        plan = even_plan(
            global_batch_size=global_batch_size,
            world_size=ranks.world_size,
            micro_batch_size=batch.per_device_micro_batch_size,
            zero_stage=_unprofiled_stage(stages),
        )
        return plan, None
    sizes = config.sizes_by_rank(ranks.world_size)
    if sizes is not None:
        stage = _unprofiled_stage(stages)
        return plan_by_hand(sizes, accumulation=batch.gradient_accumulation_steps, zero_stage=stage), None
    measured = profile(stages)
    fitting = _stages_that_fit(measured, stages, explain, say)
    stage = fitting[0] if len(fitting) == 1 else "auto"
    plan = decide(
        ranks,
        lambda: find_plan(measured, global_batch_size=global_batch_size, zero_stage=stage, strategy=config.strategy),
    )
    return plan, measured


def _stages_that_fit(
    profile: ClusterProfile,
    stages: tuple[int, ...],
    explain: Callable[[ClusterProfile, int], str] | None,
    say: Callable[[str], None] | None,
) -> list[int]:
    fitting = [stage for stage in stages if all(profile.stage(stage).max_micro_batch_size)]
    if not fitting:
        raise InsufficientMemoryError(_why_not(profile, stages[-1], explain))
    passed_over = [stage for stage in stages if stage not in fitting]
    if passed_over and say is not None:
        names = ", ".join(str(stage) for stage in passed_over)
        say(
            f"ZeRO stage {names} passed over, using stage {fitting[0]} or higher: "
            + _why_not(profile, passed_over[-1], explain)
        )
    return fitting


def _why_not(profile: ClusterProfile, stage: int, explain: Callable[[ClusterProfile, int], str] | None) -> str:
    if explain is not None:
        return explain(profile, stage)
    short = [rank for rank, cap in enumerate(profile.stage(stage).max_micro_batch_size) if cap == 0]
    return f"at ZeRO stage {stage} not even one sample fits on rank {', '.join(map(str, short))}."


def _unprofiled_stage(stages: tuple[int, ...]) -> int:
    """The stage of a run that measures nothing: the one that was asked for, or DeepSpeed's usual 2."""
    return stages[0] if len(stages) == 1 else 2
