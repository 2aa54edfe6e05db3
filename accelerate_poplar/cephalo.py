"""What uneven training state would bring: Cephalo's cost model (Guo et al., ICS 2025), for the simulator only.

Compute and state are decoupled: a rank's share of the parameters, gradients and optimizer state follows the memory its
micro-batches leave free, so that the cluster's memory is one pool. Per layer, communication runs beside compute:
forward = max(all-gather, compute), backward = max(all-gather + reduce-scatter, compute). Uneven shards cost 1.25 times
the collectives of even ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .cluster import Cluster
from .curve import FloatArray
from .errors import InsufficientMemoryError
from .search_levels import fill
from .search_lockstep import plan_lockstep
from .simulate import Workload, simulated_profile, state_bytes, usable_bytes
from .step_model import RankType, group_ranks

UNEVEN_COST = 1.25
"""Time of a collective over uneven shards, in multiples of the even one."""

_FORWARD_SHARE = 1.0 / 3.0


@dataclass(frozen=True, kw_only=True)
class CephaloResult:
    """One optimizer step at ZeRO-3 with uneven and with even state, under the same cost model; simulated."""

    step_time_s: float
    """Seconds with uneven state."""
    even_state_step_time_s: float
    """Seconds with even state; infinite when some rank has no room for its state and one sample."""
    max_micro_batch_size: tuple[int, ...]
    """Largest micro-batch per rank that uneven state makes room for."""
    state_fraction: tuple[float, ...]
    """Each rank's share of the training state; sums to 1."""

    @property
    def gain(self) -> float:
        """Even step time over uneven step time; above 1 where uneven state is faster."""
        return self.even_state_step_time_s / self.step_time_s


def simulate_cephalo(cluster: Cluster, work: Workload, *, global_batch_size: int) -> CephaloResult:
    """Uneven state on a simulated cluster, with exact planning of micro-batches on both sides.

    All ranks' samples need the same activation memory, so the state fits beside a micro-step of B samples exactly
    when B samples and the whole state fit into the memory of all ranks together, and no rank's own samples exceed
    its own memory.

    Raises:
        InsufficientMemoryError: State and one sample do not fit into the cluster.
    """
    profile = simulated_profile(cluster, work, zero_stage=3)
    gather = cluster.ring_time_s(work.model.num_parameters * work.value_bytes, pieces=work.model.num_layers)
    overhead = max(rank.step_overhead_s for rank in profile.ranks)
    per_sample = work.model.activation_bytes(checkpointing=work.checkpointing) * work.value_bytes / 2
    whole_state = state_bytes(work.model.num_parameters, 3, 1, work.value_bytes)
    usable = [usable_bytes(cluster, cluster.host_of(r).device, work, 3) for r in range(cluster.world_size)]
    alone = [max(0, int(room / per_sample)) for room in usable]
    pool = int((sum(max(0.0, room) for room in usable) - whole_state) / per_sample)
    if pool < 1 or not any(alone):
        raise InsufficientMemoryError(
            f"{whole_state / 2**30:.1f} GiB of training state and one sample ({per_sample / 2**30:.1f} GiB) do not "
            f"fit into the {sum(max(0.0, room) for room in usable) / 2**30:.1f} GiB of all ranks together."
        )
    caps = _caps_within_pool(group_ranks(profile, alone), pool, cluster.world_size)
    left = [max(0.0, room - cap * per_sample) for room, cap in zip(usable, caps, strict=True)]
    even_caps = profile.stage(3).max_micro_batch_size
    even = float("inf")
    if min(even_caps) > 0:
        even = _best_time(group_ranks(profile, even_caps), global_batch_size, gather)
    return CephaloResult(
        step_time_s=_best_time(group_ranks(profile, caps), global_batch_size, UNEVEN_COST * gather) + overhead,
        even_state_step_time_s=even + overhead,
        max_micro_batch_size=tuple(caps),
        state_fraction=tuple(room / sum(left) for room in left),
    )


def _caps_within_pool(types: Sequence[RankType], pool: int, world_size: int) -> list[int]:
    """The largest micro-step that fits, given out so that it ends as early as possible: per-rank caps."""
    room = sum(kind.count * kind.curve.max_micro_batch_size for kind in types)
    shares = fill([kind.curve.times() for kind in types], [kind.count for kind in types], min(pool, room))
    caps = [0] * world_size
    for kind, share in zip(types, shares, strict=True):
        for position, rank in enumerate(kind.ranks):
            caps[rank] = share.of(position)
    return caps


def _best_time(types: Sequence[RankType], global_batch_size: int, gather_s: float) -> float:
    types = [replace(kind, step_overhead_s=0.0) for kind in types]

    def cost(seconds: FloatArray) -> FloatArray:
        forward = np.maximum(gather_s, _FORWARD_SHARE * seconds)
        return forward + np.maximum(2.0 * gather_s, (1.0 - _FORWARD_SHARE) * seconds)

    sizes = plan_lockstep(types, global_batch_size, cost)
    slowest: FloatArray | None = None
    for kind in types:
        for own in {sizes[rank] for rank in kind.ranks}:
            times = kind.curve.times()[np.array(own, dtype=np.int64)]
            slowest = times if slowest is None else np.maximum(slowest, times)
    return float(cost(slowest).sum()) if slowest is not None else float("inf")
