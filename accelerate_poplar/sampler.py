"""Which samples a rank runs in which micro-step.

Optimizer step k takes the samples at positions [k*G, (k+1)*G) of the epoch's global order, G being the global batch
size. The plan only cuts that slice into pieces: rank after rank, and within a rank micro-batch after micro-batch. So
neither the plan nor the number of ranks decides which samples a step sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DataError, PlanError
from .plan import LOCK_STEP_STAGES, Plan

IndexArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StepIndices:
    """One rank's part of one optimizer step."""

    step: int
    """Number of the optimizer step within the epoch, from 0."""
    num_samples: int
    """Samples of this optimizer step over all ranks."""
    micro_batches: tuple[tuple[int, ...], ...]
    """Dataset indices per micro-step; an empty entry = a micro-step of weight 0."""
    in_step: bool = True
    """True where every rank runs equally many micro-steps, so that the ranks may meet in each of them."""

    def indices(self) -> list[int]:
        """All dataset indices of this rank's part, in order."""
        return [index for micro_batch in self.micro_batches for index in micro_batch]


def num_steps(num_samples: int, global_batch_size: int, *, drop_last: bool) -> int:
    """Optimizer steps of one epoch over `num_samples` samples.

    Raises:
        DataError: There would be no step at all.
    """
    if num_samples < 1:
        raise DataError("the training dataset is empty: there is nothing to train on.")
    full, rest = divmod(num_samples, global_batch_size)
    steps = full if drop_last else full + (rest > 0)
    if steps == 0:
        raise DataError(
            f"the training dataset has {num_samples} samples, fewer than one global batch of {global_batch_size}, and "
            "drop_last discards the incomplete batch: not one step would be run. Turn drop_last off "
            f"(dataloader_drop_last for a Trainer) or lower the global batch size to at most {num_samples}."
        )
    return steps


def micro_batch_sizes_for(plan: Plan, num_samples: int) -> tuple[tuple[int, ...], ...]:
    """Every rank's micro-batch sizes for a step with `num_samples` samples.

    A full step gets the plan as it is. A shorter one (the last of an epoch) keeps the plan's proportions, never exceeds
    one of its micro-batches, and drops the micro-steps nobody needs.

    Args:
        plan: The plan in force.
        num_samples: Samples of the step, 1 to the plan's global batch size.

    Returns:
        One tuple per rank; each has at least one entry, at ZeRO-2/3 all have equally many.

    Raises:
        PlanError: `num_samples` is out of range.
    """
    sizes = tuple(rank.micro_batch_sizes for rank in plan.ranks)
    if num_samples == plan.global_batch_size:
        return sizes
    if not 1 <= num_samples <= plan.global_batch_size:
        raise PlanError(f"a step of {num_samples} samples does not fit a global batch of {plan.global_batch_size}.")
    if plan.zero_stage in LOCK_STEP_STAGES:
        return _cut_by_micro_step(sizes, num_samples)
    return _cut_by_rank(sizes, num_samples)


def runs_in_step(sizes: Sequence[tuple[int, ...]], zero_stage: int) -> bool:
    """Whether every rank runs equally many micro-steps; at ZeRO-0/1 those without samples are left out."""
    if zero_stage in LOCK_STEP_STAGES:
        return True
    return len({max(1, sum(size > 0 for size in rank)) for rank in sizes}) == 1


def _cut_by_micro_step(sizes: Sequence[tuple[int, ...]], num_samples: int) -> tuple[tuple[int, ...], ...]:
    columns: list[list[int]] = []
    left = num_samples
    for column in zip(*sizes, strict=True):
        if left == 0:
            break
        columns.append(_share_out(left, column))
        left -= sum(columns[-1])
    return tuple(zip(*columns, strict=True))


def _cut_by_rank(sizes: Sequence[tuple[int, ...]], num_samples: int) -> tuple[tuple[int, ...], ...]:
    shares = _share_out(num_samples, [sum(rank) for rank in sizes])
    cut: list[tuple[int, ...]] = []
    for rank, left in zip(sizes, shares, strict=True):
        kept: list[int] = []
        for size in rank:
            if left == 0:
                break
            kept.append(min(size, left))
            left -= kept[-1]
        cut.append(tuple(kept) or (0,))
    return tuple(cut)


