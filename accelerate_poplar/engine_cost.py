"""What DeepSpeed itself costs: its hooks and its communication, timed on a model without the arithmetic.

The husk of a model has the same modules in the same order and parameters of the same shapes, but its forward pass
computes nothing and its gradients are zeros. A real engine around it runs the real hooks and the real collectives of
a ZeRO stage on the real process group; what remains after taking off the husk's own time is what the stage adds to
every micro-step and to every optimizer step. Where communication goes on in every micro-step, the husk is run once more
with as much stand-in compute in its layers, to see how much of the communication that hides.
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
from .emulation import Emulation
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
_STAND_IN_SIZE, _STAND_IN_CALLS = 512, 50
"""Rows of the square matrices that keep a GPU busy, and multiplications to time one with."""

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


class StandInCompute:
    """Keeps a device busy for about as long as it is told.

    Args:
        device: A CPU is kept busy by its thread, a GPU by kernels on the current stream.
        seconds: Of compute per call.
        clock: Seconds of real time.
    """

    def __init__(self, device: torch.device, seconds: float, clock: Clock = time.perf_counter) -> None:
        self._seconds = seconds
        self._clock = clock
        self._matrix: torch.Tensor | None = None
        if device.type != "cpu":
            self._matrix = torch.zeros(_STAND_IN_SIZE, _STAND_IN_SIZE, device=device)
            self._multiply(_STAND_IN_CALLS)
            synchronize(device)
            start = clock()
            self._multiply(_STAND_IN_CALLS)
            synchronize(device)
            self._call_s = max((clock() - start) / _STAND_IN_CALLS, 1e-7)

    def __call__(self, times: float = 1.0) -> None:
        """Be busy for so many times the seconds."""
        seconds = times * self._seconds
        if self._matrix is not None:
            self._multiply(round(seconds / self._call_s))
            return
        end = self._clock() + seconds
        while self._clock() < end:
            pass

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._matrix, self._matrix)


class _Touch(torch.autograd.Function):
    """Passes `x` on; its backward pass gives every parameter a gradient of zeros."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, work: Callable[[float], None] | None, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.shapes = [(p.shape, p.dtype, p.device, p.requires_grad) for p in parameters]
        ctx.work = work
        if work is not None:
            work(1.0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.work is not None:
            ctx.work(2.0)
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if wanted else None
            for shape, dtype, device, wanted in ctx.shapes
        ]
        return (gradients[0], None, *zeros)


class Husk(nn.Module):
    """A model's modules and parameter shapes without its arithmetic.

    Args:
        model: What to imitate; only shapes are read, so ZeRO-3 initialised models are fine.
        shrink: Every parameter has this share of the original's elements, at least one.
    """

    def __init__(self, model: nn.Module, *, shrink: float = 1.0, _seen: dict[int, nn.Parameter] | None = None) -> None:
        super().__init__()
        seen = {} if _seen is None else _seen
        for name, parameter in model._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in seen:
                elements = max(1, round(full_shape(parameter).numel() * shrink))
                seen[id(parameter)] = nn.Parameter(torch.zeros(elements), requires_grad=parameter.requires_grad)
            self.register_parameter(name, seen[id(parameter)])
        self.work: Callable[[float], None] | None = None
        self.is_list = type(model).forward is nn.Module.forward
        for name, child in model.named_children():
            self.add_module(name, Husk(child, shrink=shrink, _seen=seen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` unchanged, in a graph in which every parameter has a gradient."""
        own = [p for p in self._parameters.values() if p is not None]
        if own:
            x = _Touch.apply(x, self.work, *own)  # type: ignore[no-untyped-call]
        for child in _called(self):
            x = child(x)
        return x

    def compute(self, seconds: float, device: torch.device, clock: Clock = time.perf_counter) -> None:
        """Let forward and backward together take so many seconds of compute, shared out evenly; 0 = none."""
        touched = [m for m in self.modules() if isinstance(m, Husk) and m._parameters]
        work = StandInCompute(device, seconds / (3 * max(len(touched), 1)), clock) if seconds > 0.0 else None
        for module in touched:
            module.work = work


def _called(module: Husk) -> Iterator[Husk]:
    """Children that a forward pass calls; lists of modules are never called themselves."""
    for child in module.children():
        if isinstance(child, Husk):
            if child.is_list:
                yield from _called(child)
            else:
                yield child


def time_engine(
    model: nn.Module,
    *,
    zero_stage: int,
    world_size: int,
    device: torch.device,
    dtype: torch.dtype,
    deepspeed_config: Mapping[str, Any] | None = None,
    clock: Clock = time.perf_counter,
    emulation: Emulation | None = None,
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
        emulation: What this rank pretends to be, where all ranks are slowed: the husk's passes then have a set time, the
            same on all, in which what DeepSpeed computes inside them has room, as it will have in the model's.
    """
    import deepspeed

    elements = sum(full_shape(p).numel() for p in model.parameters())
    shrink = min(1.0, _LARGEST_HUSK_ELEMENTS / max(elements, 1))
    husk = Husk(model, shrink=shrink).to(device=device, dtype=dtype)
    handle = None
    if emulation is not None:
        handle = emulation.attach(husk)
        emulation.expect(0.0)
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
        if emulation is not None:
            inner_s, _ = _time_steps(engine, x, device, clock)
            own_s = _largest(emulation.slowdown * inner_s, device)
            emulation.expect(own_s)
        inner_s, last_s = _time_steps(engine, x, device, clock)
        overlap = 0.0
        if zero_stage in LOCK_STEP_STAGES and emulation is None:
            overlap = _overlap(husk, engine, x, device, clock, own_s=own_s, inner_s=inner_s)
        engine.destroy()
    if handle is not None:
        emulation.expect(None)
        handle.remove()
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
    husk.compute(0.0, device)
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
