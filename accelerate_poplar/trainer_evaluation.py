"""Evaluation and prediction of a `Trainer` on unequal ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather
from torch import nn
from torch.utils.data import SequentialSampler

from .batch_metrics import BatchMetrics, local_metrics, record_together
from .evaluation import EvaluationLoader, EvaluationSampler, EvaluationStream, evaluation_shares, gather_rows
from .loader import HostOrder
from .loss import HONOURED, SUM, LossRule
from .run import PoplarRun, is_partitioned
from .streaming import StreamHead, is_stream
from .trainer_host import TrainerHost

AnyEvaluationLoader = EvaluationLoader | EvaluationStream


class Tally:
    """What one evaluation adds up: the loss over all items, and each rank's rows put together in order.

    Args:
        loader: The loader being iterated.
        run: The run.
        rule: What the loss of a batch is.
        count: A collated batch -> its items.
        finite_only: Leave out losses that are not finite.
    """

    def __init__(
        self,
        loader: AnyEvaluationLoader,
        *,
        run: PoplarRun,
        rule: LossRule,
        count: Callable[[Any], int],
        finite_only: bool,
    ) -> None:
        self.loader = loader
        self.num_rows = 0
        self.metrics: list[BatchMetrics] = []
        self._ranks = run.ranks
        self._rule = rule
        self._count = count
        self._finite_only = finite_only
        self._loss = 0.0
        self._items = 0.0
        self._expects_loss = False

    def items_of(self, batch: Any) -> int:
        """Items of this rank's part of the current global batch; 0 where it only takes part."""
        return self._count(batch) if self.loader.rows[self._ranks.rank] else 0

    def add(self, loss: torch.Tensor | None, items: int) -> None:
        """Add this rank's loss of the current global batch."""
        self._expects_loss = loss is not None
        rows = sum(self.loader.rows)
        self.num_rows += rows
        if loss is None or not items:
            return
        value = float(loss)
        if self._finite_only and not math.isfinite(value):
            return
        if self._rule.kind == SUM:
            # The mean over the global batches of their sums, each rank adding its part of every sum.
            self._loss += value * rows
            self._items += rows / sum(count > 0 for count in self.loader.rows)
        else:
            self._loss += value / self._rule.scale * items
            self._items += items

    def gather(self, value: Any) -> Any:
        """The evaluation loop's `gather_function`: one entry per row of the current global batch, in order."""
        rows = self.loader.rows
        if self._expects_loss:
            # The loop repeats the rank's loss a fixed number of times, and gathers it before anything else.
            self._expects_loss = False
            losses = gather(value[:1])
            return losses.repeat_interleave(torch.tensor(rows, device=losses.device))
        return gather_rows(value, rows=rows, rank=self._ranks.rank)

    def loss(self) -> float:
        """The mean over all items on all ranks; a collective call."""
        parts = self._ranks.gather((self._loss, self._items))
        items = sum(part[1] for part in parts)
        return sum(part[0] for part in parts) / items if items else float("nan")


class PoplarEvaluationMixin:
    """Lets the ranks of a `Trainer` evaluate shares by speed, and reports the loss over all items.

    The stock loss is a mean over the ranks' batch means (and, for models that take any keyword but do not honour the
    item count, the number of ranks times that); this one does not depend on how rows are put into batches.
    """

    poplar: PoplarRun
    _poplar_tally: Tally | None = None

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        if is_training:
            return super()._get_dataloader(  # type: ignore[misc]
                dataset, description, batch_size, sampler_fn, is_training, dataloader_key
            )
        rows, collate = self._poplar_columns(dataset, description)
        shares = evaluation_shares(
            self.poplar.plan,
            self.poplar.profile,
            per_device_batch_size=batch_size,
            world_size=self.poplar.ranks.world_size,
        )
        rank = self.poplar.ranks.rank
        if is_stream(rows):
            return EvaluationStream(rows, shares=shares, rank=rank, collate_fn=collate, stock_batch_size=batch_size)
        sampler = (sampler_fn(rows) if sampler_fn is not None else None) or SequentialSampler(rows)
        order = HostOrder(sampler, ranks=self.poplar.ranks, seedable=False)
        loader = EvaluationLoader(
            rows,
            sampler=EvaluationSampler(shares=shares, rank=rank, num_rows=len(order), order=lambda: order(0)),
            collate_fn=collate,
            stock_batch_size=batch_size,
            **self._poplar_loader_settings(),
        )
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            # The stock trainer looks here before it makes another one, whose processes would pile up.
            self._eval_dataloaders = {**getattr(self, "_eval_dataloaders", {}), dataloader_key: loader}
        return loader

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped trainer, each row once and in order, the loss a mean over all items."""
        if not isinstance(dataloader, AnyEvaluationLoader):
            return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
        host = TrainerHost(self)
        rule = self.poplar.loss_rule or self._poplar_evaluation_rule(host, dataloader)
        tally = Tally(
            dataloader,
            run=self.poplar,
            rule=rule,
            count=_counter(host, rule),
            finite_only=self.args.logging_nan_inf_filter,
        )
        self._poplar_tally, self.gather_function = tally, tally.gather
        try:
            with self._without_engine():
                output = super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._poplar_tally, self.gather_function = None, self.accelerator.gather_for_metrics
        record_together(self, "eval", tally.metrics, self.poplar.ranks)
        bound = inspect.signature(super().evaluation_loop).bind(dataloader, *args, **kwargs)  # type: ignore[misc]
        name = f"{bound.arguments.get('metric_key_prefix', 'eval')}_loss"
        if name in output.metrics:
            output.metrics[name] = tally.loss()
        return output._replace(num_samples=tally.num_rows)

    @contextmanager
    def _without_engine(self) -> Iterator[None]:
        """Below ZeRO-3 an untrained model is evaluated as it is: the host would ask DeepSpeed for an engine, and refuse."""
        enabled = self.is_deepspeed_enabled
        whole = enabled and self.deepspeed is None and not is_partitioned(self.model)
        self.is_deepspeed_enabled = enabled and not whole
        try:
            yield
        finally:
            self.is_deepspeed_enabled = enabled

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped trainer; the loss is this rank's own."""
        tally = self._poplar_tally
        if tally is None:
            return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        items = tally.items_of(inputs)
        across = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            with local_metrics(self, share=float(items)) as metrics:
                found = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.average_tokens_across_devices = across
        tally.metrics.append(metrics)
        tally.add(found[0], items)
        return found

    def _poplar_evaluation_rule(self, host: TrainerHost, loader: AnyEvaluationLoader) -> LossRule:
        """What the loss is, for an evaluation that no training has gone before."""
        dataset = loader.dataset
        rows = StreamHead(dataset, self.poplar.ranks).rows if is_stream(dataset) else dataset
        return self.poplar.watch_loss(host, dataset=rows, collate=loader.row_collate_fn)


def _counter(host: TrainerHost, rule: LossRule) -> Callable[[Any], int]:
    def count(batch: Any) -> int:
        by_host = host.count(batch) if rule.kind == HONOURED else None
        return rule.count(batch) if by_host is None else by_host

    return count
