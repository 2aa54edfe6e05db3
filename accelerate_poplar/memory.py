"""Memory known before it is tried: the activations of a micro-batch, from fake tensors.

Peak of a training step = state of the ZeRO stage (`model_state.py`) + activations of one micro-batch. The
activations are linear in the micro-batch size from 2 samples on (weights' temporaries and other constants make the
intercept), so that three fake runs describe every size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .allocations import AllocationCounter, tensors_in
from .borrow import module_state
from .errors import PoplarError
from .model_state import full_shape

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
MakeBatch = Callable[[int], Any]

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Compute dtypes a profile can be taken in, with the names used in its JSON form."""


class PredictionUnavailableError(PoplarError):
    """The model cannot be run on fake tensors; its memory has to be measured instead."""


@dataclass(frozen=True, kw_only=True)
class ActivationMemory:
    """Bytes one micro-batch needs on top of parameters and gradients: exact at 1, linear from 2 on."""

    one_sample: float
    """At 1 sample."""
    intercept: float
    """Of the line for 2 samples and more; may be negative."""
    slope: float
    """Bytes per further sample; at least 0."""

    def at(self, micro_batch_size: int) -> int:
        """Bytes for `micro_batch_size` samples; 0 samples need 0."""
        if micro_batch_size < 1:
            return 0
        if micro_batch_size == 1:
            return round(self.one_sample)
        return round(max(self.one_sample, self.intercept + self.slope * micro_batch_size))

    def largest_within(self, bytes_available: float, ceiling: int) -> int:
        """Largest micro-batch size up to `ceiling` whose activations fit; 0 when not even one sample does."""
        if ceiling < 1 or self.at(1) > bytes_available:
            return 0
        low, high = 1, ceiling
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at(middle) <= bytes_available else (low, middle - 1)
        return low

    def scaled(self, factor: float) -> ActivationMemory:
        """The same line times `factor`."""
        return replace(
            self,
            one_sample=self.one_sample * factor,
            intercept=self.intercept * factor,
            slope=self.slope * factor,
        )

    @classmethod
    def unknown(cls) -> ActivationMemory:
        """Nothing could be found out: every size is taken to fit until it fails."""
        return cls(one_sample=0.0, intercept=0.0, slope=0.0)

    @classmethod
    def fit(cls, bytes_by_size: Mapping[int, float]) -> ActivationMemory:
        """A line through the sizes of 2 and more by least squares; one such point alone goes through the origin.

        Args:
            bytes_by_size: Activation bytes by micro-batch size; at least one entry.
        """
        many = {size: float(count) for size, count in bytes_by_size.items() if size >= 2}
        smallest = min(bytes_by_size)
        if not many:
            one = float(bytes_by_size[smallest])
            return cls(one_sample=one, intercept=0.0, slope=one)
        mean_size = sum(many) / len(many)
        mean_bytes = sum(many.values()) / len(many)
        spread = sum((size - mean_size) ** 2 for size in many)
        if spread:
            slope = sum((size - mean_size) * (count - mean_bytes) for size, count in many.items()) / spread
        else:
            slope = mean_bytes / mean_size
        slope = max(slope, 0.0)
        intercept = mean_bytes - slope * mean_size
        one = float(bytes_by_size.get(1, max(intercept + slope, 0.0)))
        return cls(one_sample=one, intercept=intercept, slope=slope)


def predict_activations(
    model: nn.Module,
    loss_fn: LossFunction,
    make_batch: MakeBatch,
    *,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[int] = (1, 2, 4),
) -> ActivationMemory:
    """Activation memory from forward and backward passes on fake tensors; nothing is computed or allocated.

    Args:
        model: Not changed; may live anywhere, also as a ZeRO-3 initialised model with empty parameters.
        loss_fn: Called as `loss_fn(model, batch)`, returns the scalar loss.
        make_batch: Called with a size, returns a batch on the host.
        device: Device the fake parameters are on.
        dtype: Dtype of the fake floating-point parameters.
        sizes: Micro-batch sizes to run.

    Raises:
        PredictionUnavailableError: The model looks at tensor values, or an operator has no fake form.
    """
    needed: dict[int, float] = {}
    for size in sizes:
        try:
            needed[size] = _fake_activation_bytes(model, loss_fn, make_batch(size), device, dtype)
        except PredictionUnavailableError:
            # Batch normalisation, for one, refuses a single sample.
            if size > 1 or len(sizes) == 1:
                raise
    return ActivationMemory.fit(needed)


def _fake_activation_bytes(
    model: nn.Module, loss_fn: LossFunction, batch: Any, device: torch.device, dtype: torch.dtype
) -> int:
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as problem:
        raise PredictionUnavailableError(f"this torch has no FakeTensorMode ({problem}).") from problem
    counter = AllocationCounter(device_type=device.type)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        # A model may keep tensors it makes on the way; fake ones must not stay.
        with module_state(model):
            with mode:
                counter.know(_use_fakes(model, device, dtype), count=True)
            held = counter.live_bytes
            # Tokens, masks and labels stay real, so that a loss may count them and a model may look at its mask.
            batch = on_training_device(
                map_tensors(batch, lambda t: mode.from_tensor(t) if t.is_floating_point() else t), device, dtype
            )
            counter.know(tensors_in(batch), count=True)
            with counter, torch.enable_grad():
                loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as problem:
        raise PredictionUnavailableError(f"{type(problem).__name__}: {problem}") from problem
    return counter.peak_bytes - held


def _use_fakes(model: nn.Module, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Put fake parameters, gradients and buffers in place of the real ones; returns them.

    Used under FakeTensorMode, and `module_state`, which puts the real ones back.
    """
    fakes: dict[int, torch.Tensor] = {}
    held: list[torch.Tensor] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            shape = full_shape(tensor)
            twin = torch.empty(shape, dtype=kind, device=device)
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            held.append(twin)
            if twin.requires_grad:
                twin.grad = torch.empty_like(twin)
                held.append(twin.grad)
            fakes[id(tensor)] = twin
        return fakes[id(tensor)]

    for module in model.modules():
        module._parameters.update({k: fake(p) for k, p in module._parameters.items() if p is not None})  # type: ignore[misc]
        module._buffers.update({k: fake(b) for k, b in module._buffers.items() if b is not None})
    return held


def on_training_device(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A batch as a DeepSpeed run feeds it: on the device, floating-point tensors in the compute dtype."""
    return map_tensors(batch, lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else t.dtype))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to every tensor in nested mappings, lists and tuples; other values are kept."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        return type(value)(changed) if type(value) is not dict else changed  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    return value
