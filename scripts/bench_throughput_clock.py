"""The clock of `bench_throughput.py`: optimizer steps of plans in turns, and what the ranks do on their own around each step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl

from accelerate_poplar import Plan
from accelerate_poplar.comm import Ranks
from accelerate_poplar.device import synchronize
from accelerate_poplar.emulation import Emulation


class OwnSpeed:
    """How many samples/s this rank runs forward and backward, without waiting for any other.

    Args:
        network: A model of its own, on its device.
        batch: A micro-batch of a size at which the rank is about as fast as it can be.
        emulation: What the rank pretends to be; attached to the network.
        seconds: Of every measurement, at least.
    """

    def __init__(
        self, network: torch.nn.Module, batch: dict[str, torch.Tensor], emulation: Emulation, seconds: float
    ) -> None:
        self._network = network
        self._batch = batch
        self._seconds = seconds
        emulation.attach(network)

    def measure(self) -> float:
        """Samples/s of at least one pass, all ranks at once."""
        rows = self._batch["input_ids"]
        passes, start = 0, time.perf_counter()
        while passes == 0 or time.perf_counter() - start < self._seconds:
            torch.autograd.backward(self._network(**self._batch).loss)
            self._network.zero_grad()
            synchronize(rows.device)
            passes += 1
        return passes * len(rows) / (time.perf_counter() - start)


@dataclass(frozen=True)
class TimedStep:
    """One optimizer step."""

    seconds: float
    """From the end of the step before to its own."""
    before: list[float]
    """The ranks' own speeds right before it, samples/s, indexed by rank."""
    after: list[float]
    """Right after it."""

    @property
    def own_speeds(self) -> list[float]:
        """The means of both, indexed by rank."""
        return [statistics.mean(pair) for pair in zip(self.before, self.after, strict=True)]


class StepClock(TrainerCallback):
    """Times optimizer steps, and the ranks' own speeds before and after each.

    Args:
        own: This rank's own speed.
        ranks: The other ranks.
    """

    def __init__(self, own: OwnSpeed, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        self._resumed = 0.0
        self._before: list[float] = []
        self.steps: list[TimedStep] = []
        """Every step but the first."""

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        synchronize(args.device)
        ended = time.perf_counter()
        after = self._ranks.gather(self._own.measure())
        if self._before:
            self.steps.append(TimedStep(ended - self._resumed, self._before, after))
        self._before = after
        self._resumed = time.perf_counter()


class Turns(TrainerCallback):
    """Lets plans take turns: step k follows plan k modulo their number.

    Args:
        plans: Of one global batch and ZeRO stage.
        steps: Optimizer steps of the run.
    """

    def __init__(self, plans: Sequence[Plan], steps: int) -> None:
        self._plans = plans
        self._steps = steps

    def on_train_begin(
        self, args: Any, state: Any, control: TrainerControl, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        for step in range(self._steps):
            train_dataloader.plan_sampler.set_plan(self._plans[step % len(self._plans)], from_step=step)
