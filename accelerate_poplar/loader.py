"""A data loader whose items are one rank's micro-batches of one optimizer step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

from .comm import Ranks
from .errors import DataError
from .plan import Plan
from .sampler import IndexArray, PlanSampler, StepIndices


@dataclass
class StepBatch:
    """One rank's collated micro-batches of one optimizer step."""

    step: int
    """Number of the optimizer step within the epoch, from 0."""
    num_samples: int
    """Samples of this optimizer step over all ranks."""
    sizes: tuple[int, ...]
    """Samples per micro-step of this rank; 0 = a micro-step of weight 0."""
    micro_batches: list[Any]
    """Collated micro-batches; None where the size is 0."""
    in_step: bool = True
    """True where every rank runs equally many micro-steps."""

    def pin_memory(self) -> StepBatch:
        """Called by torch's loader when it pins memory."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return dataclasses.replace(self, micro_batches=[pin_memory(batch) for batch in self.micro_batches])


@dataclass(frozen=True)
class _Fetched:
    indices: StepIndices
    samples: list[Any]


class _StepDataset(Dataset):
    """Fetches a whole `StepIndices` at once; everything else is the wrapped dataset's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: StepIndices) -> _Fetched:
        wanted = indices.indices()
        fetch_all = getattr(self.dataset, "__getitems__", None)
        samples = fetch_all(wanted) if fetch_all and wanted else [self.dataset[index] for index in wanted]
        return _Fetched(indices, list(samples))

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


@dataclass(frozen=True)
class _StepCollator:
    collate: Callable[[list[Any]], Any]

    def __call__(self, fetched: _Fetched) -> StepBatch:
        micro_batches: list[Any] = []
        start = 0
        sizes = tuple(len(micro_batch) for micro_batch in fetched.indices.micro_batches)
        for size in sizes:
            micro_batches.append(self.collate(fetched.samples[start : start + size]) if size else None)
            start += size
        indices = fetched.indices
        return StepBatch(indices.step, indices.num_samples, sizes, micro_batches, indices.in_step)


class PoplarDataLoader(DataLoader):
    """A torch `DataLoader` over a `PlanSampler`: `len()` and iteration count optimizer steps, equal on all ranks."""

    def __init__(
        self, dataset: Any, *, plan_sampler: PlanSampler, collate_fn: Callable[[list[Any]], Any], **kwargs: Any
    ) -> None:
        super().__init__(
            _StepDataset(dataset), batch_sampler=plan_sampler, collate_fn=_StepCollator(collate_fn), **kwargs
        )
        self.plan_sampler = plan_sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose sample order the next iteration follows."""
        self.plan_sampler.set_epoch(epoch)
        self.dataset.set_epoch(epoch)

    def begin_at(self, step: int) -> None:
        """Let the next iteration begin with that optimizer step of the epoch."""
        self.plan_sampler.begin_at(step)


class HostOrder:
    """The global sample order of an epoch, as the host library would have drawn it.

    A `RandomSampler` is drawn as accelerate draws it for equal ranks (seed + epoch). Any other sampler's order is taken
    from rank 0, because ranks with uneven work do not keep their random generators in step.

    Args:
        sampler: The sampler of the stock run.
        ranks: The other ranks.
        data_seed: Seed of the order; None: the seed torch was set to.
        seedable: accelerate's `use_seedable_sampler`.
    """

    def __init__(self, sampler: Sampler, *, ranks: Ranks, data_seed: int | None = None, seedable: bool = True) -> None:
        if isinstance(sampler, BatchSampler):
            raise DataError("a batch sampler decides the batches itself; give a sampler of single indices.")
        self.ranks = ranks
        if isinstance(sampler, RandomSampler) and seedable and not isinstance(sampler, SeedableRandomSampler):
            sampler = SeedableRandomSampler(
                data_source=sampler.data_source,
                replacement=sampler.replacement,
                num_samples=sampler._num_samples,
                generator=sampler.generator,
                data_seed=data_seed,
            )
        self.sampler = sampler
        self._same_everywhere = isinstance(sampler, SequentialSampler)
        if isinstance(sampler, SeedableRandomSampler):
            seeds = ranks.gather(int(sampler.initial_seed))
            sampler.initial_seed = seeds[0]
            if sampler.generator is not None:
                sampler.generator = torch.Generator().manual_seed(seeds[0])
            self._same_everywhere = True

    def __len__(self) -> int:
        return len(self.sampler)

    def __call__(self, epoch: int) -> IndexArray:
        """All dataset indices of one epoch, shape (samples,)."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        order = self._draw() if self._same_everywhere or self.ranks.rank == 0 else None
        return order if self._same_everywhere and order is not None else self.ranks.broadcast(order)

    def _draw(self) -> IndexArray:
        return np.fromiter(iter(self.sampler), dtype=np.int64)


def build_loader(
    dataset: Any,
    *,
    plan: Plan,
    rank: int,
    order: HostOrder,
    collate_fn: Callable[[list[Any]], Any],
    drop_last: bool = False,
    loader_kwargs: dict[str, Any] | None = None,
) -> PoplarDataLoader:
    """The training loader of one rank under a plan.

    Raises:
        DataError: The dataset is empty, or shorter than a global batch with `drop_last`.
    """
    sampler = PlanSampler(plan=plan, rank=rank, num_samples=len(order), order=order, drop_last=drop_last)
    return PoplarDataLoader(dataset, plan_sampler=sampler, collate_fn=collate_fn, **(loader_kwargs or {}))
