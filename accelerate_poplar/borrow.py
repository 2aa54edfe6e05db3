"""Borrow a model for profiling and give it back without a trace."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def borrowed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[nn.Module]:
    """The model in training mode on `device` with floating-point tensors in `dtype`; all as before afterwards.

    Parameters and buffers are worked on as copies and the originals put back by reference; gradients, training
    flags, plain module attributes and every random number generator are restored too. A model initialised by
    ZeRO-3 is gathered meanwhile: all ranks must enter and leave together.
    """
    with _random_state(device), _gathered(model), _module_state(model), _moved(model, device, dtype):
        model.train()
        with torch.enable_grad():
            yield model


@contextlib.contextmanager
def _random_state(device: torch.device) -> Iterator[None]:
    python, numbers, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(host)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


@contextlib.contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    """Whole parameters, where `deepspeed.zero.Init` took them apart."""
    parts = [p for p in model.parameters() if hasattr(p, "ds_id")]
    if not parts:
        yield
        return
    import deepspeed  # type: ignore[import-untyped]

    with deepspeed.zero.GatheredParameters(parts):
        yield


@contextlib.contextmanager
def _module_state(model: nn.Module) -> Iterator[None]:
    """Plain attributes of every module: training flags, counters, lazily made caches."""
    containers = ("_parameters", "_buffers", "_modules")
    saved: list[tuple[nn.Module, dict[str, Any], dict[str, dict[str, Any]]]] = [
        (module, dict(module.__dict__), {name: dict(module.__dict__[name]) for name in containers})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, contents in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, content in contents.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(content)


@contextlib.contextmanager
def _moved(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    originals = [(p, p.data, p.grad) for p in model.parameters()]

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device=device, dtype=kind, copy=True)

    try:
        for parameter, data, _ in originals:
            parameter.grad = None
            parameter.data = copy(data)
        copies: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), copy(buffer))
        yield
    finally:
        for parameter, data, gradient in originals:
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient
