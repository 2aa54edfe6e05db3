"""Evaluation and prediction on unequal ranks: shares by speed, results in the dataset's order, each row once.

One iteration of an evaluation loader is one global batch. The ranks take contiguous pieces of it in rank order, so
that what they computed, put together in rank order, is in the dataset's order. A rank without rows in a short last
batch runs a row of another rank, for the sake of collectives inside the model, and its result is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import gather, gather_object, recursively_apply, send_to_device
from torch.utils.data import DataLoader

from .errors import DataError
from .plan import Plan, RankPlan
from .profiles import ClusterProfile
from .sampler import IndexArray, micro_batch_sizes_for


def evaluation_shares(
    plan: Plan | None, profile: ClusterProfile | None, *, per_device_batch_size: int, world_size: int
) -> tuple[int, ...]:
    """Rows of each rank in one global evaluation batch.

    The batch has `per_device_batch_size` x `world_size` rows, or fewer where a rank's share would not fit: the shares
    are those of the plan, and no rank gets more than it can train with (or than `per_device_batch_size`, where nothing
    was measured).

    Args:
        plan: The plan of the run; None: equal shares.
        profile: What it was made from, if anything was measured.
        per_device_batch_size: Rows per rank of the stock evaluation.
        world_size: Number of ranks.
    """
    if plan is None:
        return (per_device_batch_size,) * world_size
    wanted = [rank.rank_batch_size for rank in plan.ranks]
    if profile is not None and plan.zero_stage in profile.zero_stages:
        caps = list(profile.stage(plan.zero_stage).max_micro_batch_size)
    else:
        caps = [max(per_device_batch_size, *rank.micro_batch_sizes) for rank in plan.ranks]
    whole, total = sum(wanted), per_device_batch_size * world_size
    for share, cap in zip(wanted, caps, strict=True):
        if share and cap:
            total = min(total, cap * whole // share)
    shares = [total * share // whole for share in wanted]
    by_remainder = sorted(range(world_size), key=lambda rank: (-(total * wanted[rank] % whole), rank))
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return tuple(shares) if any(shares) else (1, *shares[1:])


def shares_as_plan(shares: Sequence[int]) -> Plan:
    """The shares of a global evaluation batch in the form that cuts short batches in proportion."""
    return Plan(
        zero_stage=0,
        global_batch_size=sum(shares),
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=tuple(RankPlan(rank=rank, micro_batch_sizes=(share,)) for rank, share in enumerate(shares)),
    )


class EvaluationSampler:
    """A batch sampler that yields one rank's piece of each global evaluation batch.

    Args:
        shares: Rows of each rank in a full global batch; at least one of them is above 0.
        rank: This rank.
        num_rows: Rows to evaluate.
        order: Called at the beginning of each evaluation: at least `num_rows` dataset indices, the same on every rank.
    """

    def __init__(self, *, shares: Sequence[int], rank: int, num_rows: int, order: Callable[[], IndexArray]) -> None:
        self.rank = rank
        self.num_rows = num_rows
        self.batch_size = sum(shares)
        self._order = order
        self._plan = shares_as_plan(shares)

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def rows(self, number: int) -> tuple[int, ...]:
        """Rows of each rank in the given iteration."""
        count = min(self.batch_size, self.num_rows - number * self.batch_size)
        return tuple(sizes[0] for sizes in micro_batch_sizes_for(self._plan, count))

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for number in range(len(self)):
            rows = self.rows(number)
            first = number * self.batch_size
            start = first + sum(rows[: self.rank])
            own = order[start : start + rows[self.rank]]
            yield [int(index) for index in (own if len(own) else order[first : first + 1])]


class EvaluationLoader(DataLoader):
    """Yields this rank's piece of each global evaluation batch; `rows` tells every rank's rows in the current one.

    Args:
        dataset: Map-style dataset, not empty.
        sampler: The rank's indices.
        device: Where batches are put; None: they stay where the collate function made them.
        stock_batch_size: Rows per rank of the stock loader.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        sampler: EvaluationSampler,
        collate_fn: Callable[[list[Any]], Any],
        device: torch.device | None = None,
        stock_batch_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, batch_sampler=sampler, collate_fn=collate_fn, **kwargs)
        self.evaluation_sampler = sampler
        self.row_collate_fn = collate_fn
        self.rows: tuple[int, ...] = ()
        self.stock_batch_size = stock_batch_size
        self.end_of_dataloader = False
        self.remainder = -1
        self.device = device
        self.gradient_state = GradientState()
        self._is_accelerate_prepared = True

    @property
    def total_batch_size(self) -> int:
        """Rows of one global batch."""
        return self.evaluation_sampler.batch_size

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)
        try:
            for number, batch in enumerate(super().__iter__()):
                self.rows = self.evaluation_sampler.rows(number)
                self.end_of_dataloader = number == len(self) - 1
                yield batch if self.device is None else send_to_device(batch, self.device)
        finally:
            self.gradient_state._remove_dataloader(self)


