"""What a rank's memory leaves for its share of the training state, and the fractions that follow from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .curve import FloatArray
from .errors import PlanError, ProfileError
from .profiles import ClusterProfile, RankProfile

TOLERANCE = 1e-9
"""Shares closer than this are equal, whatever the rounding."""

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_ADAM_BYTES = 12
"""fp32 master copy and two moments per trainable parameter; ZeRO keeps the copy also in fp32."""


@dataclass(frozen=True, kw_only=True)
class StateMemory:
    """One rank's memory and what competes for it, at one ZeRO stage."""

    memory_bytes: float
    """What training may use on this rank, in bytes."""
    fixed_bytes: float
    """Held whatever the share and the micro-batch: unsharded weights and gradients, buffers."""
    sharded_bytes: float
    """The stage's sharded state, all ranks' together, if it were held here; above 0."""
    activation_bytes: tuple[float, ...]
    """Needed by a micro-batch on top, index = samples; [0] = 0, not decreasing."""
    step_fixed_bytes: float = 0.0
    """As `fixed_bytes`, during the optimizer step."""
    step_sharded_bytes: float = 0.0
    """As `sharded_bytes`, during the optimizer step, its temporaries included; 0: the step sets no limit of its own."""
    offloaded: bool = False
    """True: figures for a rank that keeps its optimizer on the host."""

    def largest_shares(self) -> FloatArray:
        """Largest share of the state this rank can hold beside a micro-batch; index = samples, not increasing.

        A rank without samples still runs one of weight 0 to take part in the collectives, so [0] equals [1]. Negative
        where the micro-batch does not fit even with no state at all.
        """
        activations = np.array(self.activation_bytes)
        activations[0] = activations[min(1, activations.size - 1)]
        shares = (self.memory_bytes - self.fixed_bytes - activations) / self.sharded_bytes
        if self.step_sharded_bytes > 0.0:
            shares = np.minimum(shares, (self.memory_bytes - self.step_fixed_bytes) / self.step_sharded_bytes)
        return np.minimum.accumulate(shares)

    def cap(self, fraction: float) -> int:
        """Largest micro-batch that fits beside a share of the state; 0 also where the share itself does not fit."""
        return max(0, int(np.count_nonzero(self.largest_shares() >= fraction - TOLERANCE)) - 1)

    def held_bytes(self, fraction: float) -> float:
        """Bytes of sharded state a share comes to."""
        return fraction * self.sharded_bytes


def smallest_share(world_size: int) -> float:
    """The share no rank goes below: every rank takes part in every exchange of state."""
    return min(0.001, 0.1 / world_size)


def fractions_for(memory: Sequence[StateMemory], largest_micro_batch: Sequence[int]) -> tuple[float, ...]:
    """The most equal shares that leave every rank room for its largest micro-batch.

    Ranks with room for an equal part of what is left get it, the others all they have room for.

    Args:
        memory: One entry per rank.
        largest_micro_batch: Samples, one entry per rank.

    Raises:
        PlanError: The ranks together have no room for the whole state.
    """
    room = [float(own.largest_shares()[size]) for own, size in zip(memory, largest_micro_batch, strict=True)]
    if math.fsum(room) < 1.0 - TOLERANCE or min(room) <= 0.0:
        raise PlanError(
            f"beside micro-batches of {list(largest_micro_batch)} samples the ranks have room for shares "
            f"{[round(share, 4) for share in room]} of the training state, together less than 1. Use smaller "
            "micro-batches or more memory."
        )
    fractions = [0.0] * len(room)
    left, open_ranks = 1.0, sorted(range(len(room)), key=lambda rank: room[rank])
    while open_ranks:
        rank = open_ranks.pop(0)
        fractions[rank] = min(room[rank], left / (len(open_ranks) + 1))
        left -= fractions[rank]
    return tuple(fraction / math.fsum(fractions) for fraction in fractions)


def memory_from_profile(
    profile: ClusterProfile,
    zero_stage: int,
    *,
    usable_bytes: Sequence[float],
    largest_micro_batch: int,
    trainable: int | None = None,
) -> tuple[StateMemory, ...]:
    """Every rank's memory from the measured points of a profile, with Adam's state.

    The measured peaks hold whole weights and gradients, which are taken off. Between points the activations are
    linear; beyond the last, the slope of the last two.

    Args:
        profile: With memory measured at two sizes or more on every rank.
        zero_stage: 1, 2 or 3.
        usable_bytes: What training may use, one entry per rank.
        largest_micro_batch: Last size of the table, in samples.
        trainable: Trainable parameters; None: all of them.

    Raises:
        PlanError: The stage shards nothing.
        ProfileError: Memory was not measured on a rank; names it.
    """
    if zero_stage not in (1, 2, 3):
        raise PlanError(f"ZeRO stage {zero_stage} shards no training state; uneven shares need stage 1, 2 or 3.")
    element = _ELEMENT_BYTES[profile.dtype]
    trained = profile.num_parameters if trainable is None else trainable
    parts = {1: _ADAM_BYTES * trained, 2: element * trained, 3: element * profile.num_parameters}
    whole = parts[2] + parts[3]
    base = StateMemory(
        memory_bytes=0.0,
        fixed_bytes=float(sum(count for stage, count in parts.items() if stage > zero_stage)),
        sharded_bytes=float(sum(count for stage, count in parts.items() if stage <= zero_stage)),
        activation_bytes=(0.0,),
    )
    return tuple(
        replace(
            base,
            memory_bytes=float(usable),
            activation_bytes=_activations(rank, whole, largest_micro_batch),
        )
        for rank, usable in zip(profile.ranks, usable_bytes, strict=True)
    )


def _activations(rank: RankProfile, whole_bytes: float, largest: int) -> tuple[float, ...]:
    measured = [(p.micro_batch_size, p.peak_memory_bytes - whole_bytes) for p in rank.points if p.peak_memory_bytes]
    if len(measured) < 2:
        raise ProfileError(
            f"rank {rank.rank}: memory was measured at {len(measured)} micro-batch sizes; shares of the training state "
            "need two or more. Profile again with `accelerate-poplar profile`."
        )
    sizes, counts = (np.array(column, dtype=np.float64) for column in zip(*measured, strict=True))
    wanted = np.arange(1, largest + 1, dtype=np.float64)
    slope = (counts[-1] - counts[-2]) / (sizes[-1] - sizes[-2])
    table = np.where(wanted > sizes[-1], counts[-1] + slope * (wanted - sizes[-1]), np.interp(wanted, sizes, counts))
    return (0.0, *(float(count) for count in np.maximum.accumulate(np.maximum(table, 0.0))))
