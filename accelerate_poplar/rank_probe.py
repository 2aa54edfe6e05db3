"""Measure one rank: predict its memory, correct the prediction, time the sizes that fit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .blocks import Variant, combine, shortened, variants
from .borrow import on_device
from .collectives import time_optimizer
from .comm import Ranks, together
from .device import DeviceFacts
from .emulation import Emulation
from .errors import ProfileError
from .memory import ActivationMemory, LossFunction, MakeBatch, PredictionUnavailableError, predict_activations
from .model_state import ModelStates, ZeroSettings, model_size, model_states
from .points import PointPicker
from .probe import SIZE_FAILURES, MicroStepper, ShortestRow, TimedSizes, time_sizes
from .probe_data import sequence_length
from .profiles import Measurement
from .rank_memory import RankMemory
from .steady import steady_times

_PREDICTED_SIZES = (1, 2, 4)
_CHECKED_SIZES = (1, 2)
"""Small sizes at which the predicted memory is compared with the real one."""

Clock = Callable[[], float]
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank tells the others."""

    facts: DeviceFacts
    """The device."""
    memory: RankMemory
    """Known and needed memory."""
    caps: dict[int, int]
    """Largest micro-batch by ZeRO stage; 0 = none fits."""
    step_overhead_s: float
    """Seconds of the optimizer over this rank's shard."""
    points: tuple[Measurement, ...]
    """In increasing order of size; empty where nothing was timed."""
    skipped: dict[int, str]
    """Sizes that failed for another reason than memory, and why."""
    unrepeated: tuple[int, ...]
    """Sizes that the time allowed ended for right after they had been met."""
    shortest: ShortestRow | None
    """What a micro-batch of one of the shortest rows takes; None where rows are alike, or only parts of the model were timed."""
    micro_steps: int
    """Micro-steps run, warm-ups included."""
    slowdown: float
    """Emulated slowdown; 1 = none."""
    emulated: bool
    """True when the rank pretends to be slower or smaller than it is."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What to measure on this rank, and how well; see `profile_cluster` for the fields."""

    model: nn.Module
    """Before DeepSpeed wraps it."""
    loss_fn: LossFunction
    """`loss_fn(model, batch)` -> scalar loss."""
    make_batch: MakeBatch
    """Size -> batch on the host."""
    shortest: Any = None
    """Batch on the host of one of the shortest rows; None where rows are alike."""
    ranks: Ranks
    """The other ranks."""
    device: torch.device
    """Where this rank trains."""
    dtype: torch.dtype
    """Compute dtype."""
    zero_stages: tuple[int, ...]
    """Stages to find limits for."""
    largest: int
    """Largest micro-batch to try, in samples."""
    memory_fraction: float
    """Share of the free memory that may be used, above 0 up to 1."""
    optimizer_bytes_per_parameter: float | None
    """Optimizer state incl. fp32 master copy; None = AdamW."""
    relative_error: float
    """Wanted error of the step-time curve."""
    progress: Progress
    """Told what is being measured."""
    clock: Clock
    """Seconds of real time."""
    emulation: Emulation | None
    """What this rank pretends to be."""
    deepspeed_config: Mapping[str, Any] | None
    """The run's."""
    compile_options: Mapping[str, Any] | None = None
    """How training will compile the model; None = not at all."""
    uneven_state: bool = False
    """True: a rank may hold less than an even share of the training state, so that even shares do not decide whether it
    can take part."""
    all_slowed: bool = False
    """True where every rank is emulated slower than it is: the fastest repeat of a size is then what counts, since the
    pauses leave room for whatever else the machine does."""


