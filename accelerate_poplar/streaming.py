"""Streams on unequal ranks: each rank takes its own part of every optimizer step from one shared order.

Every rank reads the whole stream, in the same order, and keeps the rows that the plan gives it. So the position in a
stream is a number of samples, whatever the plan and the number of ranks. The stream is read by one process per rank (the
training process, or one loader process): several would each have their own order.

A stream that was split between the ranks beforehand cannot be shared out again. Each rank then takes its share of a step
from its own stream, and ranks that have come to their end only take part until all have.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from .comm import Ranks
from .console import warn
from .errors import DataError, RankError
from .loader import StepBatch
from .plan import LOCK_STEP_STAGES, Plan
from .rng import preserved_rng
from .sampler import micro_batch_sizes_for, runs_in_step

HEAD_ROWS = 64
"""Rows looked at before training, to profile with and to compare the ranks' streams by."""


def is_stream(dataset: Any) -> bool:
    """True for a dataset that can only be iterated."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


class StreamHead:
    """The first rows of a stream, read without taking them from it.

    Args:
        dataset: The stream; where it is an iterator that can be read only once, the rows are put back in front.
        ranks: The other ranks; their streams are compared.

    Raises:
        DataError: The stream is empty on every rank.
    """

    def __init__(self, dataset: Any, ranks: Ranks) -> None:
        self._dataset = dataset
        self._rest: Iterator[Any] | None = None
        self._prefix: list[Any] = []
        with preserved_rng():
            self.rows = self._read(dataset)
        counts = ranks.gather(len(self.rows))
        if not any(counts):
            raise DataError("the training stream is empty: there is nothing to train on.")
        digests = ranks.gather(fingerprint(self.rows))
        self.shared = all(digest == digests[0] for digest in digests)
        if not self.shared and ranks.rank == 0:
            warn(
                "the ranks' streams begin differently, so each is taken as that rank's own share of the data. If they "
                "were meant to be one stream, give its shuffling the same seed on all ranks and do not split it."
            )
        if not all(counts):
            # A rank whose own stream is empty needs something to build ghost micro-batches from.
            others = next(rows for rows in ranks.gather(self.rows[:1]) if rows)
            self.rows = self.rows or others

    def _read(self, dataset: Any) -> list[Any]:
        first = iter(dataset)
        rows = list(islice(first, HEAD_ROWS))
        again = iter(dataset)
        if again is first:
            self._prefix, self._rest = rows, first
            return rows
        repeated = list(islice(again, 1))
        if rows and fingerprint(repeated) != fingerprint(rows[:1]):
            self._prefix, self._rest = rows + repeated, first
        return rows

    def passes(self) -> Iterator[Any]:
        """The next pass over the stream, from its beginning."""
        if self._rest is None:
            return iter(self._dataset)
        whole, self._prefix = chain(self._prefix, self._rest), []
        return whole


class StreamSteps(IterableDataset):
    """One rank's `StepBatch` of every optimizer step; iterated in the training process or in one loader process.

    Args:
        dataset: The stream.
        head: What was read of it.
        plan: The plan.
        rank: This rank.
        collate_fn: Collates the rows of a micro-batch.
        drop_last: Leave out a last, incomplete optimizer step.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        head: StreamHead,
        plan: Plan,
        rank: int,
        collate_fn: Callable[[list[Any]], Any],
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.rank = rank
        self.drop_last = drop_last
        self.epoch = 0
        self.first_step = 0
        self.next_step = 0
        self.cutter: Callable[[list[Any]], Sequence[Sequence[Sequence[int]]]] | None = None
        self._head = head
        self._collate = collate_fn
        self._plans: list[tuple[int, Plan]] = []

    def set_plan(self, plan: Plan, *, from_step: int) -> None:
        """Change the plan from a step of the running epoch on."""
        self._plans.append((from_step, plan))

    def plan_for(self, step: int) -> Plan:
        """The plan in force from a step on; earlier ones are forgotten."""
        while self._plans and self._plans[0][0] <= step:
            self.plan = self._plans.pop(0)[1]
        return self.plan

    def __iter__(self) -> Iterator[StepBatch]:
        first, self.first_step = self.first_step, 0
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        samples = self._head.passes()
        for _ in range(first):
            _drop(samples, self._wanted())
        step = self.next_step = first
        while True:
            plan = self.plan_for(step)
            rows = list(islice(samples, self._wanted()))
            if not rows or (self.drop_last and self._head.shared and len(rows) < plan.global_batch_size):
                return
            self.next_step = step + 1
            yield self._own_part(step, rows, plan)
            step += 1

    def _wanted(self) -> int:
        """Rows to read for one optimizer step."""
        if self._head.shared:
            return self.plan.global_batch_size
        return max(1, self.plan.ranks[self.rank].rank_batch_size)

    def _own_part(self, step: int, rows: list[Any], plan: Plan) -> StepBatch:
        if self._head.shared and self.cutter is not None:
            cut = self.cutter(rows)
            sizes = tuple(tuple(len(part) for part in rank) for rank in cut)
            own_rows = [rows[position] for part in cut[self.rank] for position in part]
            return self._batch(step, own_rows, len(rows), sizes[self.rank], runs_in_step(sizes, plan.zero_stage))
        if self._head.shared:
            sizes = micro_batch_sizes_for(plan, len(rows))
            start = sum(sum(other) for other in sizes[: self.rank])
            return self._batch(step, rows[start:], len(rows), sizes[self.rank], runs_in_step(sizes, plan.zero_stage))
        planned = plan.ranks[self.rank].micro_batch_sizes
        own, left = [], len(rows)
        for size in planned:
            own.append(min(size, left))
            left -= own[-1]
        own[-1] += left
        return self._batch(step, rows, len(rows), tuple(own), plan.zero_stage in LOCK_STEP_STAGES)

    def _batch(self, step: int, rows: Sequence[Any], count: int, sizes: tuple[int, ...], in_step: bool) -> StepBatch:
        micro_batches: list[Any] = []
        start = 0
        for size in sizes:
            micro_batches.append(self._collate(list(rows[start : start + size])) if size else None)
            start += size
        return StepBatch(step, count, sizes, micro_batches, in_step)


