"""What DeepSpeed itself costs: its hooks and its communication, timed on the husk of a model.

A real engine around the husk runs the real hooks and the real collectives of a ZeRO stage on the real process group;
what remains after taking off the husk's own time is what the stage adds to every micro-step and to every optimizer
step. Where communication goes on in every micro-step, the husk is run once more with as much stand-in compute in its
layers, to see how much of the communication that hides.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .device import synchronize
from .husk import Husk
from .model_state import full_shape
from .plan import LOCK_STEP_STAGES

_LARGEST_HUSK_ELEMENTS = 2**23
"""Husks of larger models have all their parameters shrunk alike, to cost little memory and time."""
_ROUNDS = 7
_WARM_UP_ROUNDS = 2
_SHRINKING_KEYS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
"""Keys of `zero_optimization` that count elements, with DeepSpeed's defaults below."""
_DEFAULT_SIZES = (5e8, 5e8, 1e5, 5e7, 1e9, 1e9)

_LEAST_OVERLAP = 0.2

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class EngineTimes:
    """Seconds a ZeRO stage adds on this rank, on top of the model's own forward and backward."""

    micro_step_s: float
    """In every micro-step."""
    step_s: float
    """Once per optimizer step, the optimizer included."""
    shrink: float
    """Size of the husk over that of the model, above 0 up to 1; communication was timed for that share of it."""
    overlap: float = 0.0
    """Seconds of a micro-step's communication that one second of compute hides, 0 to 1."""


def time_engine(
    model: nn.Module,
    *,
    zero_stage: int,
    world_size: int,
    device: torch.device,
    dtype: torch.dtype,
    deepspeed_config: Mapping[str, Any] | None = None,
    clock: Clock = time.perf_counter,
    slowdown: float = 1.0,
) -> EngineTimes:
    """Time a ZeRO stage around the husk of a model; all ranks must call it together.

    Args:
        model: The model; not changed.
        zero_stage: 0 to 3.
        world_size: Number of ranks of the default process group.
        device: Where this rank trains.
        dtype: Compute dtype.
        deepspeed_config: The run's; its `zero_optimization` (without offload) and gradient clipping count.
        clock: Seconds of real time.
        slowdown: How many times slower this rank pretends to be where all ranks do, else 1. The husk's passes then have
            a set time, the same on all ranks, in which what DeepSpeed computes inside them has room, as it will have in
            the model's.
    """
    import deepspeed

    elements = sum(full_shape(p).numel() for p in model.parameters())
    shrink = min(1.0, _LARGEST_HUSK_ELEMENTS / max(elements, 1))
    husk = Husk(model, shrink=shrink).to(device=device, dtype=dtype)
    x = torch.zeros(1, device=device, dtype=dtype)
    own_s = _time_rounds(lambda: husk(x).sum().backward(), device, clock)
    for parameter in husk.parameters():
        parameter.grad = None
    with _quiet():
        engine, *_ = deepspeed.initialize(
            model=husk,
            optimizer=torch.optim.AdamW([p for p in husk.parameters() if p.requires_grad], lr=0.0),
            config=_engine_config(zero_stage, world_size, dtype, deepspeed_config or {}, shrink, elements),
        )
        if slowdown > 1.0:
            inner_s, _ = _time_steps(engine, x, device, clock)
            own_s = _largest(slowdown * inner_s, device)
            husk.pause(own_s, clock)
        inner_s, last_s = _time_steps(engine, x, device, clock)
        overlap = 0.0
        if zero_stage in LOCK_STEP_STAGES and slowdown == 1.0:
            overlap = _overlap(husk, engine, x, device, clock, own_s=own_s, inner_s=inner_s)
        engine.destroy()
    return EngineTimes(
        micro_step_s=max(0.0, inner_s - own_s), step_s=max(0.0, last_s - inner_s), shrink=shrink, overlap=overlap
    )


def _overlap(
    husk: Husk, engine: Any, x: torch.Tensor, device: torch.device, clock: Clock, *, own_s: float, inner_s: float
) -> float:
    """Share of a micro-step's communication, all of it exposed without compute, that as much compute hides."""
    exposed_s = _largest(inner_s - own_s, device)
    if exposed_s <= 0.0:
        return 0.0
    husk.compute(exposed_s, device, clock)
    with_s, _ = _time_steps(engine, x, device, clock)
    hidden = 1.0 - _largest(with_s - inner_s, device) / exposed_s
    # Less than that is not told from noise; what is taken for hidden and is not would make plans too hopeful.
    return min(hidden, 1.0) if hidden > _LEAST_OVERLAP else 0.0


def _time_steps(engine: Any, x: torch.Tensor, device: torch.device, clock: Clock) -> tuple[float, float]:
    """Seconds of a micro-step inside an accumulation, and of its last one with the optimizer step."""
    inner: list[float] = []
    last: list[float] = []
    for _ in range(_WARM_UP_ROUNDS + _ROUNDS):
        for seconds in (inner, last):
            dist.barrier()
            start = clock()
            engine.backward(engine(x).sum())
            engine.step()
            synchronize(device)
            seconds.append(clock() - start)
    return statistics.median(inner[_WARM_UP_ROUNDS:]), statistics.median(last[_WARM_UP_ROUNDS:])


def _largest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    found = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _time_rounds(run: Callable[[], object], device: torch.device, clock: Clock) -> float:
    seconds = []
    for _ in range(_WARM_UP_ROUNDS + _ROUNDS):
        start = clock()
        run()
        synchronize(device)
        seconds.append(clock() - start)
    return statistics.median(seconds[_WARM_UP_ROUNDS:])


def _engine_config(
    zero_stage: int,
    world_size: int,
    dtype: torch.dtype,
    deepspeed_config: Mapping[str, Any],
    shrink: float,
    elements: int,
) -> dict[str, Any]:
    given = {
        key: value
        for key, value in (deepspeed_config.get("zero_optimization") or {}).items()
        if value != "auto" and "offload" not in key
    }
    # Buffers larger than the model change nothing but the memory they take. DeepSpeed wants even sizes.
    sizes = {
        key: 2 * max(1, int(min(float(given.get(key, default)), elements) * shrink) // 2)
        for key, default in zip(_SHRINKING_KEYS, _DEFAULT_SIZES, strict=True)
    }
    clipping = deepspeed_config.get("gradient_clipping", 1.0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 2 * world_size,
        "gradient_clipping": 1.0 if clipping == "auto" else clipping,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {**given, **sizes, "stage": zero_stage},
    }
    if dtype is torch.bfloat16:
        config["bf16"] = {"enabled": True}
    if dtype is torch.float16:
        config["fp16"] = {"enabled": True}
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed reports every engine it sets up; the husk's would look like the run's own."""
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # DeepSpeed 0.19 still calls collectives by the names that torch 2.13 has deprecated.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(before)
