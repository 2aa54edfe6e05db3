"""Bytes of training state on one rank: parameters, gradients, optimizer and what DeepSpeed keeps besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ADAM_BYTES = 8.0
"""Two fp32 moments per parameter."""
MASTER_BYTES = 4.0
"""One fp32 copy per parameter."""
_DEFAULT_BUCKET = 500_000_000
"""Elements in DeepSpeed's gradient buffer unless its config says otherwise."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Parameter counts that decide the training state."""

    trainable: int
    """Parameters with a gradient."""
    frozen: int
    """Parameters without."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.trainable + self.frozen


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """What the `zero_optimization` object of a DeepSpeed config says about memory."""

    reduce_bucket_elements: int | None = None
    """Elements of the buffer gradients are collected in (`reduce_bucket_size`); None: as large as the model, see
    `sized_buffers`."""
    buckets: int = 1
    """Such buffers: 2 with `overlap_comm`, 0 without `contiguous_gradients`."""
    max_live_parameters: int = 10**9
    """Parameters stage 3 keeps gathered at most (`stage3_max_live_parameters`)."""

    @classmethod
    def from_config(cls, deepspeed_config: Mapping[str, Any] | None) -> ZeroSettings:
        """Read a DeepSpeed config; missing and `"auto"` values are the defaults above."""
        zero = (deepspeed_config or {}).get("zero_optimization") or {}
        given = {key: value for key, value in zero.items() if value != "auto"}
        bucket = given.get("reduce_bucket_size")
        buckets = 2 if given.get("overlap_comm") else 1
        return cls(
            reduce_bucket_elements=None if bucket is None else int(float(bucket)),
            buckets=buckets if given.get("contiguous_gradients", True) else 0,
            max_live_parameters=int(float(given.get("stage3_max_live_parameters", 1e9))),
        )


def sized_buffers(deepspeed_config: Mapping[str, Any] | None, size: ModelSize) -> dict[str, int]:
    """Entries of `zero_optimization` that a config leaves out, no larger than the model.

    DeepSpeed's own default is a buffer of 5e8 elements whatever the model: 1 GB in half precision, twice that with
    `overlap_comm`, taken from what micro-batches could use.

    Args:
        deepspeed_config: The run's; what it says is left alone, `"auto"` included.
        size: Parameter counts.
    """
    given = (deepspeed_config or {}).get("zero_optimization") or {}
    wanted = {"reduce_bucket_size": size.trainable, "allgather_bucket_size": size.total}
    return {key: max(1, min(count, _DEFAULT_BUCKET)) for key, count in wanted.items() if key not in given}


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of training state one rank holds."""

    parameters: int
    """This rank's weights in the compute dtype."""
    gradients: int
    """Gradients that live from one micro-step to the next."""
    optimizer: int
    """fp32 master copy and optimizer moments."""
    buffers: int
    """Gradient buckets and, at stage 3, gathered parameters."""
    step: int
    """What the optimizer step needs for its duration, when activations are gone: fp32 gradients, temporaries."""
    fresh_gradients: int = 0
    """Stage 2: this rank's share of a micro-step's gradients, beside those of the micro-steps before."""
    reduction: int = 0
    """What summing the gradients over ranks needs for its duration after the backward pass, when activations are gone;
    buckets that are summed during it are among `buffers`."""

    @property
    def total(self) -> int:
        """What is held while a micro-batch runs."""
        return self.parameters + self.gradients + self.fresh_gradients + self.optimizer + self.buffers

    def sharded(self, zero_stage: int) -> int:
        """What a ZeRO stage divides among the ranks, as far as it is held here."""
        by_stage = {1: self.optimizer, 2: self.gradients + self.fresh_gradients, 3: self.parameters}
        return sum(count for stage, count in by_stage.items() if stage <= zero_stage)

    def unsharded(self, zero_stage: int) -> int:
        """What is held while a micro-batch runs, whatever this rank's share of the rest."""
        return self.total - self.sharded(zero_stage)

    @property
    def at_reduction(self) -> int:
        """What is held while gradients are summed after the backward pass."""
        return self.total + self.reduction

    @property
    def at_step(self) -> int:
        """What is held in the optimizer step."""
        return self.parameters + self.gradients + self.optimizer + self.step


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of a parameter before ZeRO-3 took it apart."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def model_size(model: nn.Module) -> ModelSize:
    """Count the parameters, tied ones once, those of a ZeRO-3 initialised model at their full size."""
    counts = {True: 0, False: 0}
    for parameter in model.parameters():
        counts[parameter.requires_grad] += full_shape(parameter).numel()
    return ModelSize(trainable=counts[True], frozen=counts[False])


