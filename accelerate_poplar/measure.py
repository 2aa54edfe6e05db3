"""Measure every rank: time per micro-batch without collectives, what fits, and the collectives on their own."""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .allocations import AllocationCounter
from .borrow import borrowed
from .collectives import CollectiveTimes, stage_times, synchronize, time_collectives, time_optimizer
from .comm import Ranks, agree, together
from .device import DeviceFacts, device_facts, peak_flops
from .emulation import Emulation
from .errors import ProfileError
from .memory import (
    DTYPE_NAMES,
    ActivationMemory,
    LossFunction,
    MakeBatch,
    ModelSize,
    ModelStates,
    PredictionUnavailableError,
    map_tensors,
    model_size,
    model_states,
    predict_activations,
)
from .points import PointPicker
from .profiles import ClusterProfile, Measurement, RankProfile, StageProfile

_FEWEST_REPEATS = 3
_MOST_REPEATS = 9
_MEMORY_CHECK_SIZES = (1, 2)
"""Small sizes at which the predicted memory is compared with the real one."""
_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")

Clock = Callable[[], float]
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Where one rank's largest micro-batch comes from."""

    budget_bytes: int
    """What training may use: `memory_fraction` of the free memory."""
    one_sample_bytes: int
    """Activations of one sample."""
    per_sample_bytes: int
    """Activations of each further sample."""
    measured_correction: float
    """Measured over predicted activations at the largest size compared; 1 when nothing was compared."""
    states: dict[int, ModelStates]
    """Training state by ZeRO stage."""


@dataclass(frozen=True, kw_only=True)
class MeasuredProfile(ClusterProfile):
    """A `ClusterProfile` fresh from the devices, with what explains its limits; its JSON form is the plain one."""

    memory: tuple[RankMemory, ...] = ()
    """One entry per rank, in rank order."""
    timed_micro_steps: tuple[int, ...] = ()
    """How many micro-steps each rank timed, warm-ups included."""
    seconds: float = 0.0
    """How long profiling took on the slowest rank."""


@dataclass(kw_only=True)
class _RankReport:
    """What one rank tells the others."""

    facts: DeviceFacts
    memory_bytes: int
    memory: RankMemory
    caps: dict[int, int]
    step_overhead_s: float
    points: tuple[Measurement, ...] = ()
    timed_micro_steps: int = 0
    seconds: float = 0.0
    emulated: bool = False


def profile_cluster(
    *,
    model: nn.Module,
    loss_fn: LossFunction,
    make_batch: MakeBatch,
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
    zero_stages: Sequence[int],
    largest_micro_batch: int,
    user_caps: Sequence[int] | None,
    memory_fraction: float,
    optimizer_bytes_per_parameter: float | None = None,
    budget_s: float,
    relative_error: float,
    model_name: str,
    seq_len: int,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
    emulation: Emulation | None = None,
) -> MeasuredProfile:
    """Profile all ranks at the same time; every rank must call it and gets the same profile.

    The model, its gradients and every random number generator are as before afterwards.

    Args:
        model: Before DeepSpeed wraps it; on any device, also initialised by ZeRO-3.
        loss_fn: `loss_fn(model, batch)` -> scalar loss, by the path that training takes.
        make_batch: Size -> collated batch on the host, of the longest rows the data can produce.
        ranks: The other ranks.
        device: Where this rank trains.
        dtype: Compute dtype DeepSpeed will use: fp32, bf16 or fp16.
        zero_stages: ZeRO stages to find limits and communication times for.
        largest_micro_batch: Nothing larger is probed, in samples.
        user_caps: Largest micro-batch by hand, one per rank; None = no such cap.
        memory_fraction: Share of this rank's free memory that may be used, above 0 up to 1.
        optimizer_bytes_per_parameter: Optimizer state incl. fp32 master copy; None = AdamW.
        budget_s: Seconds after which this rank starts no further size.
        relative_error: Wanted error of the step-time curve.
        model_name: Label for the profile.
        seq_len: Tokens per sample; 0 when samples are not token rows.
        progress: Told what is being measured, on every rank.
        clock: Seconds of real time.
        emulation: What this rank pretends to be.

    Returns:
        The profile; a rank that cannot hold one sample at a stage has 0 there, see `explain_memory`.

    Raises:
        ProfileError: The model cannot be run at all on this rank.
        RankError: It cannot on another rank, which is named, or a rank is gone.
    """
    agree(ranks, (tuple(zero_stages), DTYPE_NAMES[dtype], largest_micro_batch), "what to profile")
    hosts = ranks.gather(device_facts(device).host)
    prober = RankProber(
        model=model,
        loss_fn=loss_fn,
        make_batch=make_batch,
        ranks=ranks,
        device=device,
        dtype=dtype,
        zero_stages=tuple(zero_stages),
        largest=min([largest_micro_batch, *([user_caps[ranks.rank]] if user_caps else [])]),
        memory_fraction=memory_fraction,
        optimizer_bytes_per_parameter=optimizer_bytes_per_parameter,
        ranks_on_host=hosts.count(hosts[ranks.rank]),
        budget_s=budget_s,
        relative_error=relative_error,
        progress=progress or (lambda text: None),
        clock=clock,
        emulation=emulation,
    )
    with borrowed(model, device, dtype):
        report = together(ranks, prober.run)
    _free(device)
    size = model_size(model)
    collectives = time_collectives(size, ranks=ranks, device=device, dtype=dtype, clock=clock)
    reports = ranks.gather(report)
    return MeasuredProfile(
        model=model_name,
        num_parameters=size.total,
        seq_len=seq_len,
        dtype=DTYPE_NAMES[dtype],
        ranks=tuple(_rank_profile(rank, r, dtype) for rank, r in enumerate(reports)),
        zero_stages={s: _stage_profile(s, reports, collectives, ranks.world_size) for s in zero_stages},
        emulated=any(r.emulated for r in reports),
        memory=tuple(r.memory for r in reports),
        timed_micro_steps=tuple(r.timed_micro_steps for r in reports),
        seconds=max(r.seconds for r in reports),
    )


