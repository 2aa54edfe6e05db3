"""One rank's micro-steps: timed, weighed, and caught when memory runs out."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from .allocations import AllocationCounter
from .device import synchronize
from .emulation import Emulation
from .memory import LossFunction, MakeBatch, on_training_device
from .points import PointPicker
from .steady import standard_error

_FIRST_REPEATS = 2
"""Timed repeats when a size is met for the first time."""
_ROUNDS = 3
"""Later rounds through all sizes, one repeat each."""
_MOST_REPEATS = 15
_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")

SIZE_FAILURES = (RuntimeError, ValueError)
"""What a size that a model or a kernel cannot run raises."""

_SHORTEST_REPEATS = 7
"""Timed repeats of one of the shortest rows, which take next to no time."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class ShortestRow:
    """A micro-batch of one of the shortest rows: nearly all it takes is what any micro-step takes, however little is in it."""

    tokens: int
    """Of the row."""
    step_time_s: float
    """Seconds of forward and backward."""


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
    compile_options: Mapping[str, Any] | None = None
    """How training will compile the model (`torch.compile`); None = not at all."""
    _runs: nn.Module = field(init=False)
    micro_steps: int = field(default=0, init=False)
    """Micro-steps run so far, warm-ups included."""

    def __post_init__(self) -> None:
        """Compile as training will; the first run of each size, which compiles for it, is never timed."""
        options = self.compile_options
        self._runs = self.model if options is None else torch.compile(self.model, **options)

    def time(self, micro_batch_size: int, *, warm: bool = False) -> list[float]:
        """Seconds of a few repeats of one micro-batch.

        Args:
            micro_batch_size: Samples.
            warm: True: this size has been timed before, one repeat without a warm-up is enough.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        batch = self.make_batch(micro_batch_size)
        if not warm:
            self._run(batch)
        return [self._timed(batch) for _ in range(1 if warm else _FIRST_REPEATS)]

    def time_shortest(self, batch: Any) -> list[float]:
        """Seconds of a few repeats of a batch of one of the shortest rows; none where the model cannot run it."""
        try:
            self._run(batch)
            return [self._timed(batch) for _ in range(_SHORTEST_REPEATS)]
        except SIZE_FAILURES:
            self.recover()
            return []

    def activation_bytes(self, micro_batch_size: int) -> int:
        """Bytes a micro-batch really needs on top of parameters, gradients and buffers.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        batch = self.make_batch(micro_batch_size)
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

    def _timed(self, batch: Any) -> float:
        start = self.clock()
        self._run(batch)
        return self.clock() - start

    def _run(self, batch: Any) -> None:
        self.micro_steps += 1
        parameters = list(self.model.parameters())
        held = sum(p.numel() * p.element_size() for p in parameters)
        cap = self.emulation.memory_cap(held, known=parameters) if self.emulation else contextlib.nullcontext()
        try:
            with cap:
                loss = self.loss_fn(self._runs, on_training_device(batch, self.device, self.dtype))
                loss.backward()  # type: ignore[no-untyped-call]
            synchronize(self.device)
        except (RuntimeError, MemoryError) as problem:
            if is_out_of_memory(problem):
                raise torch.OutOfMemoryError(str(problem)) from None
            raise


@dataclass(kw_only=True)
class TimedSizes:
    """What came of timing one size after the other."""

    repeats: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of every repeat, by micro-batch size."""
    proven_cap: int | None = None
    """Largest size left after memory ran out in spite of the prediction; None when it never did."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Sizes that failed for another reason, and why."""
    summary: Callable[[Sequence[float]], float] = statistics.median
    """What stands for the repeats of one size."""
    shortest: list[float] = field(default_factory=list)
    """Seconds of every repeat of one of the shortest rows; empty where rows are alike."""

    @property
    def seconds(self) -> dict[int, float]:
        """The summary by micro-batch size, in increasing order of size."""
        return {size: self.summary(self.repeats[size]) for size in sorted(self.repeats)}

    @property
    def fresh(self) -> list[int]:
        """Sizes that have not been through all rounds, in increasing order."""
        return sorted(size for size, repeats in self.repeats.items() if len(repeats) < _FIRST_REPEATS + _ROUNDS)

    @property
    def unrepeated(self) -> list[int]:
        """Sizes that time ran out for right after they had been met, in increasing order."""
        return sorted(size for size, repeats in self.repeats.items() if len(repeats) == _FIRST_REPEATS)

    def doubtful(self, relative_error: float) -> list[int]:
        """Sizes whose repeats disagree, or that are faster than a smaller size, in increasing order."""
        found = {size for size, repeats in self.repeats.items() if standard_error(repeats) > relative_error}
        for (small, fast), (large, slow) in itertools.pairwise(self.seconds.items()):
            if slow < fast:
                found |= {small, large}
        return sorted(size for size in found if len(self.repeats[size]) < _MOST_REPEATS)


