"""What a run asks for before anything is measured: its batch, its ZeRO stages, and what contradicts itself there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import PoplarConfig
from .ds_config import stage_of
from .errors import ConfigError
from .plan import Plan
from .state_refusals import offloads_optimizer, refusals

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
    if len(stages) > 1 and config.fractions_by_rank() is not None:
        # Stage 0 has no state to share out.
        stages = stages[1:]
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


def state_conflicts(
    config: PoplarConfig,
    deepspeed_config: Mapping[str, Any] | None,
    stages: tuple[int, ...],
    *,
    plan: Plan | None = None,
) -> list[str]:
    """What uneven training state, where the settings or a given plan ask for it, cannot be combined with."""
    planned = None if plan is None else plan.state_fractions
    if not config.enabled:
        return []
    offload = _offload_conflicts(config, deepspeed_config, stages, plan)
    if config.state_shards == "even" and planned is None:
        return offload
    # Which features are in the way depends on the stage; of an open one, the engine's own check says the rest.
    problems = refusals(deepspeed_config, zero_stage=stages[0] if len(stages) == 1 else 2)
    if plan is not None and isinstance(config.state_shards, tuple) and config.fractions_by_rank() != planned:
        shares = "even shares" if planned is None else f"shares {list(planned)}"
        problems.append(
            f"the given plan has {shares} of the training state, the settings ask for {list(config.state_shards)}. "
            "Remove state_shards from the settings, or plan again."
        )
    return problems + offload


def _offload_conflicts(
    config: PoplarConfig, deepspeed_config: Mapping[str, Any] | None, stages: tuple[int, ...], plan: Plan | None
) -> list[str]:
    """What keeping the optimizer of some ranks on the host cannot be combined with."""
    planned = () if plan is None else plan.offloading_ranks
    if config.state_offload == "off" and not planned:
        return []
    problems = []
    if stages == (0,):
        problems.append(
            "state_offload is 'auto', but the DeepSpeed config asks for ZeRO stage 0, at which DeepSpeed offloads nothing. "
            "Use stage 1, 2 or 3, or leave state_offload out."
        )
    if offloads_optimizer(deepspeed_config):
        wish = f"the plan offloads the optimizer of ranks {list(planned)}" if planned else "state_offload is 'auto'"
        problems.append(
            f"{wish}, but the DeepSpeed config offloads the optimizer of every rank (zero_optimization.offload_optimizer). "
            "Remove one of the two."
        )
    return problems
