"""From what profiling found out about a rank's memory to what the planner of uneven shares asks."""

from __future__ import annotations

from collections.abc import Sequence

from .rank_memory import RankMemory
from .state_memory import StateMemory


def state_memory(
    memory: Sequence[RankMemory], zero_stage: int, *, largest_micro_batch: int, offloaded: bool = False
) -> tuple[StateMemory, ...]:
    """Every rank's memory for `find_state_plan`.

    Args:
        memory: One entry per rank, profiled with even shares.
        zero_stage: 1, 2 or 3.
        largest_micro_batch: Largest micro-batch to consider, in samples.
        offloaded: True: figures for ranks that keep their optimizer on the host, so that neither its state nor its
            temporaries are in the device's memory.
    """
    world_size = len(memory)
    return tuple(_of_rank(own, zero_stage, world_size, largest_micro_batch, offloaded) for own in memory)


def _of_rank(memory: RankMemory, zero_stage: int, world_size: int, largest: int, offloaded: bool) -> StateMemory:
    states = memory.states[zero_stage]
    shared, step = states.sharded(zero_stage), states.step
    whole = states.unsharded(zero_stage) - states.buffers
    if offloaded:
        shared, step = shared - states.optimizer, 0
    # Gradients are summed when the activations of a micro-batch are gone, whatever its size.
    needed = [max(memory.activations.at(size), states.reduction) for size in range(1, largest + 1)]
    return StateMemory(
        memory_bytes=float(memory.budget_bytes),
        fixed_bytes=float(whole + states.buffers),
        # Of a state of 0 bytes any share would fit: one byte keeps shares meaningful.
        sharded_bytes=float(max(1, shared * world_size)),
        activation_bytes=(0.0, *map(float, needed)),
        step_fixed_bytes=float(whole),
        step_sharded_bytes=float((shared - states.fresh_gradients + step) * world_size),
        offloaded=offloaded,
    )
