"""Metrics that a trainer records while it computes a loss, put together over unequal ranks.

Some trainers (TRL's) gather figures over the ranks inside `compute_loss`. With a plan, ranks run micro-batches of unequal
size and, at ZeRO stages 0 and 1, unequally many of them, so that such a gather would mix up steps or wait for ever. Here
every micro-batch is measured by its own rank alone; once per optimizer step the ranks' figures become one mean, weighted
by the items each micro-batch was a mean over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .comm import Ranks

TOTAL_TOKENS = "num_tokens"
"""The metric that is a running total, not a mean."""


class LocalAccelerator:
    """The trainer's accelerator, except that nothing is gathered: every rank gets its own values back."""

    def __init__(self, accelerator: Any) -> None:
        object.__setattr__(self, "_accelerator", accelerator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._accelerator, name, value)

    def gather(self, tensor: Any) -> Any:
        """The tensor itself, as in a run of one process."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The data itself, as in a run of one process."""
        return input_data


@dataclass
class BatchMetrics:
    """What one micro-batch left behind."""

    values: dict[str, float] = field(default_factory=dict)
    """Means over the micro-batch's items."""
    tokens: int = 0
    """Tokens it added to the trainer's running total."""
    share: float = 0.0
    """Weight of the means: the micro-batch's items, or its part of the step's; 0 for a ghost."""


@contextmanager
def local_metrics(trainer: Any, *, share: float = 0.0) -> Iterator[BatchMetrics]:
    """Let the trainer gather nothing, and keep apart what it records.

    Args:
        trainer: Any `Trainer`; what TRL's keep (`_metrics`, `_total_train_tokens`) is as before afterwards.
        share: Weight of the micro-batch.
    """
    real, found = trainer.accelerator, BatchMetrics(share=share)
    recorded, total = getattr(trainer, "_metrics", None), getattr(trainer, "_total_train_tokens", 0)
    trainer.accelerator = LocalAccelerator(real)
    if isinstance(recorded, Mapping):
        trainer._metrics = {mode: defaultdict(list) for mode in recorded}
    try:
        yield found
    finally:
        trainer.accelerator = real
        if isinstance(recorded, Mapping):
            for own in trainer._metrics.values():
                found.values |= {name: float(sum(v) / len(v)) for name, v in own.items() if v and name != TOTAL_TOKENS}
            trainer._metrics = recorded
            found.tokens = getattr(trainer, "_total_train_tokens", 0) - total
            if found.tokens:
                trainer._total_train_tokens = total


def record_together(trainer: Any, mode: str, batches: Sequence[BatchMetrics], ranks: Ranks) -> None:
    """Hand the trainer the means over all ranks' micro-batches; a collective call for a trainer that keeps metrics.

    Args:
        trainer: The trainer.
        mode: `train` or `eval`.
        batches: This rank's micro-batches.
        ranks: The other ranks.
    """
    recorded = getattr(trainer, "_metrics", None)
    if not isinstance(recorded, Mapping) or mode not in recorded:
        return
    together = [batch for own in ranks.gather([b for b in batches if b.share]) for batch in own]
    sums: dict[str, list[float]] = {}
    for batch in together:
        for name, value in batch.values.items():
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += batch.share * value
            total[1] += batch.share
    for name, (weighted, shares) in sums.items():
        recorded[mode][name].append(weighted / shares)
    if hasattr(trainer, "_total_train_tokens"):
        trainer._total_train_tokens += sum(batch.tokens for batch in together)
        recorded[mode][TOTAL_TOKENS] = [trainer._total_train_tokens]
