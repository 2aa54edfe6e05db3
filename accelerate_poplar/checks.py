"""Everything that can be known to be wrong before anything expensive starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from .config import EmulationConfig, PoplarConfig
from .ds_config import batch_conflicts
from .errors import ConfigError, DataError, raise_together
from .plan import Plan
from .run_request import BatchRequest, candidate_stages, plan_conflicts, state_conflicts
from .streaming import is_stream


def check_run(
    *,
    config: PoplarConfig,
    emulation: EmulationConfig,
    args: TrainingArguments,
    batch: BatchRequest,
    deepspeed_config: Mapping[str, Any] | None,
    train_dataset: Any,
    plan: Plan | None = None,
) -> None:
    """Raise one error that names everything contradictory about a run.

    Args:
        config: The settings.
        emulation: Emulated ranks, if any.
        args: The training arguments.
        batch: The batch figures without Poplar.
        deepspeed_config: The DeepSpeed config as the user wrote it, if there is one.
        train_dataset: The training dataset, if there is one.
        plan: A plan made beforehand, if there is one.

    Raises:
        ConfigError: Settings contradict each other or the number of ranks.
        DataError: The dataset is empty.
    """
    problems = [*config.check_world(batch.world_size), *emulation.check_world(batch.world_size)]
    problems += _host_conflicts(args)
    problems += _deepspeed_conflicts(deepspeed_config, args)
    stages = candidate_stages(config, deepspeed_config)
    problems += plan_conflicts(plan, stages, batch.world_size)
    problems += state_conflicts(config, deepspeed_config, stages, plan=plan)
    if not problems:
        try:
            global_batch_size = batch.global_batch_size(config, given=plan)
            problems += batch_conflicts(deepspeed_config, global_batch_size=global_batch_size)
        except ConfigError as error:
            problems.append(str(error))
    raise_together(problems)
    check_dataset(train_dataset)


def check_dataset(dataset: Any) -> None:
    """Raise for a dataset that cannot be shared out.

    Raises:
        DataError: It is empty.
    """
    if dataset is None:
        return
    if not is_stream(dataset) and len(dataset) == 0:
        raise DataError("the training dataset is empty: there is nothing to train on.")


def _host_conflicts(args: TrainingArguments) -> list[str]:
    problems = []
    if args.auto_find_batch_size:
        problems.append(
            "auto_find_batch_size halves every rank's batch after an out-of-memory error, Poplar finds each rank's "
            "largest micro-batch before training. Turn auto_find_batch_size off."
        )
    accelerator = args.accelerator_config
    if getattr(accelerator, "split_batches", False):
        problems.append(
            "accelerator_config.split_batches cuts every batch into equal pieces, a plan cuts it into unequal ones. "
            "Turn split_batches off."
        )
    if getattr(accelerator, "dispatch_batches", None):
        problems.append(
            "accelerator_config.dispatch_batches lets rank 0 hand out equal batches, a plan gives each rank its own. "
            "Turn dispatch_batches off."
        )
    if args.train_sampling_strategy == "batch_rebalance":
        problems.append(
            "train_sampling_strategy='batch_rebalance' cuts batches for equal ranks and cannot follow a plan. "
            "Use 'random', 'sequential' or 'group_by_length'."
        )
    if args.n_gpu > 1:
        problems.append(
            f"one process sees {args.n_gpu} GPUs and would use DataParallel. Start one process per GPU with "
            "`accelerate launch`, or show this process a single one with CUDA_VISIBLE_DEVICES."
        )
    if args.fsdp:
        problems.append("fsdp and Poplar exclude each other: plans are for DeepSpeed ZeRO. Remove fsdp.")
    return problems


def _deepspeed_conflicts(config: Mapping[str, Any] | None, args: TrainingArguments) -> list[str]:
    given = (
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", args.per_device_train_batch_size),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", args.gradient_accumulation_steps),
    )
    problems = []
    for key, name, value in given:
        fixed = (config or {}).get(key)
        # Accelerate fills in 1 where its own YAML names no accumulation steps.
        if isinstance(fixed, int) and fixed != value and not (key == name and fixed == 1):
            problems.append(
                f"the DeepSpeed config fixes {key} to {fixed}, but the training arguments say {name}={value}. "
                f'Set {key} to "auto" in the DeepSpeed config, or make the two equal.'
            )
    tensor_parallel = ((config or {}).get("tensor_parallel") or {}).get("autotp_size", 0)
    if isinstance(tensor_parallel, int) and tensor_parallel > 1:
        problems.append(
            f"the DeepSpeed config asks for tensor parallelism (autotp_size {tensor_parallel}); plans are for data "
            "parallel ranks only. Remove tensor_parallel."
        )
    return problems
