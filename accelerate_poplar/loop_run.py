"""A run whose loss is computed in a plain loop, out of sight: what it is a mean over, and how to profile it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from .comm import decide
from .console import warn
from .errors import ConfigError
from .inspection import tensors_in
from .loss import MEAN, SUM, LossRule, has_token_labels
from .memory import map_tensors
from .optimizer_state import of_deepspeed, of_optimizer
from .probe_data import ProbeData
from .rng import preserved_rng
from .run import PoplarRun
from .run_host import PROBE_ROWS

AUTO = "auto"
LOSS_REDUCTIONS = (AUTO, "rows", "tokens", "shifted_tokens", "sum")

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
"""(model, collated batch) -> the scalar loss that the loop gives to `backward`."""


class LoopHost:
    """A plain loop as `PoplarRun` sees it (`run_host.Host`).

    Args:
        accelerator: Knows device, precision and autocast.
        model: Not yet wrapped.
        loss_fn: The loop's loss.
        loss_reduction: One of `LOSS_REDUCTIONS`.
        count_items: Items of a collated batch; None: counted from its labels or rows.
        optimizer: The loop's, not yet wrapped.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        *,
        optimizer: Any = None,
        loss_fn: LossFunction | None,
        loss_reduction: str,
        count_items: Callable[[Any], int] | None,
    ) -> None:
        self.model = model
        self.device: torch.device = accelerator.device
        self.loss_reduction = loss_reduction
        self.count_items = count_items
        self._accelerator = accelerator
        self._optimizer = optimizer
        self.loss_fn = loss_fn
        self.stand_in_loss = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype DeepSpeed will run the model in; fp32 without DeepSpeed, where autocast does the rest."""
        plugin = self._accelerator.deepspeed_plugin
        config = plugin.deepspeed_config if plugin is not None else {}
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if (config.get(name) or {}).get("enabled") is True:
                return dtype
        return torch.float32

    @property
    def shifts_labels(self) -> bool:
        """True for causal language models: their loss predicts each token from the ones before it."""
        config = getattr(self.model, "config", None)
        return getattr(self.model, "loss_type", None) == "ForCausalLM" and not getattr(
            config, "is_encoder_decoder", False
        )

    def loss(self, model: nn.Module, batch: Any, num_items: Any) -> torch.Tensor:
        """The loop's loss, or a stand-in of about the same cost where the loop keeps it to itself."""
        with self._accelerator.autocast():
            if self.loss_fn is not None:
                return self.loss_fn(model, batch)
            outputs = call_model(model, batch)
        loss = loss_of(outputs)
        return _stand_in(outputs) if loss is None or self.stand_in_loss else loss

    def count(self, batch: Any) -> int | None:
        """None: a plain loop passes no item count to its loss."""
        return None

    def optimizer_bytes(self) -> float | None:
        """Bytes of optimizer state per trained parameter; None = as AdamW."""
        plugin = self._accelerator.deepspeed_plugin
        config = plugin.deepspeed_config if plugin is not None else {}
        if "optimizer" in config:
            return of_deepspeed(config, self.device)
        return of_optimizer(self._optimizer, self.device)


class LoopRun(PoplarRun):
    """A `PoplarRun` for a plain loop."""

    def _agree_on_loss(self, host: Any, data: ProbeData) -> LossRule:
        batch = data.rows(PROBE_ROWS)
        if host.loss_reduction != AUTO:
            return _stated_rule(host, batch)
        host.stand_in_loss = not decide(self.ranks, lambda: _loss_is_visible(host, batch))
        if not host.stand_in_loss:
            return super()._agree_on_loss(host, data)
        if has_token_labels(batch) and host.count_items is None and self.ranks.rank == 0:
            warn(
                "the model returns no loss by itself, so what the loop's loss is a mean over cannot be seen; its "
                "micro-batches are weighted by rows. Say PoplarAccelerator(loss_reduction='tokens') if it is a mean "
                "over the labels that are not -100, or 'sum' if it is a sum."
            )
        return LossRule(kind=MEAN, items="rows")

    def _counter(self, host: Any) -> Callable[[Any], int]:
        return host.count_items or self.loss_rule.count


def _stated_rule(host: LoopHost, batch: Any) -> LossRule:
    if host.loss_reduction == "sum":
        per_token = "shifted_tokens" if host.shifts_labels else "tokens"
        return LossRule(kind=SUM, items=per_token if has_token_labels(batch) else "rows")
    if host.loss_reduction != "rows" and host.count_items is None and not has_token_labels(batch):
        raise ConfigError(
            f"loss_reduction is {host.loss_reduction!r}, but the batches have no `labels` with one whole number per "
            "token to count. Give count_items (a function from a batch to its number of items) or "
            "loss_reduction='rows'."
        )
    return LossRule(kind=MEAN, items=host.loss_reduction)


def _loss_is_visible(host: LoopHost, batch: Any) -> bool:
    """Whether the loop's loss was given, or is what the model returns for a batch."""
    if host.loss_fn is not None:
        return True
    model = host.model
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with preserved_rng(), torch.no_grad():
            outputs = call_model(model, map_tensors(batch, lambda tensor: tensor.to(device)))
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
        # A model that cannot be called with the batch alone leaves its loss to the loop.
        return False
    finally:
        for module, mode in training.items():
            module.training = mode
    return loss_of(outputs) is not None


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a collated batch: a mapping by keyword, the first part of a tuple or list, or the batch."""
    if isinstance(batch, Mapping):
        taken = inspect.signature(model.forward).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
            batch = {key: value for key, value in batch.items() if key in taken}
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def loss_of(outputs: Any) -> torch.Tensor | None:
    """The scalar loss among a model's outputs, if there is one."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.dim() == 0 else None


def _stand_in(outputs: Any) -> torch.Tensor:
    """A scalar through which every differentiable output is reached, for timing only."""
    parts = [tensor.float().square().mean() for tensor in tensors_in(outputs) if tensor.requires_grad]
    if not parts:
        raise ConfigError(
            "the model's outputs hold no tensor with a gradient, so it cannot be profiled. Give "
            "PoplarAccelerator(loss_fn=...), a function (model, batch) -> the loss of the loop."
        )
    return torch.stack(parts).sum()
