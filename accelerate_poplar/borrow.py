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
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Training mode with gradients inside; all as before afterwards.

    Restored are the random number generators of Python, numpy, torch and the device, and what every module holds:
    training flag, parameters and buffers (by reference), children, plain attributes such as counters and caches.
    """
    with _random_state(device), module_state(model), torch.enable_grad():
        model.train()
        yield


@contextlib.contextmanager
def on_device(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """The model works on copies on `device`, floating-point tensors in `dtype`; use inside `undisturbed`.

    The originals are put back by reference, gradients too. A model initialised by ZeRO-3 is gathered meanwhile: all
    ranks must enter and leave together then.
    """
    with _gathered(model), _copied(model, device, dtype):
        yield


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
    import deepspeed

    with deepspeed.zero.GatheredParameters(parts):
        yield


@contextlib.contextmanager
def module_state(model: nn.Module) -> Iterator[None]:
    """Restore what every module holds: flags, parameters, buffers, children, plain attributes."""
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
def _copied(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    originals = [(p, p.data, p.grad) for p in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device=device, dtype=kind, copy=True)

    try:
        for parameter, data, _ in originals:
            parameter.grad = None
            parameter.data = copy(data)
        copies: dict[int, torch.Tensor] = {}
        for module, content in buffers:
            for name, buffer in content.items():
                if buffer is not None:
                    if id(buffer) not in copies:
                        copies[id(buffer)] = copy(buffer)
                    module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for parameter, data, gradient in originals:
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient
        for module, content in buffers:
            module._buffers.update(content)
