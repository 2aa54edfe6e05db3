"""Getting Accelerate's process group up where there is no accelerator.

Without a GPU, Accelerate asked for DeepSpeed finds no backend and counts every process as the only one. A gloo process
group, set up before the host library looks, gives it the right world.
"""

from __future__ import annotations

import atexit
import datetime
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, DynamoBackend
from transformers import TrainingArguments

from .config import LaunchEnvironment, deepspeed_switch


def has_accelerator() -> bool:
    """True when torch sees any device besides the processor."""
    return torch.accelerator.is_available()


def needs_gloo(environment: LaunchEnvironment) -> bool:
    """True when this process is one of several and no accelerator is there to connect them."""
    return environment.local_rank >= 0 and environment.world_size > 1 and not has_accelerator()


def start_gloo_state(timeout_s: float = 1800.0) -> PartialState:
    """Accelerate's state for DeepSpeed over gloo; reuses one that is already right.

    Args:
        timeout_s: Time limit of the group's collectives, in seconds.
    """
    # Registered once, however often this is called.
    atexit.unregister(_leave_group)
    atexit.register(_leave_group)
    if PartialState._shared_state:
        state = PartialState()
        # Asked for DeepSpeed without a backend, Accelerate has set up a state that believes it is alone.
        if state.distributed_type == DistributedType.DEEPSPEED and state.backend is not None:
            return state
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with deepspeed_switch():
        return PartialState(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))


def _leave_group() -> None:
    """Take the process group down before the interpreter goes: gloo's threads may otherwise abort the process then.

    Not after an unhandled exception, when a rank must not wait for anything.
    """
    if (
        dist.is_available()
        and dist.is_initialized()
        and not hasattr(sys, "last_exc")
        and not hasattr(sys, "last_type")
    ):
        dist.destroy_process_group()


def prepare_arguments(args: TrainingArguments) -> None:
    """Put training arguments on the gloo state, where that is needed.

    Plain `TrainingArguments` have by now set up a state of one process; it is replaced, and the arguments' cached device
    with it.
    """
    if not needs_gloo(LaunchEnvironment.from_environment()):
        return
    start_gloo_state(args.ddp_timeout)
    args.accelerator_config.use_configured_state = True
    args.__dict__.pop("_setup_devices", None)
    _ = args.device


def compile_options() -> dict[str, Any] | None:
    """Arguments of `torch.compile` with which Accelerate will compile the model; None: it will not."""
    plugin = AcceleratorState().dynamo_plugin
    if plugin.backend == DynamoBackend.NO or plugin.disable:
        return None
    return plugin.to_kwargs()
