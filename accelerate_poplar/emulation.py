"""Make a rank look slower or smaller than it is, for demos, tests and benchmarks on equal machines.

A slow rank sleeps for a multiple of its own compute time. Compute is read from the thread's processor time, which
stands still while the rank waits for its peers, so that waiting is never multiplied. The pauses are taken in small
pieces all through forward and backward: a single pause at the end would let the ranks' waits add up wherever they
meet inside a pass (ZeRO-3), and one after the step would be served rank after rank.

Figures taken under emulation are always called emulated.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .allocations import AllocationCounter
from .errors import ConfigError
from .inspection import num_elements, tensors_in

_SMALLEST_SLEEP_S = 2e-3
"""Shorter debts wait for more: a sleep ends some 60 microseconds late and leaves the processor cold."""
_SLEEPS_PER_PASS = 8
"""About how many pieces a pass is slowed in: more would leave the processor cold too often."""
_PASSES_IN_ONE_GO = 8
"""Passes of each size that run without a pause inside, to see what they take by themselves."""
_WARM_UP_PASSES = 3
"""The first of these, which also allocate memory for the first time."""
_PASSES_REMEMBERED = 8
"""Latest passes with pauses that the others are compared with."""
_SMALLEST_RATIO = 0.5
"""Pauses are never taken to have made compute more than twice as slow: beyond, something else slowed it."""
_LARGEST_LAG = 1.0
"""Passes that a rank may be behind and make up for later; what it is behind beyond is lost."""


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

    def expect(self, seconds: float | None) -> None:
        """Say how long the passes from here on take on the pretended device, forward and backward together.

        So a device that was profiled stays what the profile says, whatever else the machine does meanwhile.

        Args:
            seconds: As slow as the rank pretends to be; 0 = as fast as they can; None = as many times what such passes
                took when they were first seen as the rank is slowed.
        """
        self._pacer.expected_s = seconds

    def compute_time(self) -> float:
        """Seconds that the passes since some moment have taken on the pretended device, without waiting for others."""
        return self._pacer.paced_s()

    @contextlib.contextmanager
    def memory_cap(
        self,
        base_bytes: int = 0,
        *,
        device_type: str = "cpu",
        known: Iterable[torch.Tensor] = (),
        held: Iterable[torch.Tensor] = (),
    ) -> Iterator[None]:
        """Raise `torch.OutOfMemoryError` when live tensors exceed the emulated memory.

        One counter serves all uses, so that gradients kept from one micro-step to the next stay counted.

        Args:
            base_bytes: Training state that exists already, for example parameters.
            device_type: Kind of device whose tensors count.
            known: Tensors that `base_bytes` speaks of, so that their views are not counted as new.
            held: Tensors that exist already and that `base_bytes` does not speak of; each is counted once.
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
        self._counter.know(held, count=True)
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
    """Keeps the debt of sleep a rank owes for its compute.

    Compute between pauses is slower than compute in one go, since caches have gone cold, and on a machine that others
    share, or whose cores share a power limit, it is slower while the other ranks compute: multiplied as it is, it would
    make the pretended device's speed depend on what its peers do. The first passes of each size therefore run in one go
    and sleep at their end; later ones take, as on a device of its own, as many times what those took as was asked.
    """

    def __init__(
        self,
        slowdown: float,
        compute_clock: Callable[[], float],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._slowdown = slowdown
        self._compute_clock = compute_clock
        self._clock = clock
        self._sleep = sleep
        self._seen = 0.0
        self._debt_s = 0.0
        self._piece_s = _SMALLEST_SLEEP_S
        self.expected_s: float | None = None
        self._wanted_s: float | None = None
        self._sizes: dict[int, _PassTimes] = {}
        self._pass = _PassTimes()
        self._pass_s = 0.0
        self._pass_paced_s = 0.0
        self._rate = slowdown
        self._paced_s = 0.0
        self._in_one_go = False
        self._in_pass = False

    def paced_s(self) -> float:
        """Seconds of forward and backward as slow as the rank pretends to be, since some moment."""
        self._advance()
        return self._paced_s

    def begin(self, size: int) -> None:
        """A forward pass starts: what was computed before it is not part of it.

        Args:
            size: Elements of its input, by which passes of one size are known.
        """
        # A model may run forward twice before backward, and a backward pass may have failed.
        self._pay()
        self._pass = self._sizes.setdefault(size, _PassTimes())
        self._in_one_go = self.expected_s is None and len(self._pass.in_one_go_s) < _PASSES_IN_ONE_GO
        if self.expected_s is not None:
            self._wanted_s = self.expected_s
        else:
            self._wanted_s = None if self._in_one_go else self._slowdown * self._pass.typical_s
        self._rate = max(self._rate_of(size), 1.0)
        self._piece_s = max(_SMALLEST_SLEEP_S, (1.0 - 1.0 / self._rate) * (self._wanted_s or 0.0) / _SLEEPS_PER_PASS)
        self._pass_s = self._pass_paced_s = 0.0
        self._in_pass = True

    def tick(self, *, settle: bool = False) -> None:
        """Add the compute since the last tick to the debt, and sleep it off when it is worth it.

        Args:
            settle: Sleep off whatever is owed.
        """
        self._advance()
        if settle or (not self._in_one_go and self._debt_s > self._piece_s):
            self._pay()

    def forward_end(self, *, backward_follows: bool) -> None:
        """The forward pass is through."""
        self.tick(settle=not (self._in_one_go and backward_follows))
        self._in_pass = backward_follows

    def backward_end(self) -> None:
        """The backward pass is through, and what both took is known."""
        self._advance()
        if self._wanted_s is not None:
            # So far it was guessed how much compute was still to come.
            error_s = self._wanted_s - self._pass_paced_s
            self._paced_s += error_s
            self._debt_s = max(self._debt_s + error_s, -_LARGEST_LAG * self._wanted_s)
        self.tick(settle=True)
        self._in_pass = False
        (self._pass.in_one_go_s if self._in_one_go else self._pass.with_pauses_s).append(self._pass_s)

    def _advance(self) -> None:
        """Count the compute since the last call."""
        now = self._compute_clock()
        compute_s, self._seen = now - self._seen, now
        if self._in_pass:
            self._pass_s += compute_s
            self._paced_s += self._rate * compute_s
            self._pass_paced_s += self._rate * compute_s
            self._debt_s += (self._rate - 1.0) * compute_s

    def _pay(self) -> None:
        """Sleep for what is owed. A sleep ends late; what was slept too long is taken off the next one."""
        if self._debt_s > 0.0:
            start = self._clock()
            self._sleep(self._debt_s)
            self._debt_s -= self._clock() - start
        self._seen = self._compute_clock()

    def _rate_of(self, size: int) -> float:
        """Pretended over real seconds of the pass that begins, as far as passes before it tell."""
        if self._wanted_s is None:
            return self._slowdown
        if self._wanted_s == 0.0:
            return 1.0
        usual_s = self._pass.usual_with_pauses_s
        if usual_s is not None:
            return self._wanted_s / usual_s
        known = {other: times.ratio for other, times in self._sizes.items() if times.ratio is not None}
        if not known:
            return self._slowdown
        return self._slowdown * known[min(known, key=lambda other: abs(math.log(max(other, 1) / max(size, 1))))]


class _PassTimes:
    """Compute of the passes of one size, in seconds."""

    def __init__(self) -> None:
        self.in_one_go_s: list[float] = []
        self.with_pauses_s: deque[float] = deque(maxlen=_PASSES_REMEMBERED)

    @property
    def typical_s(self) -> float:
        """Median of the passes in one go that are warm; 0 before there are any."""
        return (
            statistics.median(self.in_one_go_s[_WARM_UP_PASSES:]) if len(self.in_one_go_s) > _WARM_UP_PASSES else 0.0
        )

    @property
    def usual_with_pauses_s(self) -> float | None:
        """Median of the latest passes with pauses; None while too few are known."""
        return max(statistics.median(self.with_pauses_s), 1e-9) if len(self.with_pauses_s) > 1 else None

    @property
    def ratio(self) -> float | None:
        """Compute in one go over compute with pauses; None while too few passes are known."""
        usual_s = self.usual_with_pauses_s
        if len(self.in_one_go_s) < _PASSES_IN_ONE_GO or usual_s is None:
            return None
        return min(max(self.typical_s / usual_s, _SMALLEST_RATIO), 1.0)


def _install(model: nn.Module, pacer: _Pacer) -> Iterator[RemovableHandle]:
    """Hook every module that holds parameters, and the whole model."""
    backward = _BackwardWatch(pacer)

    def before_model(_: nn.Module, args: Any, kwargs: Any) -> None:
        backward.reset()
        pacer.begin(num_elements((args, kwargs)))

    def after_model(_: nn.Module, __: Any, output: Any) -> None:
        pacer.forward_end(backward_follows=backward.watch(output))

    def after_layer(_: nn.Module, __: Any, output: Any) -> None:
        pacer.tick()
        backward.watch(output)

    yield model.register_forward_pre_hook(before_model, with_kwargs=True)
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

    def watch(self, output: Any) -> bool:
        """Hook every differentiable tensor of a module's output; True if there is one."""
        differentiable = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in differentiable:
            tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        return bool(differentiable)

    def _on_gradient(self, _: torch.Tensor) -> None:
        if not self._waiting:
            # Queued from inside backward and first in line, so that it runs before gradients are reduced.
            torch.autograd.Variable._execution_engine.queue_callback(self._on_end)
            self._waiting = True
        self._pacer.tick()

    def _on_end(self) -> None:
        self._waiting = False
        self._pacer.backward_end()
