"""Make a rank look slower or smaller than it is, for demos, tests and benchmarks on equal machines.

A slow rank sleeps for a multiple of its own compute time. Compute is read from the thread's processor time, which
stands still while the rank waits for its peers, so that waiting is never multiplied. The pauses are taken in small
pieces all through forward and backward: a single pause at the end would let the ranks' waits add up wherever they
meet inside a pass (ZeRO-3), and one after the step would be served rank after rank.

Figures taken under emulation are always called emulated.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .allocations import AllocationCounter
from .errors import ConfigError

_SMALLEST_SLEEP_S = 2e-3
"""Shorter debts wait for more: a sleep ends some 60 microseconds late and leaves the processor cold."""
_SLEEPS_PER_PASS = 8
"""About how many pieces a pass is slowed in: more would leave the processor cold too often, which slows it twice."""


class Emulation:
    """What one rank pretends to be.

    Args:
        slowdown: How many times longer forward and backward take; at least 1.
        memory_bytes: Device memory the rank pretends to have; None = its own.
        compute_clock: Seconds of compute of this thread; must stand still while it waits.
        clock: Seconds of real time, used to see how long a sleep really was.
        sleep: Waits for a number of seconds.

    Raises:
        ConfigError: A figure is out of range.
    """

    def __init__(
        self,
        *,
        slowdown: float = 1.0,
        memory_bytes: int | None = None,
        compute_clock: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not slowdown >= 1.0:
            raise ConfigError(f"emulated slowdown is {slowdown}; it must be at least 1 (1 = full speed).")
        if memory_bytes is not None and memory_bytes < 1:
            raise ConfigError(f"emulated memory is {memory_bytes} bytes; it must be at least 1.")
        self.slowdown = slowdown
        self.memory_bytes = memory_bytes
        self._pacer = _Pacer(slowdown, compute_clock, clock, sleep)
        self._attached: weakref.WeakKeyDictionary[nn.Module, EmulationHandle] = weakref.WeakKeyDictionary()
        self._counter: AllocationCounter | None = None

    @property
    def active(self) -> bool:
        """True when the rank pretends to be slower or smaller than it is."""
        return self.slowdown != 1.0 or self.memory_bytes is not None

    def attach(self, model: nn.Module) -> EmulationHandle:
        """Slow the forward and backward passes of `model`, also when DeepSpeed wraps it afterwards.

        Args:
            model: Attached at most once; a second call while attached returns a handle that does nothing.

        Returns:
            A handle to remove the hooks with; also a context manager that does so.
        """
        if self.slowdown == 1.0 or model in self._attached:
            return EmulationHandle([], lambda: None)
        handle = EmulationHandle(list(_install(model, self._pacer)), lambda: self._attached.pop(model, None))
        self._attached[model] = handle
        return handle

    @contextlib.contextmanager
    def memory_cap(
        self, base_bytes: int = 0, *, device_type: str = "cpu", known: Iterable[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Raise `torch.OutOfMemoryError` when live tensors exceed the emulated memory.

        One counter serves all uses, so that gradients kept from one micro-step to the next stay counted.

        Args:
            base_bytes: Training state that exists already: parameters and optimizer state.
            device_type: Kind of device whose tensors count.
            known: Tensors that `base_bytes` speaks of, so that their views are not counted as new.
        """
        if self.memory_bytes is None:
            yield
            return
        if self._counter is None:
            self._counter = AllocationCounter(
                device_type=device_type, limit_bytes=self.memory_bytes, describe=self._describe
            )
        self._counter.base_bytes = base_bytes
        self._counter.know(known, count=False)
        with self._counter:
            yield

    def forget_memory(self) -> None:
        """Start `memory_cap` afresh, counting nothing that was made so far."""
        self._counter = None

    def _describe(self, in_use: int) -> str:
        return (
            f"emulated device out of memory: {in_use / 2**30:.3f} GiB of tensors would be in use, "
            f"{(self.memory_bytes or 0) / 2**30:.3f} GiB are emulated."
        )


class EmulationHandle:
    """Removes the hooks of one `Emulation.attach`; a context manager that does so on leaving."""

    def __init__(self, hooks: list[RemovableHandle], on_remove: Callable[[], Any]) -> None:
        self._hooks = hooks
        self._on_remove = on_remove

    def remove(self) -> None:
        """Take the hooks off; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._on_remove()

    def __enter__(self) -> EmulationHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Pacer:
    """Keeps the debt of sleep a rank owes for its compute."""

    def __init__(
        self,
        slowdown: float,
        compute_clock: Callable[[], float],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._factor = slowdown - 1.0
        self._compute_clock = compute_clock
        self._clock = clock
        self._sleep = sleep
        self._seen = 0.0
        self._debt_s = 0.0
        self._pass_debt_s = 0.0
        self._piece_s = _SMALLEST_SLEEP_S

    def begin(self) -> None:
        """A forward pass starts: what was computed before it is not part of it."""
        self._piece_s = max(_SMALLEST_SLEEP_S, self._pass_debt_s / _SLEEPS_PER_PASS)
        self._pass_debt_s = 0.0
        self._seen = self._compute_clock()

    def tick(self, *, settle: bool = False) -> None:
        """Add the compute since the last tick to the debt, and sleep it off when it is worth it.

        Args:
            settle: Sleep off whatever is owed.
        """
        owed = self._factor * (self._compute_clock() - self._seen)
        self._pass_debt_s += owed
        self._debt_s += owed
        if self._debt_s > (0.0 if settle else self._piece_s):
            start = self._clock()
            self._sleep(self._debt_s)
            # A sleep ends late; what was slept too long is taken off the next one.
            self._debt_s -= self._clock() - start
        self._seen = self._compute_clock()


def _install(model: nn.Module, pacer: _Pacer) -> Iterator[RemovableHandle]:
    """Hook every module that holds parameters, and the whole model."""
    backward = _BackwardWatch(pacer)

    def before_model(_: nn.Module, __: Any) -> None:
        backward.reset()
        pacer.begin()

    def after_model(_: nn.Module, __: Any, output: Any) -> None:
        pacer.tick(settle=True)
        backward.watch(output)

    def after_layer(_: nn.Module, __: Any, output: Any) -> None:
        pacer.tick()
        backward.watch(output)

    yield model.register_forward_pre_hook(before_model)
    for module in model.modules():
        if module is not model and module._parameters:
            yield module.register_forward_hook(after_layer)
    yield model.register_forward_hook(after_model)


class _BackwardWatch:
    """Ticks whenever the gradient of a watched output is known, and once more when backward is through.

    Hooks on the outputs are used, not full backward hooks: those put nodes into the graph that models with
    in-place operations refuse.
    """

    def __init__(self, pacer: _Pacer) -> None:
        self._pacer = pacer
        self._waiting = False

    def reset(self) -> None:
        """Forget a backward pass that never came to its end."""
        self._waiting = False

    def watch(self, output: Any) -> None:
        """Hook every differentiable tensor of a module's output."""
        for tensor in _differentiable(output):
            tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, _: torch.Tensor) -> None:
        if not self._waiting:
            # Queued from inside backward and first in line, so that it runs before gradients are reduced.
            torch.autograd.Variable._execution_engine.queue_callback(self._on_end)
            self._waiting = True
        self._pacer.tick()

    def _on_end(self) -> None:
        self._waiting = False
        self._pacer.tick(settle=True)


def _differentiable(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _differentiable(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _differentiable(item)
