"""What a run needs of the trainer or loop it serves, and what it finds out about its loss."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from .comm import Ranks, decide
from .console import warn
from .inspection import moved, shortened
from .loss import UNKNOWN, LossRule, find_loss_rule
from .probe_data import ProbeData
from .rng import preserved_rng

PROBE_ROWS = 3
"""Rows in the batch that the loss is watched on."""


class Host(Protocol):
    """What a run needs of the trainer or loop it serves."""

    @property
    def model(self) -> nn.Module:
        """The model, not yet wrapped."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the model computes in."""

    def use_dtype(self, dtype: torch.dtype) -> None:
        """Compute in another dtype; called before the model is wrapped."""

    @property
    def shifts_labels(self) -> bool:
        """True where the loss predicts each token from the ones before it."""

    def loss(self, model: nn.Module, batch: Any, num_items: Any) -> torch.Tensor:
        """The scalar loss of one micro-batch, as in training."""

    def count(self, batch: Any) -> int | None:
        """Items of a micro-batch as the host counts them for a loss that asks; None: it does not."""

    def optimizer_bytes(self) -> float | None:
        """Bytes of optimizer state per trained parameter, fp32 master copy included; None = as AdamW."""


def agree_on_loss(ranks: Ranks, host: Host, data: ProbeData) -> LossRule:
    """What the loss is a mean over, the same on every rank, from rows of the run's data; a collective call."""
    rule = decide(ranks, lambda: _watch_loss(host, data, ranks.world_size))
    if rule.kind == UNKNOWN and ranks.rank == 0:
        warn(
            "this loss is neither a mean over rows or tokens nor a sum: it depends on which rows share a "
            f"micro-batch, so no split of the batch is exact. Its micro-batches are weighted by {rule.items}."
        )
    return rule


def _watch_loss(host: Host, data: ProbeData, world_size: int) -> LossRule:
    batch = shortened(data.rows(PROBE_ROWS))
    parts = (shortened(data.rows(1)), shortened(data.rows(PROBE_ROWS - 1, start=1)))
    model = host.model
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    modes = {module: module.training for module in model.modules()}
    model.eval()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with preserved_rng():
            return find_loss_rule(
                lambda rows, count: host.loss(model, moved(rows, device), count),
                batch,
                world_size=world_size,
                shifts_labels=host.shifts_labels,
                relative_noise=5e-3 if half else 1e-5,
                parts=parts,
            )
    finally:
        for module, training in modes.items():
            module.training = training
