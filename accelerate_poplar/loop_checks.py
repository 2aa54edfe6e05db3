"""What about a plain loop's settings contradicts a plan, known before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.utils import DataLoaderConfiguration

from .config import EmulationConfig, PoplarConfig
from .ds_config import batch_conflicts
from .errors import ConfigError
from .loop_run import LOSS_REDUCTIONS
from .plan import Plan
from .run_request import BatchRequest, candidate_stages, plan_conflicts, state_conflicts


def setting_problems(
    *,
    config: PoplarConfig,
    emulation: EmulationConfig,
    plan: Plan | None,
    deepspeed_config: Mapping[str, Any],
    world_size: int,
    loss_reduction: str,
    arguments: Mapping[str, Any],
) -> list[str]:
    """Everything wrong with the arguments of a `PoplarAccelerator`, one sentence each.

    Args:
        config: The settings.
        emulation: Emulated ranks, if any.
        plan: A plan made beforehand, if there is one.
        deepspeed_config: The DeepSpeed config as written; stage 0 without DeepSpeed.
        world_size: Number of ranks.
        loss_reduction: As given.
        arguments: The arguments of the stock `Accelerator`.
    """
    problems = [*config.check_world(world_size), *emulation.check_world(world_size)]
    stages = candidate_stages(config, deepspeed_config)
    problems += plan_conflicts(plan, stages, world_size)
    problems += state_conflicts(config, deepspeed_config, stages, plan=plan)
    if loss_reduction not in LOSS_REDUCTIONS:
        problems.append(f"loss_reduction is {loss_reduction!r}; it must be one of {', '.join(LOSS_REDUCTIONS)}.")
    return problems + _host_conflicts(arguments)


def _host_conflicts(arguments: Mapping[str, Any]) -> list[str]:
    loading = arguments.get("dataloader_config") or DataLoaderConfiguration()
    problems = []
    if loading.split_batches or arguments.get("split_batches") is True:
        problems.append(
            "split_batches cuts every batch into equal pieces, a plan cuts it into unequal ones. Turn it off; for the "
            "same global batch, divide the loader's batch_size by the number of ranks."
        )
    if loading.dispatch_batches:
        problems.append(
            "dispatch_batches lets rank 0 hand out equal batches, a plan gives each rank its own. Turn it off."
        )
    if loading.use_stateful_dataloader:
        problems.append(
            "use_stateful_dataloader keeps the place of each rank's own loader, which a plan may change. Turn it off: "
            "save_state and load_state keep the place in the global order anyway."
        )
    others = ("fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")
    problems += [
        f"{name} and Poplar exclude each other: plans are for DeepSpeed ZeRO and plain data parallelism. Remove it."
        for name in others
        if arguments.get(name) is not None
    ]
    return problems


def batch_problems(
    *, batch: BatchRequest, config: PoplarConfig, plan: Plan | None, deepspeed_config: Mapping[str, Any]
) -> list[str]:
    """Batch figures that contradict each other, one sentence each."""
    problems = []
    fixed = deepspeed_config.get("train_micro_batch_size_per_gpu")
    size = batch.per_device_micro_batch_size
    if isinstance(fixed, int) and fixed != size:
        problems.append(
            f"the DeepSpeed config fixes train_micro_batch_size_per_gpu to {fixed}, but the training loader has a "
            f'batch_size of {size}. Set train_micro_batch_size_per_gpu to "auto" in the DeepSpeed config, or make the '
            "two equal."
        )
    try:
        total = batch.global_batch_size(config, given=plan)
    except ConfigError as error:
        return [*problems, str(error)]
    return problems + batch_conflicts(deepspeed_config, global_batch_size=total)