@dataclass(kw_only=True)
class RankProber:
    """Measures one rank; used inside `undisturbed`."""

    request: ProfileRequest
    """What to measure."""
    facts: DeviceFacts
    """This rank's device."""
    ranks_on_host: int
    """Ranks that share the host's memory where the device is the CPU."""
    deadline: float
    """Reading of the clock after which no further size is started."""

    def run(self) -> RankReport:
        """Predict memory, time the sizes that fit, and report; every rank must call it together.

        Raises:
            ProfileError: The model does not fit on some device and has no repeated blocks to time one by one.
            RankError: The model cannot be run on another rank.
        """
        request, ranks = self.request, self.request.ranks
        device_bytes, budget = self._budget()
        states = self._states()
        request.progress("memory")
        predicted = together(ranks, self._predict)
        hopeless = predicted is not None and not self._can_take_part(predicted, states, budget)
        stepper = self._stepper()
        activations, correction, timed = predicted or ActivationMemory.unknown(), 1.0, TimedSizes()
        if not any(ranks.gather(hopeless)):
            room = budget - self._own_bytes()
            whole = room > 0 if predicted is None else predicted.at(1) <= room
            if all(ranks.gather(whole)):
                with on_device(request.model, request.device, request.dtype):
                    activations, correction, timed = together(
                        ranks,
                        lambda: self._measure_whole(stepper, predicted, room),
                        lambda found: self._time_again(stepper, found[-1]),
                    )
            else:
                activations, timed = self._measure_blocks(stepper, predicted, budget)
        return RankReport(
            facts=self.facts,
            memory=RankMemory(
                device_bytes=device_bytes,
                budget_bytes=budget,
                activations=activations,
                measured_correction=correction,
                states=states,
                proven_cap=timed.proven_cap,
            ),
            caps=self._caps(activations, states, budget, timed.proven_cap),
            step_overhead_s=self._optimizer_s(),
            points=self._points(steady_times(timed.seconds, timed.repeats), activations),
            skipped=timed.skipped,
            unrepeated=tuple(timed.unrepeated),
            shortest=self._shortest(timed),
            micro_steps=stepper.micro_steps,
            slowdown=self._slowdown,
            emulated=request.emulation is not None and request.emulation.active,
        )

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _budget(self) -> tuple[int, int]:
        """The device's memory and what this rank may use of it."""
        request, facts = self.request, self.facts
        if request.emulation is not None and request.emulation.memory_bytes is not None:
            total = free = request.emulation.memory_bytes
        elif request.device.type == "cpu":
            total, free = facts.memory_bytes // self.ranks_on_host, facts.free_bytes // self.ranks_on_host
        else:
            # What the model takes there already is part of what training will take.
            here = sum(p.numel() * p.element_size() for p in request.model.parameters() if p.device == request.device)
            total, free = facts.memory_bytes, facts.free_bytes + here
        return total, int(request.memory_fraction * free)

    def _states(self) -> dict[int, ModelStates]:
        request = self.request
        size, settings = model_size(request.model), ZeroSettings.from_config(request.deepspeed_config)
        return {
            stage: model_states(
                size,
                dtype=request.dtype,
                zero_stage=stage,
                world_size=request.ranks.world_size,
                optimizer_bytes_per_parameter=request.optimizer_bytes_per_parameter,
                settings=settings,
            )
            for stage in request.zero_stages
        }

    def _predict(self) -> ActivationMemory | None:
        request = self.request
        sizes = [size for size in _PREDICTED_SIZES if size <= max(request.largest, 1)]
        try:
            return predict_activations(
                request.model,
                request.loss_fn,
                request.make_batch,
                device=request.device,
                dtype=request.dtype,
                sizes=sizes,
            )
        except PredictionUnavailableError:
            return None

    def _own_bytes(self) -> int:
        """Parameters and gradients of the model as it is now, in the compute dtype."""
        size = model_size(self.request.model)
        return (size.total + size.trainable) * torch.empty((), dtype=self.request.dtype).element_size()

    def _can_take_part(self, predicted: ActivationMemory, states: Mapping[int, ModelStates], budget: int) -> bool:
        """Whether one sample fits at some stage; with uneven shares, beside no share of what the stage shards."""
        if any(self._caps(predicted, states, budget, None).values()):
            return True
        return self.request.uneven_state and any(
            held.unsharded(stage) + max(predicted.at(1), held.reduction) <= budget
            for stage, held in states.items()
            if stage > 0
        )

    def _caps(
        self,
        activations: ActivationMemory,
        states: Mapping[int, ModelStates],
        budget: int,
        proven_cap: int | None,
    ) -> dict[int, int]:
        largest = self.request.largest
        ceiling = largest if proven_cap is None else min(largest, proven_cap)
        return {
            stage: activations.largest_within(budget - held.total, ceiling)
            if max(held.at_reduction, held.at_step) <= budget
            else 0
            for stage, held in states.items()
        }

    # ---- time -----------------------------------------------------------------------------------------------------

    def _measure_whole(
        self, stepper: MicroStepper, predicted: ActivationMemory | None, room: int
    ) -> tuple[ActivationMemory, float, TimedSizes]:
        """Compare predicted with real memory at small sizes, then time the sizes that fit."""
        real, proven_cap = self._real_activations(stepper, predicted, room)
        activations, correction = _reconcile(predicted, real)
        largest = activations.largest_within(room, self.request.largest if proven_cap is None else proven_cap)
        timed = self._time_sizes(stepper, largest)
        if self.request.shortest is not None:
            self.request.progress("a short row")
            timed.shortest = stepper.time_shortest(self.request.shortest)
        if timed.proven_cap is None:
            timed.proven_cap = proven_cap
        return activations, correction, timed

    def _real_activations(
        self, stepper: MicroStepper, predicted: ActivationMemory | None, room: int
    ) -> tuple[dict[int, int], int | None]:
        real: dict[int, int] = {}
        for size in _PREDICTED_SIZES if predicted is None else _CHECKED_SIZES:
            if size > self.request.largest or (predicted is not None and predicted.at(size) > room):
                break
            self.request.progress(f"memory of micro-batch {size}")
            try:
                real[size] = stepper.activation_bytes(size)
            except torch.OutOfMemoryError:
                stepper.recover()
                return real, size - 1
            except SIZE_FAILURES:
                # Timing meets it again and decides whether the size or the model is at fault.
                stepper.recover()
        return real, None

    def _measure_blocks(
        self, stepper: MicroStepper, predicted: ActivationMemory | None, budget: int
    ) -> tuple[ActivationMemory, TimedSizes]:
        """Time the model in shortened forms; all ranks take the same ones."""
        forms = variants(self.request.model)
        if not forms:
            raise ProfileError(
                "the model does not fit on every rank's device without ZeRO, and has no repeated blocks that could be "
                "timed one by one. Set per_rank_micro_batch_sizes by hand, or leave the smallest ranks out."
            )
        request = self.request
        results: list[tuple[dict[int, int], TimedSizes]] = []
        for form in forms:
            sizes = tuple(results[0][1].seconds) if results else None
            with shortened(form), on_device(request.model, request.device, request.dtype):
                room = budget - self._own_bytes()
                results.append(
                    together(
                        request.ranks,
                        partial(self._measure_form, stepper, predicted, room, sizes),
                        lambda found: self._time_again(stepper, found[-1]),
                    )
                )
        activations = predicted
        if activations is None:
            activations = ActivationMemory.fit(_combined([dict(real) for real, _ in results], forms))
        seconds = _combined([times.seconds for _, times in results], forms)
        timed = TimedSizes(repeats={size: [value] for size, value in seconds.items()})
        return activations, timed

    def _measure_form(
        self, stepper: MicroStepper, predicted: ActivationMemory | None, room: int, sizes: Sequence[int] | None
    ) -> tuple[dict[int, int], TimedSizes]:
        real: dict[int, int] = {}
        if predicted is None:
            real, _ = self._real_activations(stepper, None, room)
        if sizes is None:
            known = predicted or ActivationMemory.fit(real)
            return real, self._time_sizes(stepper, max(1, known.largest_within(room, self.request.largest)))
        timed = TimedSizes()
        for size in sizes:
            self.request.progress(f"micro-batch {size}, one more block")
            timed.repeats[size] = stepper.time(size)
        return real, timed

    def _time_sizes(self, stepper: MicroStepper, largest: int) -> TimedSizes:
        return time_sizes(
            stepper.time,
            PointPicker(largest=largest, relative_error=self.request.relative_error),
            relative_error=self.request.relative_error,
            out_of_time=lambda: self.request.clock() > self.deadline,
            recover=stepper.recover,
            progress=self.request.progress,
            summary=min if self.request.all_slowed else statistics.median,
        )

    def _time_again(self, stepper: MicroStepper, timed: TimedSizes) -> bool:
        """One more repeat of the size with the fewest, while other ranks are not done: ranks share hosts, links and power, and
        none is to be timed with more of these to itself than it has in training.

        Returns:
            False where there is nothing to time.
        """
        if not timed.repeats:
            return False
        size = min(timed.repeats, key=lambda known: (len(timed.repeats[known]), known))
        self.request.progress(f"micro-batch {size} again, until all ranks are done")
        timed.repeats[size] += stepper.time(size, warm=True)
        return True

    def _stepper(self) -> MicroStepper:
        request = self.request
        return MicroStepper(
            model=request.model,
            loss_fn=request.loss_fn,
            make_batch=request.make_batch,
            device=request.device,
            dtype=request.dtype,
            clock=request.clock,
            emulation=request.emulation,
            compile_options=request.compile_options,
        )

    def _optimizer_s(self) -> float:
        elements = model_size(self.request.model).trainable // self.request.ranks.world_size
        return time_optimizer(elements, device=self.request.device, clock=self.request.clock)

    def _shortest(self, timed: TimedSizes) -> ShortestRow | None:
        if not timed.shortest:
            return None
        return ShortestRow(sequence_length(self.request.shortest), self._slowdown * timed.summary(timed.shortest))

    @property
    def _slowdown(self) -> float:
        return self.request.emulation.slowdown if self.request.emulation else 1.0

    def _points(self, seconds: Mapping[int, float], activations: ActivationMemory) -> tuple[Measurement, ...]:
        own = self._own_bytes()
        return tuple(
            Measurement(
                micro_batch_size=size,
                step_time_s=self._slowdown * seconds[size],
                peak_memory_bytes=own + activations.at(size),
            )
            for size in sorted(seconds)
        )


def _reconcile(predicted: ActivationMemory | None, real: Mapping[int, int]) -> tuple[ActivationMemory, float]:
    """The prediction scaled to what the largest compared size really needed, and the factor."""
    if predicted is None:
        return (ActivationMemory.fit(real), 1.0) if real else (ActivationMemory.unknown(), 1.0)
    if not real or predicted.at(max(real)) == 0:
        return predicted, 1.0
    factor = real[max(real)] / predicted.at(max(real))
    return predicted.scaled(factor), factor


def _combined(by_form: Sequence[Mapping[int, float]], forms: Sequence[Variant]) -> dict[int, float]:
    """Figures of the whole model by size, from those of its shortened forms."""
    sizes = [size for size in by_form[0] if all(size in figures for figures in by_form)]
    return {size: combine([figures[size] for figures in by_form], forms) for size in sizes}