class _CheckedSteps(IterableDataset):
    """The steps of a stream, with the ranks' agreement on each; iterated in the training process."""

    def __init__(
        self, steps: StreamSteps, *, head: StreamHead, ranks: Ranks, loader_kwargs: Mapping[str, Any]
    ) -> None:
        self.steps = steps
        self.skipped_steps = 0
        self.first_step = 0
        self.passes_done = 0
        self._head = head
        self._ranks = ranks
        self._sum = _sum_over(ranks)
        self._loader_kwargs = dict(loader_kwargs)

    def __iter__(self) -> Iterator[Any]:
        counted_off, self.skipped_steps = self.skipped_steps, 0
        first, self.first_step = self.first_step, 0
        yield from [None] * counted_off
        first += counted_off
        yield from self._agreed(self._begin(first), first)

    def _begin(self, first: int) -> Iterator[StepBatch]:
        """The steps from `first` on; where the stream has fewer, from the beginning of the pass that has them."""
        self.steps.first_step = first
        self.steps.plan_for(first)
        steps = iter(DataLoader(self.steps, batch_size=None, collate_fn=_same, **self._loader_kwargs))
        head = next(steps, None)
        if head is None and first:
            length = sum(1 for _ in DataLoader(self.steps, batch_size=None, collate_fn=_same, **self._loader_kwargs))
            if 0 < length < first:
                self.passes_done += first // length
                self.steps.epoch += first // length
                return self._begin(first % length)
        return chain([] if head is None else [head], steps)

    def _agreed(self, steps: Iterator[StepBatch], first: int) -> Iterator[StepBatch]:
        for number in itertools.count(first):
            step = next(steps, None)
            count = 0 if step is None else step.num_samples
            total, squares = self._sum([count, count * count])
            if total == 0:
                return
            world_size = self._ranks.world_size
            if self._head.shared:
                if total != world_size * count or squares != world_size * count * count:
                    counts = ", ".join(f"rank {r}: {c}" for r, c in enumerate(self._ranks.gather(count)))
                    raise RankError(
                        f"the ranks' streams do not hold the same samples: this optimizer step has {counts}. Give its "
                        "shuffling the same seed on all ranks, or split the stream before its first sample."
                    )
                yield step
            else:
                yield self._ended(number) if step is None else dataclasses.replace(step, num_samples=total)

    def _ended(self, number: int) -> StepBatch:
        """The part of a rank whose own stream has ended."""
        plan = self.steps.plan
        sizes = tuple(0 for _ in plan.ranks[self.steps.rank].micro_batch_sizes)
        return StepBatch(number, 0, sizes, [None for _ in sizes], plan.zero_stage in LOCK_STEP_STAGES)