def model_states(
    size: ModelSize,
    *,
    dtype: torch.dtype,
    zero_stage: int,
    world_size: int,
    optimizer_bytes_per_parameter: float | None = None,
    settings: ZeroSettings | None = None,
) -> ModelStates:
    """Training state per rank, after Rajbhandari et al., ZeRO (SC 2020), section 3, with DeepSpeed's buffers.

    With c bytes per parameter of the compute dtype, T trainable of P parameters, N ranks and k bytes of optimizer
    state (AdamW: 12, the fp32 master copy and two moments; stage 0 in fp32 has no master copy, ZeRO has one also in
    fp32): parameters c P, gradients c T, optimizer k T. Stage 1 divides the optimizer state by N, stage 2 the
    gradients too, stage 3 the parameters too. Besides, stages 1 to 3 hold gradient buckets, stage 2 keeps its share of
    a micro-step's gradients apart from those before, and stage 3 holds the parameters it has gathered, which
    are all of them up to `max_live_parameters`. Gradients are summed over ranks in a copy of their bucket: beside the
    activations where the model needs several buckets, after them where one holds everything and at stage 0. In the
    step, half precision needs fp32 gradients, and an optimizer that is not fused two temporaries, of the rank's share.

    Args:
        size: Parameter counts.
        dtype: Compute dtype.
        zero_stage: 0 to 3.
        world_size: Number of ranks the stage shards over.
        optimizer_bytes_per_parameter: Bytes of optimizer state per trainable parameter, fp32 master included;
            None = AdamW.
        settings: DeepSpeed's buffers; None = its defaults.

    Returns:
        Bytes on one rank.
    """
    settings = settings or ZeroSettings()
    c = torch.empty((), dtype=dtype).element_size()
    k = MASTER_BYTES + ADAM_BYTES if optimizer_bytes_per_parameter is None else optimizer_bytes_per_parameter
    if zero_stage == 0 and c == 4:
        k = max(0.0, k - MASTER_BYTES)

    def share(count: float, from_stage: int) -> int:
        return round(count / world_size if zero_stage >= from_stage else count)

    bucket = min(size.trainable, _DEFAULT_BUCKET)
    if settings.reduce_bucket_elements is not None:
        bucket = settings.reduce_bucket_elements
    buffers = settings.buckets * c * bucket if zero_stage >= 1 else 0
    copy = c * min(bucket if zero_stage >= 1 else _DEFAULT_BUCKET, size.trainable)
    summed_at_end = zero_stage == 0 or bucket >= size.trainable
    if not summed_at_end:
        buffers += copy
    if zero_stage == 3:
        buffers += c * min(size.total, settings.max_live_parameters)
    fp32_gradients = 0.0 if c == 4 else 4.0 * size.trainable
    temporaries = 8.0 * size.trainable if zero_stage >= 1 else 0.0
    return ModelStates(
        parameters=share(c * size.total, 3),
        gradients=share(c * size.trainable, 2),
        optimizer=share(k * size.trainable, 1),
        buffers=buffers,
        step=share(fp32_gradients + temporaries, 1),
        fresh_gradients=share(c * size.trainable, 2) if zero_stage == 2 else 0,
        reduction=copy if summed_at_end else 0,
    )


def optimizer_bytes(
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    elements: int = 2**16,
    device: torch.device | None = None,
) -> float:
    """Bytes of optimizer state per parameter, fp32 master copy included, read off one step on scratch values.

    ZeRO hands the optimizer flat vectors, so the scratch parameter is one too.

    Args:
        make_optimizer: Parameters -> optimizer, for example
            `lambda ps: type(optimizer)(ps, **optimizer.defaults)`.
        elements: Size of the scratch parameter; optimizers that keep small parameters in another form need more.
        device: Where the scratch parameter is; None = the CPU.
    """
    scratch = nn.Parameter(torch.zeros(elements, device=device))
    scratch.grad = torch.zeros_like(scratch)
    optimizer = make_optimizer([scratch])
    optimizer.step()
    tensors = (value for state in optimizer.state.values() for value in state.values())
    held = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    return MASTER_BYTES + held / elements


def optimizer_tensors(engine: nn.Module) -> list[torch.Tensor]:
    """What the optimizer of a DeepSpeed engine holds by now: its state, and master copies of parameters.

    Returns:
        The tensors; none where `engine` is a plain module.
    """
    optimizer = getattr(engine, "optimizer", None)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    own = {id(parameter) for parameter in engine.parameters()}
    masters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    return masters + [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
