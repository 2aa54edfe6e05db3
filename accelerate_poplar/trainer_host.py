"""A `Trainer` as a run on unequal ranks sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from .batch_metrics import local_metrics
from .optimizer_state import of_trainer


class TrainerHost:
    """A trainer as `PoplarRun` sees it (`run_host.Host`)."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def model(self) -> nn.Module:
        """The model, not yet wrapped."""
        return self._trainer.model

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._trainer.args.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype DeepSpeed will run the model in; fp32 without DeepSpeed."""
        plugin = self._trainer.accelerator.state.deepspeed_plugin if self._trainer.is_deepspeed_enabled else None
        return torch.float32 if plugin is None else plugin.hf_ds_config.dtype()

    def use_dtype(self, dtype: torch.dtype) -> None:
        """Let DeepSpeed run the model in another half-precision dtype."""
        config = self._trainer.accelerator.state.deepspeed_plugin.hf_ds_config
        for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            config.config[name] = {**config.config.get(name, {}), "enabled": dtype is kind}
        config._dtype = dtype

    @property
    def shifts_labels(self) -> bool:
        """True for causal language models, as the host finds out."""
        return self._trainer._loss_shifts_labels

    def loss(self, model: nn.Module, batch: Any, num_items: Any) -> torch.Tensor:
        """`compute_loss` of the trainer, without its scaling by the number of ranks."""
        trainer, args = self._trainer, self._trainer.args
        before, args.average_tokens_across_devices = args.average_tokens_across_devices, False
        try:
            with local_metrics(trainer), trainer.compute_loss_context_manager():
                inputs = trainer._prepare_inputs(dict(batch) if isinstance(batch, Mapping) else batch)
                return trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
        finally:
            args.average_tokens_across_devices = before

    def count(self, batch: Any) -> int | None:
        """The host's own `num_items_in_batch` of one micro-batch."""
        trainer, args = self._trainer, self._trainer.args
        before, args.average_tokens_across_devices = args.average_tokens_across_devices, False
        try:
            items = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
        finally:
            args.average_tokens_across_devices = before
        return None if items is None else int(items)

    def optimizer_bytes(self) -> float | None:
        """Bytes of optimizer state per trained parameter; None = as AdamW."""
        return of_trainer(self._trainer, self.device)
