"""How much state the run's optimizer keeps for every parameter, read off the optimizer itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from .model_state import optimizer_bytes

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_NOT_TO_BE_TRIED = (TypeError, ValueError, RuntimeError, ImportError, AttributeError, KeyError, AssertionError)
"""What an optimizer may raise that wants more than a flat vector of parameters to be made or stepped."""
_OF_DEEPSPEED = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
"""Optimizers a DeepSpeed config may name that keep less than Adam; the rest counts as AdamW."""


def state_bytes(make: MakeOptimizer, device: torch.device) -> float | None:
    """Bytes per parameter, the fp32 master copy included; None = not to be told, count as AdamW.

    Args:
        make: Parameters -> optimizer.
        device: Where the optimizer will run; some exist only there.
    """
    try:
        return optimizer_bytes(make, device=device)
    except _NOT_TO_BE_TRIED:
        return None


def of_optimizer(optimizer: Any, device: torch.device) -> float | None:
    """`state_bytes` of one like a given optimizer; of `accelerate`'s `DummyOptim`, which leaves it to DeepSpeed, None."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    return state_bytes(lambda parameters: type(optimizer)(parameters, **optimizer.defaults), device)


def of_deepspeed(deepspeed_config: Mapping[str, Any], device: torch.device) -> float | None:
    """`state_bytes` of the optimizer that a DeepSpeed config names."""
    named = deepspeed_config["optimizer"]
    kind = _OF_DEEPSPEED.get(str(named.get("type", "")).lower())
    if kind is None:
        return None
    momentum = (named.get("params") or {}).get("momentum")
    given = {"momentum": momentum} if kind is torch.optim.SGD and isinstance(momentum, (int, float)) else {}
    return state_bytes(lambda parameters: kind(parameters, lr=1e-3, **given), device)


def of_trainer(trainer: Trainer, device: torch.device) -> float | None:
    """`state_bytes` of the optimizer that a trainer was given or will make."""
    if trainer.optimizer is not None:
        return of_optimizer(trainer.optimizer, device)
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    if plugin is not None and "optimizer" in plugin.hf_ds_config.config:
        return of_deepspeed(plugin.hf_ds_config.config, device)
    try:
        kind, given = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    except _NOT_TO_BE_TRIED:
        # Training will say what is wrong with it.
        return None
    return state_bytes(lambda parameters: kind(parameters, **given), device)
