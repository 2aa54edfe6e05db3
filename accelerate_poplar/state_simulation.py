"""What uneven shares of the training state would bring on a cluster that need not exist. Everything here is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .cluster import Cluster
from .errors import InsufficientMemoryError
from .model_shape import ModelShape
from .profiles import ClusterProfile
from .simulate import Workload, simulated_profile, usable_bytes
from .state_memory import StateMemory
from .state_plan import COMMUNICATION_FACTOR, StatePlan, find_state_plan, plan_with_fractions

_MOST_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class SharesComparison:
    """The best plans with even shares and with free ones."""

    even: StatePlan | None
    """With even shares; None: they do not fit."""
    free: StatePlan | None
    """With the shares that are best, even or not; None: none fit."""

    @property
    def speedup(self) -> float | None:
        """Step time with even shares over that with free ones; None where either does not fit."""
        if self.even is None or self.free is None:
            return None
        return self.even.plan.predicted_step_time_s / self.free.plan.predicted_step_time_s


def simulated_state_memory(
    cluster: Cluster, work: Workload, *, zero_stage: int, largest_micro_batch: int
) -> tuple[StateMemory, ...]:
    """Every rank's memory: 12 bytes of optimizer state per parameter (8 with fp32 weights), activations by formula.

    Args:
        cluster: Hosts, devices and links.
        work: Model, dtype and curves.
        zero_stage: 1, 2 or 3.
        largest_micro_batch: Largest micro-batch to consider, in samples.
    """
    count, element = work.model.num_parameters, work.value_bytes
    parts = {1: count * (12 if element == 2 else 8), 2: count * element, 3: count * element}
    per_sample = work.model.activation_bytes(checkpointing=work.checkpointing) * element / 2
    return tuple(
        StateMemory(
            memory_bytes=usable_bytes(cluster, cluster.host_of(rank).device, work, zero_stage),
            fixed_bytes=float(sum(part for stage, part in parts.items() if stage > zero_stage)),
            sharded_bytes=float(sum(part for stage, part in parts.items() if stage <= zero_stage)),
            activation_bytes=tuple(per_sample * size for size in range(largest_micro_batch + 1)),
        )
        for rank in range(cluster.world_size)
    )


def compare_shares(
    cluster: Cluster,
    work: Workload,
    *,
    zero_stage: int,
    global_batch_size: int,
    communication_factor: float = COMMUNICATION_FACTOR,
) -> SharesComparison:
    """Plan with even shares and with free ones.

    Args:
        cluster: Hosts, devices and links.
        work: Model, dtype and curves.
        zero_stage: 1, 2 or 3.
        global_batch_size: Samples per optimizer step.
        communication_factor: Time of uneven exchanges over that of even ones.
    """
    profile = simulated_profile(cluster, work, zero_stage=zero_stage)
    limit = _largest_known(profile, work, global_batch_size)
    memory = simulated_state_memory(cluster, work, zero_stage=zero_stage, largest_micro_batch=limit)
    limits = [limit] * cluster.world_size
    even = free = None
    try:
        even = plan_with_fractions(
            profile,
            memory,
            [1.0 / cluster.world_size] * cluster.world_size,
            global_batch_size=global_batch_size,
            zero_stage=zero_stage,
            max_micro_batch_size=limits,
        )
    except InsufficientMemoryError:
        even = None
    try:
        free = find_state_plan(
            profile,
            memory,
            global_batch_size=global_batch_size,
            zero_stage=zero_stage,
            max_micro_batch_size=limits,
            communication_factor=communication_factor,
        )
    except InsufficientMemoryError:
        free = None
    return SharesComparison(even=even, free=free)


def largest_model(cluster: Cluster, work: Workload, *, zero_stage: int, uneven: bool) -> ModelShape | None:
    """The model with most layers of the workload's kind that leaves every rank room for one sample.

    Args:
        cluster: Hosts, devices and links.
        work: Its model sets the kind of layer; tables of measured latencies are for one model and not used.
        zero_stage: 1, 2 or 3.
        uneven: Whether shares may be uneven.

    Returns:
        The model; None: not even one layer fits.
    """
    low, high = 0, _MOST_LAYERS
    while low < high:
        middle = (low + high + 1) // 2
        memory = simulated_state_memory(
            cluster, _with_layers(work, middle), zero_stage=zero_stage, largest_micro_batch=1
        )
        low, high = (middle, high) if fits(memory, uneven=uneven) else (low, middle - 1)
    return None if low == 0 else _with_layers(work, low).model


def fits(memory: Sequence[StateMemory], *, uneven: bool) -> bool:
    """Whether every rank has room for one sample beside its share of the training state.

    Args:
        memory: One entry per rank.
        uneven: Whether shares may be uneven.
    """
    room = [float(own.largest_shares()[1]) for own in memory]
    return (sum(room) >= 1.0 and min(room) > 0.0) if uneven else min(room) >= 1.0 / len(memory)


def _with_layers(work: Workload, layers: int) -> Workload:
    model = work.model
    outside = model.num_parameters - model.num_layers * model.layer_parameters
    changed = replace(model, num_layers=layers, num_parameters=outside + layers * model.layer_parameters)
    return replace(work, model=changed, table=None)


def _largest_known(profile: ClusterProfile, work: Workload, global_batch_size: int) -> int:
    """A table of measured times has no sizes beyond its last."""
    if work.table is None:
        return global_batch_size
    return min(global_batch_size, *(rank.points[-1].micro_batch_size for rank in profile.ranks))
