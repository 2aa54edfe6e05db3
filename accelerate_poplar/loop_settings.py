"""How a plain loop is to be run: with which DeepSpeed settings, and with how many accumulation steps."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, DistributedType, DummyScheduler

from .config import LaunchEnvironment, PoplarConfig
from .errors import CompatibilityError, ConfigError
from .host import needs_gloo, start_gloo_state
from .plan import Plan
from .plugin import PoplarPlugin

_WITHOUT_DEEPSPEED = {"zero_optimization": {"stage": 0}}
"""Plain data parallelism keeps and communicates what ZeRO stage 0 does."""


def chosen_plugin(arguments: Mapping[str, Any], environment: LaunchEnvironment) -> DeepSpeedPlugin | None:
    """The DeepSpeed plugin a loop was given, or a `PoplarPlugin` where the launcher asks for DeepSpeed.

    Raises:
        CompatibilityError: There are several.
    """
    plugin = arguments.get("deepspeed_plugin", arguments.get("deepspeed_plugins"))
    if isinstance(plugin, Mapping):
        if len(plugin) != 1:
            raise CompatibilityError(
                f"{len(plugin)} DeepSpeed plugins were given, but a plan is for one model. Give a single PoplarPlugin."
            )
        plugin = next(iter(plugin.values()))
    if plugin is None and environment.deepspeed:
        return PoplarPlugin()
    return plugin


def plugin_for(config: PoplarConfig, plan: Plan | None) -> PoplarPlugin | None:
    """A plugin for settings that ask for a ZeRO stage without one; None: plain data parallelism will do."""
    if plan is not None:
        return PoplarPlugin(zero_stage=plan.zero_stage) if plan.zero_stage > 0 else None
    if config.zero_stage is None or config.zero_stage == 0:
        return None
    return PoplarPlugin(zero_stage=config.zero_stage)


def start_state(arguments: dict[str, Any], plugin: DeepSpeedPlugin | None, environment: LaunchEnvironment) -> None:
    """Connect the ranks where there is no accelerator: Accelerate would count each of them as the only one."""
    if not needs_gloo(environment):
        return
    if plugin is not None:
        start_gloo_state()
        return
    arguments["cpu"] = True
    if PartialState._shared_state and PartialState().distributed_type != DistributedType.MULTI_CPU:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def data_parallel_settings(
    given: DistributedDataParallelKwargs | None, plan: Plan, *, by_length: bool
) -> DistributedDataParallelKwargs | None:
    """Settings of plain data parallelism under a plan.

    After its first backward pass, `DistributedDataParallel` orders its buckets anew at the next forward pass, and the
    ranks meet for it. With several micro-steps per optimizer step that forward pass is not the same one on all ranks, and
    only the search for unused parameters makes it leave the buckets alone.
    """
    if not by_length and all(len(rank.micro_batch_sizes) == 1 for rank in plan.ranks):
        return given
    return dataclasses.replace(given or DistributedDataParallelKwargs(), find_unused_parameters=True)


def written_config(plugin: DeepSpeedPlugin | None) -> dict[str, Any]:
    """The DeepSpeed config as it was written, before anything is filled in; stage 0 without DeepSpeed."""
    if plugin is None:
        return copy.deepcopy(_WITHOUT_DEEPSPEED)
    return copy.deepcopy(plugin.written_config if isinstance(plugin, PoplarPlugin) else plugin.deepspeed_config)


def accumulation_of(accelerator_steps: int, deepspeed_config: Mapping[str, Any]) -> int:
    """Accumulation steps, of the accelerator or of the DeepSpeed config.

    Raises:
        ConfigError: Both name different numbers.
    """
    fixed = deepspeed_config.get("gradient_accumulation_steps")
    if not isinstance(fixed, int) or fixed == accelerator_steps or fixed == 1:
        return accelerator_steps
    if accelerator_steps == 1:
        return fixed
    raise ConfigError(
        f"the accelerator has gradient_accumulation_steps={accelerator_steps}, the DeepSpeed config fixes it to "
        f"{fixed}. "
        'Set it to "auto" in the DeepSpeed config, or make the two equal.'
    )


def undivided(item: Any, num_processes: int) -> Any:
    """A `DummyScheduler` whose steps are optimizer steps: Accelerate divides them by the number of ranks."""
    if not isinstance(item, DummyScheduler) or item.total_num_steps is None:
        return item
    scaled = copy.copy(item)
    scaled.total_num_steps = item.total_num_steps * num_processes
    return scaled
