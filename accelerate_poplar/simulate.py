"""The step-time model over given curves and clusters. Nothing here is measured; results say `simulated`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cluster import Cluster
from .devices import Device
from .errors import PlanError, ProfileError
from .latencies import LatencyTable
from .metrics import flops_per_token, idle_fraction, idle_fractions, mfu, samples_per_s, tokens_per_s
from .model_shape import ModelShape
from .plan import Plan
from .profiles import ClusterProfile, Measurement, RankProfile, StageProfile
from .search import STRATEGIES, check_request, find_plan
from .step_model import StepBreakdown, break_down_plan, step_time

TABLE_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Names of the compute dtypes in tables of measured latencies."""

_LARGEST_SIZE = 512
_OPTIMIZER_BYTES_MOVED = 28
_LOGIT_BYTES_MOVED = 20


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained on a simulated cluster, and how."""

    model: ModelShape
    """The model."""
    dtype: str = "fp16"
    """`fp16` or `bf16`, which take the same time here, or `fp32`, for which only a latency table has times."""
    checkpointing: bool = False
    """Whether activations are recomputed in the backward pass; a third more compute and less memory."""
    table: LatencyTable | None = None
    """Measured per-layer times to use instead of the device table's formula."""

    @property
    def value_bytes(self) -> int:
        """Bytes of a weight or a gradient in the compute dtype."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def token_flops(self) -> float:
        """FLOPs of forward and backward per token, see `metrics.flops_per_token`."""
        shape = self.model
        return flops_per_token(shape.num_parameters, shape.num_layers, shape.hidden_size, shape.seq_len)


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """What one strategy gives on a cluster under the step-time model."""

    strategy: str
    """Name of the strategy."""
    plan: Plan | None
    """Its plan; None when it has none."""
    breakdown: StepBreakdown | None
    """Where the time goes; None without a plan."""
    problem: str
    """Why there is no plan; empty with one."""
    samples_per_s: float
    """Throughput; 0 without a plan."""
    tokens_per_s: float
    """Throughput in tokens; 0 without a plan or when samples are not token rows."""
    idle_fraction: float
    """1 - mean/max of the ranks' compute time."""
    idle_fractions: tuple[float, ...]
    """The same per rank: share of the busiest rank's compute time not computed."""
    mfu: float | None
    """Model FLOPs over the sum of the ranks' peaks; None when a peak is unknown."""


def state_bytes(num_parameters: int, zero_stage: int, world_size: int, value_bytes: int = 2) -> float:
    """Bytes of training state on each rank with Adam and an even ZeRO partition.

    Weights and gradients in the compute dtype, and 12 bytes (8 with fp32 weights) of master copy and moments per
    parameter; the stage decides what is divided by world_size (Rajbhandari et al. 2020).

    Args:
        num_parameters: Parameters of the model.
        zero_stage: 0 to 3.
        world_size: Ranks that share the partition.
        value_bytes: Bytes of a weight or a gradient, 2 or 4.
    """
    optimizer = 12.0 if value_bytes == 2 else 8.0
    parts = (value_bytes, value_bytes, optimizer)
    sharded_from = (3, 2, 1)
    return sum(
        num_parameters * part / (world_size if zero_stage >= stage else 1)
        for part, stage in zip(parts, sharded_from, strict=True)
    )


def simulated_profile(cluster: Cluster, work: Workload, *, zero_stage: int) -> ClusterProfile:
    """The profile a cluster that need not exist would have.

    Compute times come from the latency table if there is one, else from the device table's formula with the output
    layer added; largest micro-batches from memory minus training state; collectives from link bandwidth and bytes;
    the optimizer's time from 28 bytes moved per parameter it updates.

    Args:
        cluster: Hosts, devices and links.
        work: Model, dtype and curves.
        zero_stage: 0 to 3; the profile holds this stage only, for the optimizer's time depends on it.

    Raises:
        ProfileError: The latency table lacks a device.
    """
    size, count = work.model.num_parameters, cluster.world_size
    ranks, caps = [], []
    for number in range(count):
        device = cluster.host_of(number).device
        points, cap = _curve(device, work, _room_for_samples(cluster, device, work, zero_stage))
        caps.append(cap)
        updated = size if zero_stage == 0 else size / count
        ranks.append(
            RankProfile(
                rank=number,
                host=cluster.host_of(number).name,
                device=device.name,
                memory_bytes=int(device.memory_gib * 2**30),
                peak_flops=device.peak_tflops * 1e12,
                step_overhead_s=_OPTIMIZER_BYTES_MOVED * updated / (device.bandwidth_gbytes_per_s * 1e9),
                points=points,
            )
        )
    per_micro_step, per_step = _communication(cluster, work, zero_stage)
    return ClusterProfile(
        model=f"{work.model.name} (simulated)",
        num_parameters=size,
        seq_len=work.model.seq_len,
        dtype=work.dtype,
        ranks=tuple(ranks),
        zero_stages={
            zero_stage: StageProfile(
                max_micro_batch_size=tuple(caps),
                per_micro_step_s=per_micro_step,
                per_step_s=per_step,
                overlap=cluster.overlap,
            )
        },
        emulated=True,
    )


def free_bytes(cluster: Cluster, device: Device, work: Workload, zero_stage: int) -> float:
    """Bytes of a device that neither training state nor what is reserved takes; may be negative."""
    state = state_bytes(work.model.num_parameters, zero_stage, cluster.world_size, work.value_bytes)
    return usable_bytes(cluster, device, work, zero_stage) - state