def _share_out(total: int, capacities: Sequence[int]) -> list[int]:
    """Split `total` in proportion to `capacities` (largest remainder), or hand out all of them if they are fewer."""
    whole = sum(capacities)
    if whole <= total:
        return list(capacities)
    shares = [total * capacity // whole for capacity in capacities]
    by_remainder = sorted(range(len(capacities)), key=lambda i: (-(total * capacities[i] % whole), i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


StepCutter = Callable[[IndexArray], Sequence[Sequence[Sequence[int]]]]
"""Dataset indices of one step -> their positions within the step, by rank and micro-step, the same on every rank."""


class PlanSampler:
    """A batch sampler whose "batch" is one rank's part of one optimizer step.

    All ranks iterate equally many steps, whatever the plan. The plan can be changed from a given step on.

    Args:
        plan: The plan to start with.
        rank: This rank.
        num_samples: Samples of one epoch.
        order: Epoch number -> all dataset indices in the epoch's global order; the same on every rank.
        drop_last: Leave out a last, incomplete optimizer step.

    `next_step` is the first step of the epoch that has not been handed out; `fixed_plan` says whether the plan cannot be
    changed while iterating. Where a `cutter` is set, it decides which rank runs which samples of a step, in place of the
    plan's sizes.

    Raises:
        DataError: An epoch would have no step.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        num_samples: int,
        order: Callable[[int], IndexArray],
        drop_last: bool = False,
    ) -> None:
        self.rank = rank
        self.num_samples = num_samples
        self.drop_last = drop_last
        self.epoch = 0
        self.skipped_steps = 0
        self.next_step = 0
        self.first_step = 0
        self.fixed_plan = False
        self.cutter: StepCutter | None = None
        self._order = order
        self._plans: list[tuple[int, int, Plan]] = [(0, 0, plan)]
        self._num_steps = num_steps(num_samples, plan.global_batch_size, drop_last=drop_last)

    @property
    def plan(self) -> Plan:
        """The plan that was set last."""
        return self._plans[-1][2]

    @property
    def global_batch_size(self) -> int:
        """Samples per full optimizer step over all ranks."""
        return self.plan.global_batch_size

    @property
    def batch_size(self) -> int:
        """The global batch size, for code that asks a batch sampler for its batch size."""
        return self.global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self.epoch = epoch

    def skip_steps(self, steps: int) -> None:
        """Let the next iteration yield None for its first `steps` steps, at no cost.

        A resumed run counts them off (as accelerate's `skip_first_batches` does) instead of building them.
        """
        self.skipped_steps = steps

    def begin_at(self, step: int) -> None:
        """Let the next iteration begin with that step, without yielding anything for the earlier ones."""
        self.first_step = step

    def set_plan(self, plan: Plan, *, from_step: int, epoch: int | None = None) -> None:
        """Change the plan from a step on.

        Args:
            plan: The new plan, of the same global batch size.
            from_step: First step within the epoch that follows it; must be the same on every rank.
            epoch: The epoch of `from_step`; None: the current one.

        Raises:
            PlanError: The global batch size or the number of ranks differs.
        """
        old = self.plan
        if plan.global_batch_size != old.global_batch_size or plan.world_size != old.world_size:
            raise PlanError(
                f"the new plan is for {plan.global_batch_size} samples on {plan.world_size} ranks, the run has "
                f"{old.global_batch_size} on {old.world_size}; a plan may not change what is computed."
            )
        self._plans.append((self.epoch if epoch is None else epoch, from_step, plan))

    def plan_for(self, step: int) -> Plan:
        """The plan in force at a step of the current epoch."""
        reached = [plan for epoch, first, plan in self._plans if (epoch, first) <= (self.epoch, step)]
        return reached[-1]

    def step_samples(self, step: int) -> int:
        """Samples of a step over all ranks."""
        return min(self.global_batch_size, self.num_samples - step * self.global_batch_size)

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        skipped, self.skipped_steps = self.skipped_steps, 0
        first, self.first_step = self.first_step, 0
        order = self._order(self.epoch)
        if len(order) != self.num_samples:
            raise DataError(
                f"the sampler produced {len(order)} indices for epoch {self.epoch}, it had announced "
                f"{self.num_samples}. A sampler's length and its output must agree."
            )
        self.next_step = first + skipped
        for _ in range(skipped):
            yield None
        for step in range(first + skipped, self._num_steps):
            # Loader processes fetch ahead: a change of plan can only reach steps that nobody has asked for yet.
            self.next_step = step + 1
            yield self._step(step, order)

    def _step(self, step: int, order: IndexArray) -> StepIndices:
        count = self.step_samples(step)
        plan = self.plan_for(step)
        if self.cutter is not None:
            indices = order[step * self.global_batch_size :][:count]
            return self._cut(step, indices, self.cutter(indices), plan)
        sizes = micro_batch_sizes_for(plan, count)
        start = step * self.global_batch_size + sum(sum(rank) for rank in sizes[: self.rank])
        micro_batches: list[tuple[int, ...]] = []
        for size in sizes[self.rank]:
            micro_batches.append(tuple(order[start : start + size].tolist()))
            start += size
        return StepIndices(
            step=step,
            num_samples=count,
            micro_batches=tuple(micro_batches),
            in_step=runs_in_step(sizes, plan.zero_stage),
        )

    def _cut(self, step: int, indices: IndexArray, cut: Sequence[Sequence[Sequence[int]]], plan: Plan) -> StepIndices:
        """This rank's part of a step that is not cut by rows."""
        sizes = tuple(tuple(len(rows) for rows in rank) for rank in cut)
        return StepIndices(
            step=step,
            num_samples=len(indices),
            micro_batches=tuple(tuple(int(indices[position]) for position in rows) for rows in cut[self.rank]),
            in_step=runs_in_step(sizes, plan.zero_stage),
        )