class Timer(Protocol):
    """Times one size; `MicroStepper.time` is the real one."""

    def __call__(self, micro_batch_size: int, *, warm: bool = False) -> list[float]:
        """Seconds of every repeat."""


def time_sizes(
    timer: Timer,
    picker: PointPicker,
    *,
    relative_error: float,
    out_of_time: Callable[[], bool],
    recover: Callable[[], None],
    progress: Callable[[str], None],
    summary: Callable[[Sequence[float]], float] = statistics.median,
) -> TimedSizes:
    """Time the sizes the picker asks for, then all in rounds, then those in doubt, until time is up.

    One size is timed in any case. Repeats are spread over rounds through all sizes, so that a spell of other load on
    the host does not fall on one size alone: a plan would take such a size for a fast or a slow one.

    Running out of memory lowers the picker's largest size half-way to the largest that fits. A size that fails for
    another reason is skipped, unless the first two fail.

    Args:
        timer: Times one size.
        picker: Chooses the sizes.
        relative_error: Standard error of a median that is good enough.
        out_of_time: True when nothing more may be started.
        recover: Called after a size failed.
        progress: Told which size is next.
        summary: What stands for the repeats of one size.

    Raises:
        RuntimeError, ValueError: The first two sizes failed, and not for lack of memory.
    """
    timing = _Timing(timer, picker, out_of_time, recover, progress, TimedSizes(summary=summary))
    timing.run(relative_error)
    return timing.result


@dataclass
class _Timing:
    """One `time_sizes` on its way."""

    timer: Timer
    picker: PointPicker
    out_of_time: Callable[[], bool]
    recover: Callable[[], None]
    progress: Callable[[str], None]
    result: TimedSizes

    def run(self, relative_error: float) -> None:
        """Until all is known, or time is up."""
        result = self.result
        while True:
            size = self.picker.ask()
            # Sizes between others are chosen by what all rounds say of their neighbours.
            if result.fresh and (size is None or size < max(result.repeats)):
                if not self._round(result.fresh):
                    return
            elif size is None:
                break
            elif result.repeats and self.out_of_time():
                return
            else:
                self._first_time(size)
        while (doubtful := result.doubtful(relative_error)) and self._round(doubtful):
            pass

    def _first_time(self, size: int) -> None:
        result = self.result
        self.progress(f"micro-batch {size}")
        try:
            result.repeats[size] = self.timer(size)
        except torch.OutOfMemoryError:
            self.recover()
            fits = max((s for s in result.repeats if s < size), default=0)
            self.picker.lower_cap((fits + size) // 2 if size - fits > 1 else fits)
            result.proven_cap = self.picker.largest
        except SIZE_FAILURES as problem:
            # Batch normalisation, for one, refuses a single sample; two sizes that fail are the model's fault.
            if not result.repeats and result.skipped:
                raise
            self.recover()
            result.skipped[size] = f"{type(problem).__name__}: {problem}"
            self.picker.skip(size)
        else:
            self._tell(size)

    def _round(self, sizes: Sequence[int]) -> bool:
        """Time each of these sizes once more; False when time was up before the end."""
        for size in sizes:
            if self.out_of_time():
                return False
            self.progress(f"micro-batch {size} again")
            self.result.repeats[size] += self.timer(size, warm=True)
            self._tell(size)
        return True

    def _tell(self, size: int) -> None:
        repeats = self.result.repeats[size]
        self.picker.tell(size, self.result.summary(repeats), standard_error(repeats))


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
