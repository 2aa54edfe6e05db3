"""The husk of a model: its modules and parameter shapes without its arithmetic, to time what surrounds a model.

The husk has the same modules in the same order and parameters of the same shapes, but its forward pass computes nothing
and its gradients are zeros. It can be told to keep the device busy, or to pause, for a set time per pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from .device import synchronize
from .model_state import full_shape

_STAND_IN_SIZE, _STAND_IN_CALLS = 512, 50
"""Rows of the square matrices that keep a GPU busy, and multiplications to time one with."""

Clock = Callable[[], float]
_Work = TypeVar("_Work", bound=Callable[[float], None])


class StandInCompute:
    """Keeps a device busy for about as long as it is told.

    Args:
        device: A CPU is kept busy by its thread, a GPU by kernels on the current stream.
        seconds: Of compute per call.
        clock: Seconds of real time.
    """

    def __init__(self, device: torch.device, seconds: float, clock: Clock = time.perf_counter) -> None:
        self._seconds = seconds
        self._clock = clock
        self._matrix: torch.Tensor | None = None
        if device.type != "cpu":
            self._matrix = torch.zeros(_STAND_IN_SIZE, _STAND_IN_SIZE, device=device)
            self._multiply(_STAND_IN_CALLS)
            synchronize(device)
            start = clock()
            self._multiply(_STAND_IN_CALLS)
            synchronize(device)
            self._call_s = max((clock() - start) / _STAND_IN_CALLS, 1e-7)

    def __call__(self, times: float = 1.0) -> None:
        """Be busy for so many times the seconds."""
        seconds = times * self._seconds
        if self._matrix is not None:
            self._multiply(round(seconds / self._call_s))
            return
        end = self._clock() + seconds
        while self._clock() < end:
            pass

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._matrix, self._matrix)


class StandInPauses:
    """Makes the layers of a pass take a set time, as on a slow device: what was computed since the last layer counts.

    Args:
        seconds: Of compute and pause together per call.
        clock: Seconds of real time; a sleep that ends late shortens the next.
        compute_clock: Seconds of compute of this thread; stands still while it waits for other ranks.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        seconds: float,
        clock: Clock = time.perf_counter,
        compute_clock: Clock = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._compute_clock = compute_clock
        self._sleep = sleep
        self.begin()

    def begin(self) -> None:
        """A pass starts: nothing before it counts."""
        self._seen = self._compute_clock()
        self._owed_s = 0.0

    def __call__(self, times: float = 1.0) -> None:
        """Pause for what is left of so many times the seconds."""
        self._owed_s += times * self._seconds - (self._compute_clock() - self._seen)
        if self._owed_s > 0.0:
            start = self._clock()
            self._sleep(self._owed_s)
            self._owed_s -= self._clock() - start
        self._seen = self._compute_clock()


class _Touch(torch.autograd.Function):
    """Passes `x` on; its backward pass gives every parameter a gradient of zeros."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, work: Callable[[float], None] | None, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.shapes = [(p.shape, p.dtype, p.device, p.requires_grad) for p in parameters]
        ctx.work = work
        if work is not None:
            work(1.0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.work is not None:
            ctx.work(2.0)
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if wanted else None
            for shape, dtype, device, wanted in ctx.shapes
        ]
        return (gradients[0], None, *zeros)


class Husk(nn.Module):
    """A model's modules and parameter shapes without its arithmetic.

    Args:
        model: What to imitate; only shapes are read, so ZeRO-3 initialised models are fine.
        shrink: Every parameter has this share of the original's elements, at least one.
    """

    def __init__(self, model: nn.Module, *, shrink: float = 1.0, _seen: dict[int, nn.Parameter] | None = None) -> None:
        super().__init__()
        seen = {} if _seen is None else _seen
        for name, parameter in model._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in seen:
                elements = max(1, round(full_shape(parameter).numel() * shrink))
                seen[id(parameter)] = nn.Parameter(torch.zeros(elements), requires_grad=parameter.requires_grad)
            self.register_parameter(name, seen[id(parameter)])
        self.work: Callable[[float], None] | None = None
        self.is_list = type(model).forward is nn.Module.forward
        for name, child in model.named_children():
            self.add_module(name, Husk(child, shrink=shrink, _seen=seen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` unchanged, in a graph in which every parameter has a gradient."""
        own = [p for p in self._parameters.values() if p is not None]
        if own:
            x = _Touch.apply(x, self.work, *own)  # type: ignore[no-untyped-call]
        for child in _called(self):
            x = child(x)
        return x

    def compute(self, seconds: float, device: torch.device, clock: Clock = time.perf_counter) -> None:
        """Let forward and backward together take so many seconds of compute, shared out evenly."""
        self._share_out(seconds, lambda share: StandInCompute(device, share, clock))

    def pause(self, seconds: float, clock: Clock = time.perf_counter) -> None:
        """Let forward and backward together take so many seconds, shared out evenly, by pauses; call it once."""
        pauses = self._share_out(seconds, lambda share: StandInPauses(share, clock))
        self.register_forward_pre_hook(lambda module, args: pauses.begin())

    def _share_out(self, seconds: float, make: Callable[[float], _Work]) -> _Work:
        """Give all modules with parameters the same work; a backward pass does it twice, a forward pass once."""
        touched = [module for module in self.modules() if isinstance(module, Husk) and module._parameters]
        work = make(seconds / (3 * max(len(touched), 1)))
        for module in touched:
            module.work = work
        return work


def _called(module: Husk) -> Iterator[Husk]:
    """Children that a forward pass calls; lists of modules are never called themselves."""
    for child in module.children():
        if isinstance(child, Husk):
            if child.is_list:
                yield from _called(child)
            else:
                yield child
