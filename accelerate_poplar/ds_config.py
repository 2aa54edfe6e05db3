"""Each rank's DeepSpeed configuration.

DeepSpeed checks on every rank, for that rank alone, that micro-batch x accumulation x ranks equals the train batch. Under
a plan those three figures differ between ranks, so each rank is given a set for which the check holds. They are not the
run's real figures: those are in the plan.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from .plan import Plan, RankPlan

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def rank_config(config: Mapping[str, Any], rank_plan: RankPlan, *, world_size: int, zero_stage: int) -> dict[str, Any]:
    """A DeepSpeed config for one rank of a plan.

    Args:
        config: The run's DeepSpeed config; not modified.
        rank_plan: This rank's share.
        world_size: Number of ranks.
        zero_stage: ZeRO stage of the plan.

    Returns:
        A copy with the stage, the three batch keys and the offload of the optimizer filled in, without the `"poplar"` object.
    """
    filled = copy.deepcopy(dict(config))
    filled.pop("poplar", None)
    micro_batch_size = max(1, *rank_plan.micro_batch_sizes)
    accumulation = len(rank_plan.micro_batch_sizes)
    filled["train_micro_batch_size_per_gpu"] = micro_batch_size
    filled["gradient_accumulation_steps"] = accumulation
    filled["train_batch_size"] = micro_batch_size * accumulation * world_size
    zero = dict(filled.get("zero_optimization") or {})
    zero["stage"] = zero_stage
    if rank_plan.offloads_optimizer:
        zero["offload_optimizer"] = {**(zero.get("offload_optimizer") or {}), "device": "cpu"}
        # DeepSpeed's own Adam for the host rounds in another way than the one the other ranks have.
        filled.setdefault("zero_force_ds_cpu_optimizer", False)
    filled["zero_optimization"] = zero
    return filled


def stage_of(config: Mapping[str, Any] | None) -> int | None:
    """The ZeRO stage a DeepSpeed config asks for, or None where it names none (or `"auto"`)."""
    stage = ((config or {}).get("zero_optimization") or {}).get("stage")
    return stage if isinstance(stage, int) and not isinstance(stage, bool) else None


def batch_conflicts(config: Mapping[str, Any] | None, *, global_batch_size: int) -> list[str]:
    """Fixed batch keys of the DeepSpeed config that contradict the run's global batch size, one sentence each.

    Only `train_batch_size` can contradict a plan: the other two keys are the planner's to fill in.
    """
    fixed = (config or {}).get("train_batch_size")
    if not isinstance(fixed, int) or fixed == global_batch_size:
        return []
    return [
        f"the DeepSpeed config fixes train_batch_size to {fixed}, but the plan has a global batch size of "
        f'{global_batch_size}. Set train_batch_size to "auto" in the DeepSpeed config, or set '
        f"global_batch_size: {fixed} in the Poplar settings."
    ]


def plan_summary(plan: Plan) -> str:
    """One line with the run's real batch figures, to stand beside DeepSpeed's."""
    shares = ", ".join(f"rank {r.rank}: {list(r.micro_batch_sizes)}" for r in plan.ranks)
    return f"global batch size {plan.global_batch_size} samples at ZeRO stage {plan.zero_stage} ({shares})"
