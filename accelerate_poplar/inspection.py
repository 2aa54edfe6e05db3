"""Facts about a model and small batches of its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from .probe_data import sequence_length

PROBE_TOKENS = 64


def is_partitioned(model: nn.Module) -> bool:
    """True for a model created under `deepspeed.zero.Init`: its parameters are spread over the ranks."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """Gather the parameters of a model created under `deepspeed.zero.Init`; a collective call in that case only."""
    if not is_partitioned(model):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        yield


def model_name(model: nn.Module) -> str:
    """A label for the model: its config's name or type, else its class."""
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "") or getattr(config, "model_type", "")
    return str(name or type(model).__name__)


def shortened(batch: Any) -> Any:
    """At most `PROBE_TOKENS` tokens a row: what a loss averages over does not depend on the length."""
    length = sequence_length(batch)
    # Rows that were put end to end (padding-free) come with figures on where each one ends.
    if length <= PROBE_TOKENS or "cu_seq_lens_q" in batch:
        return batch
    return {
        key: value[:, :PROBE_TOKENS]
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == length
        else value
        for key, value in batch.items()
    }


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device."""
    return send_to_device(batch, device)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a batch or a model's output, also inside mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def num_elements(batch: Any) -> int:
    """Elements of all tensors of a batch."""
    return sum(tensor.numel() for tensor in tensors_in(batch))