class StreamLoader(DataLoader):
    """Yields one rank's `StepBatch` per optimizer step of a stream; equally many on all ranks. It has no length.

    Args:
        dataset: The stream.
        head: What was read of it.
        plan: The plan.
        ranks: The other ranks.
        collate_fn: Collates the rows of a micro-batch.
        drop_last: Leave out a last, incomplete optimizer step.
        loader_kwargs: Further arguments of torch's `DataLoader`; of several loader processes one is used.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        head: StreamHead,
        plan: Plan,
        ranks: Ranks,
        collate_fn: Callable[[list[Any]], Any],
        drop_last: bool = False,
        loader_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        steps = StreamSteps(dataset, head=head, plan=plan, rank=ranks.rank, collate_fn=collate_fn, drop_last=drop_last)
        settings = {**(loader_kwargs or {})}
        settings["num_workers"] = min(1, settings.get("num_workers") or 0)
        # A loader process that lives on would keep its copy of the stream, whose epoch is the old one.
        settings["persistent_workers"] = False
        checked = _CheckedSteps(steps, head=head, ranks=ranks, loader_kwargs=settings)
        super().__init__(checked, batch_size=None, collate_fn=_same)
        self.plan_sampler = StreamPosition(checked, fixed_plan=settings["num_workers"] > 0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch the next iteration follows."""
        self.plan_sampler.set_epoch(epoch)

    def begin_at(self, step: int) -> None:
        """Let the next iteration begin with that optimizer step."""
        self.plan_sampler.begin_at(step)


class StreamPosition:
    """What the training loop steers of a stream; the counterpart of `PlanSampler`."""

    def __init__(self, checked: _CheckedSteps, *, fixed_plan: bool) -> None:
        self.fixed_plan = fixed_plan
        """True: a loader process reads ahead, so that a change of plan waits for the next epoch."""
        self._checked = checked

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._checked.steps.plan

    @property
    def cutter(self) -> Any:
        """What cuts a step in place of the plan's sizes, if anything does."""
        return self._checked.steps.cutter

    @cutter.setter
    def cutter(self, cutter: Callable[[list[Any]], Sequence[Sequence[Sequence[int]]]] | None) -> None:
        self._checked.steps.cutter = cutter

    @property
    def next_step(self) -> int:
        """The first step that has not been read."""
        return self._checked.steps.next_step

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch the next iteration follows."""
        self._checked.steps.epoch = epoch + self._checked.passes_done

    def skip_steps(self, steps: int) -> None:
        """Let the next iteration yield None for its first steps."""
        self._checked.skipped_steps = steps

    def begin_at(self, step: int) -> None:
        """Let the next iteration begin with that step, without yielding anything for the earlier ones."""
        self._checked.first_step = step

    def set_plan(self, plan: Plan, *, from_step: int) -> None:
        """Change the plan from a step of the running epoch on."""
        self._checked.steps.set_plan(plan, from_step=0 if self.fixed_plan else from_step)


def fingerprint(value: Any) -> str:
    """A digest of rows: equal for equal content, on every rank."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float().numpy() if value.dtype is torch.bfloat16 else value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _feed(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, (str, bytes, int, float, bool, type(None))):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())


def _drop(samples: Iterator[Any], count: int) -> None:
    deque(islice(samples, count), maxlen=0)


def _same(item: Any) -> Any:
    return item


def _sum_over(ranks: Ranks) -> Callable[[list[int]], list[int]]:
    def sums(values: list[int]) -> list[int]:
        if ranks.world_size == 1:
            return values
        return [sum(column) for column in zip(*ranks.gather(values), strict=True)]

    return sums
