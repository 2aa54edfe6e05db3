"""Where the Trainer's DeepSpeed configuration meets the plan."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfDeepSpeedConfig, HfTrainerDeepSpeedConfig

from .config import PoplarConfig
from .ds_config import BATCH_KEYS, plan_summary, rank_config
from .model_state import sized_buffers

if TYPE_CHECKING:
    from .run import PoplarRun


def original_deepspeed_config(args: TrainingArguments) -> dict[str, Any] | None:
    """The DeepSpeed config as the user wrote it, before anything filled in its `"auto"` values; None without one."""
    if args.deepspeed:
        return copy.deepcopy(HfDeepSpeedConfig(args.deepspeed).config)
    plugin = args.deepspeed_plugin
    return None if plugin is None else copy.deepcopy(plugin.hf_ds_config.config)


def use_deepspeed(args: TrainingArguments, config: PoplarConfig) -> None:
    """Give a distributed run that names no DeepSpeed config one; a run of one process is left alone."""
    if args.deepspeed_plugin is not None or args.world_size < 2:
        return
    stage = config.zero_stage if isinstance(config.zero_stage, int) else 2
    settings: dict[str, Any] = dict.fromkeys(BATCH_KEYS, "auto")
    settings |= {
        "zero_optimization": {"stage": stage},
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
    }
    hf_config = HfTrainerDeepSpeedConfig(settings)
    hf_config.trainer_config_process(args)
    args.hf_deepspeed_config = hf_config
    args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=hf_config)


def refresh_deepspeed(accelerator: Accelerator, args: TrainingArguments) -> None:
    """Fill the config in again now that the number of ranks is known, the batch keys left to the plan.

    The first filling happened when the arguments were built; without an accelerator that was before the process group
    existed, so its batch figures, and the mismatches it noted, may be those of a single process.
    """
    plugin = accelerator.state.deepspeed_plugin
    settings = copy.deepcopy(plugin.hf_ds_config.config)
    settings.pop("poplar", None)
    settings.update(dict.fromkeys(BATCH_KEYS, "auto"))
    settings["steps_per_print"] = float("inf")
    hf_config = HfTrainerDeepSpeedConfig(settings)
    hf_config.trainer_config_process(args)
    _install(plugin, hf_config)
    if getattr(args, "hf_deepspeed_config", None) is not None:
        args.hf_deepspeed_config = hf_config


def use_plan(accelerator: Accelerator, run: PoplarRun) -> None:
    """Give this rank the DeepSpeed config of its share of the plan."""
    plugin = accelerator.state.deepspeed_plugin
    hf_config = plugin.hf_ds_config
    plan = run.plan
    filled = rank_config(
        hf_config.config, plan.ranks[run.ranks.rank], world_size=plan.world_size, zero_stage=plan.zero_stage
    )
    if run.model_size is not None:
        # DeepSpeed wants even sizes.
        buffers = {key: count + count % 2 for key, count in sized_buffers(filled, run.model_size).items()}
        filled["zero_optimization"] |= buffers
    hf_config.config.clear()
    hf_config.config.update(filled)
    hf_config.set_stage_and_offload()
    _install(plugin, hf_config)
    # Accelerate compares the two; with DeepSpeed it uses its own for nothing else.
    accelerator.gradient_accumulation_steps = hf_config.config["gradient_accumulation_steps"]
    run.say(plan_summary(plan))


def _install(plugin: DeepSpeedPlugin, hf_config: HfTrainerDeepSpeedConfig) -> None:
    plugin.hf_ds_config = hf_config
    plugin.deepspeed_config = hf_config.config
    plugin.zero_stage = hf_config.config.get("zero_optimization", {}).get("stage", plugin.zero_stage)