def explain_memory(profile: MeasuredProfile, zero_stage: int) -> str:
    """One sentence per rank that cannot hold a single sample at a stage: bytes needed, bytes had, what would help.

    Returns:
        The sentences, one a line; empty when every rank can.
    """
    lines = []
    for rank, cap in enumerate(profile.stage(zero_stage).max_micro_batch_size):
        if cap > 0:
            continue
        memory = profile.memory[rank]
        states = memory.states[zero_stage]
        needed = states.total + memory.one_sample_bytes
        lines.append(
            f"rank {rank} ({profile.ranks[rank].device}): ZeRO stage {zero_stage} with one sample needs "
            f"{_gib(needed)} ({_gib(states.parameters)} parameters, {_gib(states.gradients)} gradients, "
            f"{_gib(states.optimizer)} optimizer, {_gib(memory.one_sample_bytes)} activations), but "
            f"{_gib(memory.budget_bytes)} may be used. What helps: {_remedies(zero_stage)}."
        )
    return "\n".join(lines)


def _remedies(zero_stage: int) -> str:
    higher = "a higher ZeRO stage, " if zero_stage < 3 else ""
    return f"{higher}gradient checkpointing, shorter sequences, optimizer offload, or leaving this rank out"


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


@dataclass(kw_only=True)
class RankProber:
    """Measures one rank; its model is borrowed already."""

    model: nn.Module
    loss_fn: LossFunction
    make_batch: MakeBatch
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    zero_stages: tuple[int, ...]
    largest: int
    memory_fraction: float
    optimizer_bytes_per_parameter: float | None
    ranks_on_host: int
    budget_s: float
    relative_error: float
    progress: Progress
    clock: Clock
    emulation: Emulation | None
    _real_activations: dict[int, int] = field(default_factory=dict)
    _micro_steps: int = 0
    _proven_cap: int = sys.maxsize

    def run(self) -> _RankReport:
        """Predict memory, time the sizes that fit, and report."""
        start = self.clock()
        facts = device_facts(self.device)
        total, free = self._memory_of(facts)
        size = model_size(self.model)
        states = {stage: self._states(size, stage) for stage in self.zero_stages}
        budget = int(self.memory_fraction * free)
        activations = self._predict()
        self._report_progress("memory")
        picker = PointPicker(largest=0, relative_error=self.relative_error)
        points: tuple[Measurement, ...] = ()
        correction = 1.0
        gradients = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        own = gradients + sum(t.numel() * t.element_size() for t in self.model.parameters())
        with self._emulated():
            if activations is None:
                activations = self._measure_activations()
            picker.largest = activations.largest_within(budget - own, self.largest)
            if picker.largest:
                activations, correction = self._correct(activations, picker)
                picker.lower_cap(activations.largest_within(budget - own, self.largest))
                points = self._time_sizes(picker, start, own, activations)
        caps = {
            stage: activations.largest_within(budget - held.total, min(self.largest, self._proven_cap))
            for stage, held in states.items()
        }
        return _RankReport(
            facts=facts,
            memory_bytes=total,
            memory=RankMemory(
                budget_bytes=budget,
                one_sample_bytes=activations.at(1),
                per_sample_bytes=round(activations.slope),
                measured_correction=correction,
                states=states,
            ),
            caps=caps,
            step_overhead_s=time_optimizer(
                size.trainable // self.ranks.world_size, device=self.device, clock=self.clock
            ),
            points=points,
            timed_micro_steps=self._micro_steps,
            seconds=self.clock() - start,
            emulated=self.emulation is not None
            and (self.emulation.slowdown != 1.0 or self.emulation.memory_bytes is not None),
        )

    def _memory_of(self, facts: DeviceFacts) -> tuple[int, int]:
        """Total and free bytes that this rank can call its own."""
        if self.emulation is not None and self.emulation.memory_bytes is not None:
            return self.emulation.memory_bytes, self.emulation.memory_bytes
        if self.device.type == "cpu":
            return facts.memory_bytes // self.ranks_on_host, facts.free_bytes // self.ranks_on_host
        return facts.memory_bytes, facts.free_bytes

    def _states(self, size: ModelSize, stage: int) -> ModelStates:
        return model_states(
            size,
            dtype=self.dtype,
            zero_stage=stage,
            world_size=self.ranks.world_size,
            optimizer_bytes_per_parameter=self.optimizer_bytes_per_parameter,
        )

    def _report_progress(self, what: str) -> None:
        self.progress(f"rank {self.ranks.rank}/{self.ranks.world_size}: {what}")

    def _predict(self) -> ActivationMemory | None:
        try:
            return predict_activations(
                self.model,
                self.loss_fn,
                self.make_batch,
                device=self.device,
                dtype=self.dtype,
                sizes=[size for size in (1, 2, 4) if size <= max(self.largest, 1)],
            )
        except PredictionUnavailableError:
            return None

    @contextlib.contextmanager
    def _emulated(self) -> Iterator[None]:
        if self.emulation is None:
            yield
            return
        with self.emulation.attach(self.model):
            try:
                yield
            finally:
                self.emulation.forget_memory()

    def _micro_step(self, batch: object) -> None:
        """One forward and backward pass; raises `torch.OutOfMemoryError` whatever the allocator calls it."""
        self._micro_steps += 1
        parameters = list(self.model.parameters())
        held = sum(p.numel() * p.element_size() for p in parameters)
        cap = self.emulation.memory_cap(held, known=parameters) if self.emulation else contextlib.nullcontext()
        try:
            with cap:
                loss = self.loss_fn(self.model, map_tensors(batch, lambda t: t.to(self.device)))
                loss.backward()  # type: ignore[no-untyped-call]
            synchronize(self.device)
        except (RuntimeError, MemoryError) as problem:
            if is_out_of_memory(problem):
                raise torch.OutOfMemoryError(str(problem)) from None
            raise

    def _measure_activations(self) -> ActivationMemory:
        """Activation memory where it cannot be predicted: from the smallest sizes, as far as they fit."""
        for size in (1, 2, 4):
            if size > self.largest or not self._measure_memory(size):
                break
        if not self._real_activations:
            return ActivationMemory(one_sample=float("inf"), intercept=0.0, slope=0.0)
        return ActivationMemory.fit(self._real_activations)

    def _measure_memory(self, size: int) -> bool:
        """Run one micro-batch and record the bytes it needed; False when it did not fit."""
        try:
            batch = self.make_batch(size)
            self._micro_step(batch)
            self._real_activations[size] = self._peak_of(batch)
        except torch.OutOfMemoryError:
            self._drop_gradients()
            return False
        return True

    def _peak_of(self, batch: object) -> int:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self._micro_step(batch)
            return torch.cuda.max_memory_allocated(self.device) - before
        counter = AllocationCounter(device_type=self.device.type)
        counter.know(self._held_tensors(), count=False)
        with counter:
            self._micro_step(batch)
        return counter.peak_bytes

    def _held_tensors(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        return [*parameters, *(p.grad for p in parameters if p.grad is not None), *self.model.buffers()]

    def _correct(self, activations: ActivationMemory, picker: PointPicker) -> tuple[ActivationMemory, float]:
        """Scale the prediction by what two small sizes really needed."""
        for size in _MEMORY_CHECK_SIZES:
            if size > picker.largest or size in self._real_activations:
                continue
            self._report_progress(f"memory of micro-batch {size}")
            if not self._measure_memory(size):
                picker.lower_cap(size - 1)
                self._proven_cap = size - 1
                break
        if not self._real_activations:
            return activations, 1.0
        largest = max(self._real_activations)
        predicted = activations.at(largest)
        correction = self._real_activations[largest] / predicted if predicted else 1.0
        return activations.scaled(correction), correction

    def _time_sizes(
        self, picker: PointPicker, start: float, own_bytes: int, activations: ActivationMemory
    ) -> tuple[Measurement, ...]:
        points: dict[int, Measurement] = {}
        while (size := picker.ask()) is not None:
            if points and self.clock() - start > self.budget_s:
                break
            self._report_progress(f"micro-batch {size}")
            try:
                seconds = self._time(size)
            except torch.OutOfMemoryError:
                self._drop_gradients()
                good = max((s for s in points if s < size), default=0)
                picker.lower_cap((good + size) // 2 if size - good > 1 else good)
                self._proven_cap = picker.largest
                continue
            picker.tell(size, seconds)
            points[size] = Measurement(
                micro_batch_size=size, step_time_s=seconds, peak_memory_bytes=own_bytes + activations.at(size)
            )
        return tuple(points[size] for size in sorted(points))

    def _time(self, size: int) -> float:
        """Median seconds of a micro-batch, after a warm-up; more repeats while they disagree."""
        batch = self.make_batch(size)
        self._micro_step(batch)
        seconds: list[float] = []
        while len(seconds) < _MOST_REPEATS:
            begin = self.clock()
            self._micro_step(batch)
            seconds.append(self.clock() - begin)
            if len(seconds) >= _FEWEST_REPEATS and _spread(seconds) <= self.relative_error:
                break
        return statistics.median(seconds)

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        if self.emulation is not None:
            self.emulation.forget_memory()
        _free(self.device)


def is_out_of_memory(problem: BaseException) -> bool:
    """True for every form in which torch reports that memory ran out."""
    if isinstance(problem, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(problem, RuntimeError) and any(text in str(problem).lower() for text in _OUT_OF_MEMORY_TEXTS)


def _spread(seconds: Sequence[float]) -> float:
    """Standard error of the median, relative to it, from the median absolute deviation."""
    middle = statistics.median(seconds)
    deviation = statistics.median(abs(s - middle) for s in seconds)
    return 1.4826 * deviation / middle / len(seconds) ** 0.5 if middle > 0 else 0.0


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _rank_profile(rank: int, report: _RankReport, dtype: torch.dtype) -> RankProfile:
    if not report.points and any(report.caps.values()):
        raise ProfileError(f"rank {rank}: no micro-batch could be timed although one sample should fit.")
    return RankProfile(
        rank=rank,
        host=report.facts.host,
        device=report.facts.device,
        memory_bytes=report.memory_bytes,
        peak_flops=peak_flops(report.facts.device, dtype),
        step_overhead_s=report.step_overhead_s,
        points=report.points,
    )


def _stage_profile(
    zero_stage: int, reports: Sequence[_RankReport], collectives: CollectiveTimes, world_size: int
) -> StageProfile:
    times = stage_times(collectives, zero_stage)
    per_step_s = times.per_step_s
    if zero_stage == 0:
        # A rank's overhead is that of its shard of the optimizer; stage 0 steps all parameters on every rank.
        per_step_s += (world_size - 1) * max(r.step_overhead_s for r in reports)
    return StageProfile(
        max_micro_batch_size=tuple(r.caps[zero_stage] for r in reports),
        per_micro_step_s=times.per_micro_step_s,
        per_step_s=per_step_s,
        overlap=times.overlap,
    )
