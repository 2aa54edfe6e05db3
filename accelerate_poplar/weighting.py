"""Exact weights for the micro-batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .loader import StepBatch
from .loss import HONOURED, LossRule
from .plan import LOCK_STEP_STAGES


@dataclass(frozen=True)
class MicroStep:
    """One forward and backward pass of this rank."""

    batch: Any
    """The collated micro-batch."""
    weight: float
    """Factor on its loss; 0 for a ghost."""
    share: float = 0.0
    """Its part of the items of the whole step; 0 for a ghost."""


@dataclass(frozen=True)
class WeightedStep:
    """This rank's part of one optimizer step, ready to run."""

    micro_steps: tuple[MicroStep, ...]
    """At least one."""
    total_items: int
    """Items of all micro-batches on all ranks."""
    num_samples: int
    """Samples of this optimizer step over all ranks."""


class StepWeigher:
    """Turns a `StepBatch` into micro-steps with weights.

    Args:
        rule: What the loss of a micro-batch is.
        world_size: Number of ranks.
        zero_stage: ZeRO stage; at 2 and 3 every planned micro-step is run, at 0 and 1 empty ones are left out.
        ghost: A collated one-row batch to run, with weight 0, where this rank has nothing.
        sum_over_ranks: One rank's item count -> the sum over all ranks; called once per optimizer step on every rank.
        count: A collated micro-batch -> its items.
    """

    def __init__(
        self,
        *,
        rule: LossRule,
        world_size: int,
        zero_stage: int,
        ghost: Any,
        sum_over_ranks: Callable[[int], int],
        count: Callable[[Any], int] | None = None,
    ) -> None:
        self.rule = rule
        self.world_size = world_size
        self.zero_stage = zero_stage
        self.ghost = ghost
        self.drops_unlabelled = True
        """False: a micro-batch whose labels are all ignored is still run (as a ghost), so that a rank's number of
        micro-steps depends on the plan alone."""
        self._sum_over_ranks = sum_over_ranks
        self._count = count or rule.count

    def weigh(self, step: StepBatch) -> WeightedStep:
        """Weights for one step; a collective call."""
        items = [0 if batch is None else self._count(batch) for batch in step.micro_batches]
        total = self._sum_over_ranks(sum(items))
        micro_steps = []
        for batch, count in zip(step.micro_batches, items, strict=True):
            planned = batch is not None and not self.drops_unlabelled
            weight = self.rule.weight(items=count, total_items=total, world_size=self.world_size)
            if weight == 0.0 and not (batch is not None and self.rule.kind == HONOURED and total):
                # Nothing to learn here: a mean over no items would be 0/0, so a row that has some stands in.
                batch = self.ghost
            if batch is not self.ghost or planned or self.zero_stage in LOCK_STEP_STAGES:
                micro_steps.append(MicroStep(batch, weight, count / total if weight else 0.0))
        if not micro_steps:
            micro_steps.append(MicroStep(self.ghost, 0.0))
        return WeightedStep(tuple(micro_steps), total, step.num_samples)


@contextmanager
def unchanged_statistics(model: nn.Module, *, active: bool) -> Iterator[None]:
    """Keep running statistics (BatchNorm) as they are while a ghost micro-batch runs.

    Args:
        model: The model, wrapped or not.
        active: False: do nothing.
    """
    layers = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats] if active else []
    saved = [{name: buffer.clone() for name, buffer in layer.named_buffers(recurse=False)} for layer in layers]
    try:
        yield
    finally:
        with torch.no_grad():
            for layer, buffers in zip(layers, saved, strict=True):
                for name, value in buffers.items():
                    getattr(layer, name).copy_(value)
