"""One rank's micro-steps: timed, weighed, and caught when memory runs out."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .allocations import AllocationCounter
from .device import synchronize
from .emulation import Emulation
from .memory import LossFunction, MakeBatch, on_training_device
from .points import PointPicker

_FEWEST_REPEATS = 3
_MOST_REPEATS = 9
_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")

Clock = Callable[[], float]


@dataclass(kw_only=True)
class MicroStepper:
    """Runs forward and backward passes of a model that is on its device already."""

    model: nn.Module
    """Borrowed; its gradients are worked with freely."""
    loss_fn: LossFunction
    """`loss_fn(model, batch)` -> scalar loss."""
    make_batch: MakeBatch
    """Size -> batch on the host."""
    device: torch.device
    """Where the model is."""
    dtype: torch.dtype
    """Compute dtype of the model."""
    clock: Clock
    """Seconds of real time."""
    emulation: Emulation | None = None
    """What the rank pretends to be; its hooks are attached by the caller."""
    micro_steps: int = field(default=0, init=False)
    """Micro-steps run so far, warm-ups included."""

    def time(self, micro_batch_size: int, *, relative_error: float) -> tuple[float, float]:
        """Median seconds of a micro-batch after a warm-up, repeated while the repeats disagree.

        Args:
            micro_batch_size: Samples.
            relative_error: Enough when the median's standard error is within this share of it.

        Returns:
            Seconds, and the relative standard error that was reached.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        batch = self._batch(micro_batch_size)
        self._run(batch)
        seconds: list[float] = []
        while len(seconds) < _MOST_REPEATS:
            begin = self.clock()
            self._run(batch)
            seconds.append(self.clock() - begin)
            if len(seconds) >= _FEWEST_REPEATS and _standard_error(seconds) <= relative_error:
                break
        return statistics.median(seconds), _standard_error(seconds)

    def activation_bytes(self, micro_batch_size: int) -> int:
        """Bytes a micro-batch really needs on top of parameters, gradients and buffers.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        batch = self._batch(micro_batch_size)
        self._run(batch)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self._run(batch)
            return torch.cuda.max_memory_allocated(self.device) - before
        counter = AllocationCounter(device_type=self.device.type)
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        counter.know([*parameters, *gradients, *self.model.buffers()], count=False)
        with counter:
            self._run(batch)
        return counter.peak_bytes

    def recover(self) -> None:
        """After memory ran out: let go of everything that is not the model."""
        for parameter in self.model.parameters():
            parameter.grad = None
        if self.emulation is not None:
            self.emulation.forget_memory()
        free_memory(self.device)

    def _batch(self, micro_batch_size: int) -> Any:
        return self.make_batch(micro_batch_size)

    def _run(self, batch: Any) -> None:
        self.micro_steps += 1
        parameters = list(self.model.parameters())
        held = sum(p.numel() * p.element_size() for p in parameters)
        cap = self.emulation.memory_cap(held, known=parameters) if self.emulation else contextlib.nullcontext()
        try:
            with cap:
                loss = self.loss_fn(self.model, on_training_device(batch, self.device, self.dtype))
                loss.backward()  # type: ignore[no-untyped-call]
            synchronize(self.device)
        except (RuntimeError, MemoryError) as problem:
            if is_out_of_memory(problem):
                raise torch.OutOfMemoryError(str(problem)) from None
            raise


@dataclass(kw_only=True)
class TimedSizes:
    """What came of timing one size after the other."""

    seconds: dict[int, float] = field(default_factory=dict)
    """Median seconds by micro-batch size."""
    proven_cap: int | None = None
    """Largest size left after memory ran out in spite of the prediction; None when it never did."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Sizes that failed for another reason, and why."""


def time_sizes(
    time_one: Callable[[int], tuple[float, float]],
    picker: PointPicker,
    *,
    out_of_time: Callable[[], bool],
    recover: Callable[[], None],
    progress: Callable[[str], None],
) -> TimedSizes:
    """Time the sizes the picker asks for until it is content or time is up; the first size is always timed.

    Running out of memory lowers the picker's largest size half-way to the largest that fits. A size that fails for
    another reason is skipped, unless nothing else has worked.

    Args:
        time_one: Size -> seconds and their relative standard error.
        picker: Chooses the sizes.
        out_of_time: True when no further size may be started.
        recover: Called after memory ran out.
        progress: Told which size is next.

    Raises:
        RuntimeError: The first size failed, and not for lack of memory.
    """
    result = TimedSizes()
    while (size := picker.ask()) is not None:
        if result.seconds and out_of_time():
            break
        progress(f"micro-batch {size}")
        try:
            seconds, noise = time_one(size)
        except torch.OutOfMemoryError:
            recover()
            fits = max((s for s in result.seconds if s < size), default=0)
            picker.lower_cap((fits + size) // 2 if size - fits > 1 else fits)
            result.proven_cap = picker.largest
            continue
        except RuntimeError as problem:
            if not result.seconds:
                raise
            recover()
            result.skipped[size] = str(problem)
            picker.skip(size)
            continue
        picker.tell(size, seconds, noise)
        result.seconds[size] = seconds
    return result


def is_out_of_memory(problem: BaseException) -> bool:
    """True for every form in which torch reports that memory ran out."""
    if isinstance(problem, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(problem, RuntimeError) and any(text in str(problem).lower() for text in _OUT_OF_MEMORY_TEXTS)


def free_memory(device: torch.device) -> None:
    """Give what is not in use back to the device, so that others can have it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _standard_error(seconds: Sequence[float]) -> float:
    """Standard error of the median relative to it, estimated from the median absolute deviation."""
    middle = statistics.median(seconds)
    deviation = statistics.median(abs(s - middle) for s in seconds)
    return 1.4826 * deviation / middle / len(seconds) ** 0.5 if middle > 0 else 0.0