class EvaluationStream:
    """An `EvaluationLoader` over a stream, which all ranks read in the same order; it has no length.

    Args:
        dataset: The stream.
        shares: Rows of each rank in a full global batch.
        rank: This rank.
        collate_fn: Collates a rank's rows.
        stock_batch_size: Rows per rank of the stock loader.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shares: Sequence[int],
        rank: int,
        collate_fn: Callable[[list[Any]], Any],
        stock_batch_size: int,
    ) -> None:
        self.dataset = dataset
        self.row_collate_fn = collate_fn
        self.stock_batch_size = stock_batch_size
        self.rows: tuple[int, ...] = ()
        self.end_of_dataloader = False
        self.remainder = -1
        self.gradient_state = GradientState()
        self._plan = shares_as_plan(shares)
        self._rank = rank

    def __iter__(self) -> Iterator[Any]:
        samples, size = iter(self.dataset), self._plan.global_batch_size
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)
        try:
            held = list(islice(samples, size))
            while held:
                following = list(islice(samples, size))
                self.end_of_dataloader = not following
                self.rows = tuple(sizes[0] for sizes in micro_batch_sizes_for(self._plan, len(held)))
                start = sum(self.rows[: self._rank])
                yield self.row_collate_fn(held[start : start + self.rows[self._rank]] or held[:1])
                held = following
        finally:
            self.gradient_state._remove_dataloader(self)


def gather_rows(
    value: Any,
    *,
    rows: Sequence[int],
    rank: int,
    stock_batch_size: int | None = None,
    as_objects: bool = False,
) -> Any:
    """What all ranks hold for the rows of one global batch, in the dataset's order, on every rank; a collective call.

    Args:
        value: A tensor with one entry per row, nested lists, tuples and mappings of such tensors, or a list of
            objects. A value repeated `stock_batch_size` times (a mean loss, as scripts do it to weight it) is repeated
            once per row of its rank instead.
        rows: Rows of each rank.
        rank: This rank.
        stock_batch_size: See `value`.
        as_objects: Send the entries of a list as objects, also where they are tensors.

    Returns:
        The same structure, first dimension sum(rows).

    Raises:
        DataError: A tensor holds something else than one entry per row.
    """
    if as_objects or not _holds_tensors(value):
        own = list(value) if isinstance(value, (list, tuple)) else [value]
        return gather_object(own[: rows[rank]]) if len(rows) > 1 else own[: rows[rank]]
    return recursively_apply(lambda tensor: _gather_tensor(tensor, rows, rank, stock_batch_size), value)


def _gather_tensor(value: torch.Tensor, rows: Sequence[int], rank: int, stock_batch_size: int | None) -> torch.Tensor:
    sizes = _sizes(value, len(rows))
    if any(count and size != count for size, count in zip(sizes, rows, strict=True)):
        if len(set(rows)) == 1 and len(set(sizes)) == 1:
            # Equal shares: one value per rank, or several, mean what they mean to stock Accelerate.
            return gather(value)
        if set(sizes) != {stock_batch_size}:
            raise DataError(_not_per_row(sizes, rows, rank))
        value = value[torch.arange(rows[rank], device=value.device) % len(value)]
    most = max(rows)
    own = value[: rows[rank]]
    if len(own) < most:
        own = torch.cat([own, own.new_zeros((most - len(own), *own.shape[1:]))])
    pieces = gather(own.contiguous()).split(most)
    return torch.cat([piece[:count] for piece, count in zip(pieces, rows, strict=True)])


def _sizes(value: torch.Tensor, world_size: int) -> list[int]:
    """First dimension on every rank; -1 for a single value."""
    own = torch.tensor([len(value) if value.dim() else -1], device=value.device)
    return [int(size) for size in (gather(own) if world_size > 1 else own)]


def _not_per_row(sizes: Sequence[int], rows: Sequence[int], rank: int) -> str:
    found = "a single value on each rank" if set(sizes) == {-1} else f"{list(sizes)} entries on the ranks"
    return (
        f"rank {rank}: gather_for_metrics got {found}, but the ranks hold {list(rows)} rows of this batch. A plain "
        "mean over ranks would be wrong. Give it one entry per row, for a mean loss: loss.repeat(number of rows)."
    )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(_holds_tensors(item) for item in items)