def usable_bytes(cluster: Cluster, device: Device, work: Workload, zero_stage: int) -> float:
    """Bytes of a device for state and activations; at ZeRO-3 two gathered layers are set aside."""
    gathered = 2 * work.model.layer_parameters * work.value_bytes if zero_stage == 3 else 0
    return (device.memory_gib * cluster.memory_fraction - cluster.reserved_gib) * 2**30 - gathered


def compare(
    profile: ClusterProfile,
    *,
    global_batch_size: int,
    zero_stage: int,
    token_flops: float | None = None,
    strategies: Sequence[str] = STRATEGIES,
) -> tuple[StrategyResult, ...]:
    """Every strategy on one profile, side by side.

    Args:
        profile: Measured or simulated.
        global_batch_size: Samples per optimizer step.
        zero_stage: 0 to 3.
        token_flops: FLOPs per token for MFU; None: 6 per parameter.
        strategies: Names, in the order of the result.

    Returns:
        One result per strategy; a strategy without a plan says why.

    Raises:
        PlanError, ProfileError: The request itself is wrong.
    """
    for strategy in strategies:
        check_request(profile, global_batch_size, zero_stage, strategy, None)
    results = []
    for strategy in strategies:
        try:
            plan = find_plan(profile, global_batch_size=global_batch_size, zero_stage=zero_stage, strategy=strategy)
        except PlanError as problem:
            results.append(_no_plan(strategy, str(problem)))
        else:
            results.append(evaluate(profile, plan, token_flops=token_flops))
    return tuple(results)


def evaluate(profile: ClusterProfile, plan: Plan, *, token_flops: float | None = None) -> StrategyResult:
    """What a plan gives on a profile; arguments as `compare`, errors as `step_time`."""
    breakdown = break_down_plan(profile, plan)
    tokens = tokens_per_s(plan.global_batch_size, profile.seq_len, breakdown.step_time_s)
    per_token = flops_per_token(profile.num_parameters) if token_flops is None else token_flops
    return StrategyResult(
        strategy=plan.strategy,
        plan=plan,
        breakdown=breakdown,
        problem="",
        samples_per_s=samples_per_s(plan.global_batch_size, breakdown.step_time_s),
        tokens_per_s=tokens,
        idle_fraction=idle_fraction(breakdown.compute_time_s),
        idle_fractions=idle_fractions(breakdown.compute_time_s),
        mfu=mfu(tokens, per_token, [rank.peak_flops for rank in profile.ranks]) if profile.seq_len else None,
    )


def _no_plan(strategy: str, problem: str) -> StrategyResult:
    return StrategyResult(
        strategy=strategy,
        plan=None,
        breakdown=None,
        problem=problem,
        samples_per_s=0.0,
        tokens_per_s=0.0,
        idle_fraction=0.0,
        idle_fractions=(),
        mfu=None,
    )


def _room_for_samples(cluster: Cluster, device: Device, work: Workload, zero_stage: int) -> int:
    free = free_bytes(cluster, device, work, zero_stage)
    per_sample = work.model.activation_bytes(checkpointing=work.checkpointing) * work.value_bytes / 2
    return max(0, min(_LARGEST_SIZE, int(free / per_sample)))


def _curve(device: Device, work: Workload, room: int) -> tuple[tuple[Measurement, ...], int]:
    shape = work.model
    factor = 4.0 / 3.0 if work.checkpointing else 1.0
    if work.table is None:
        # The formula is linear in the size, so two points say it all.
        sizes: tuple[int, ...] = (1, max(2, room))
        times = [factor * _formula_time_s(device, shape, size) for size in sizes]
    else:
        measured = work.table.select(model=shape.name, seq_len=shape.seq_len, dtype=TABLE_DTYPES[work.dtype])
        if device.table_name not in measured:
            raise ProfileError(
                f"the latency table has no {TABLE_DTYPES[work.dtype]} times of {shape.name} with {shape.seq_len} "
                f"tokens on {device.name}; it has {', '.join(sorted(measured)) or 'none'}."
            )
        layer_times = measured[device.table_name].layer_time_s
        sizes = tuple(range(1, len(layer_times) + 1))
        times = [factor * shape.num_layers * t for t in layer_times]
        room = min(room, len(sizes))
    points = tuple(
        Measurement(micro_batch_size=size, step_time_s=seconds, peak_memory_bytes=0)
        for size, seconds in zip(sizes, times, strict=True)
    )
    return points, room


def _formula_time_s(device: Device, shape: ModelShape, size: int) -> float:
    layer = device.layer_time_s(
        parameters=shape.layer_parameters, hidden_size=shape.hidden_size, seq_len=shape.seq_len, micro_batch_size=size
    )
    tokens = shape.seq_len * size
    moved = device.weight_passes * 2 * shape.head_parameters + _LOGIT_BYTES_MOVED * shape.vocab_size * tokens
    head = 6.0 * shape.head_parameters * tokens / (device.efficiency * device.peak_tflops * 1e12)
    return shape.num_layers * layer + head + moved / (device.bandwidth_gbytes_per_s * 1e9)


def _communication(cluster: Cluster, work: Workload, zero_stage: int) -> tuple[float, float]:
    """Seconds per micro-step and per step: what is communicated where, see `docs/simulation.md`."""
    payload = work.model.num_parameters * work.value_bytes
    once = cluster.ring_time_s(payload)
    if zero_stage in (0, 1):
        return 0.0, 2.0 * once
    if zero_stage == 2:
        return once, once
    return 3.0 * cluster.ring_time_s(payload, pieces=work.model.num_layers), 0.0


__all__ = [
    "StepBreakdown",
    "StrategyResult",
    "Workload",
    "break_down_plan",
    "compare",
    "evaluate",
    "free_bytes",
    "simulated_profile",
    "state_bytes",
    "step_time",
    "usable_bytes",
]
