"""What a profile would be with other ranks of the same kinds: fewer, or more. An estimate, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .errors import PlanError
from .profiles import ClusterProfile, RankProfile, StageProfile

_SHARDED_BYTES = {"fp32": {0: 0, 1: 8, 2: 12, 3: 16}}
_SHARDED_BYTES_16_BIT = {0: 0, 1: 12, 2: 14, 3: 16}


def resize(profile: ClusterProfile, ranks: Sequence[int]) -> ClusterProfile:
    """The profile of a cluster made of the given ranks; a rank named twice gets a twin.

    - Communication is scaled as a ring's: by (W' - 1)/W' over (W - 1)/W. Whether the slowest link stays is not
      known from a profile. With one rank it is 0; from one rank it stays what it was.
    - Training state that a stage shards weighs more on fewer ranks: with Adam 12, 14, 16 bytes per parameter at ZeRO
      1, 2, 3 (8, 12, 16 in fp32). Caps move by that many bytes over the measured memory per sample; they stay where
      memory was not measured, and a cap of 0 stays 0.

    Args:
        profile: The measured cluster.
        ranks: Ranks of `profile`, in the order of the new ranks; at least one.

    Raises:
        PlanError: `ranks` is empty or names a rank that does not exist.
    """
    if not ranks or not all(0 <= rank < profile.world_size for rank in ranks):
        raise PlanError(f"ranks {list(ranks)} are not among 0 to {profile.world_size - 1}, or there are none.")
    chosen = [profile.ranks[rank] for rank in ranks]
    return replace(
        profile,
        ranks=tuple(replace(rank, rank=number) for number, rank in enumerate(chosen)),
        zero_stages={
            number: _resize_stage(profile, number, stage, ranks) for number, stage in profile.zero_stages.items()
        },
    )


def _resize_stage(profile: ClusterProfile, zero_stage: int, stage: StageProfile, ranks: Sequence[int]) -> StageProfile:
    before, after = profile.world_size, len(ranks)
    factor = 1.0 if before == 1 else ((after - 1) / after) / ((before - 1) / before)
    per_parameter = _SHARDED_BYTES.get(profile.dtype, _SHARDED_BYTES_16_BIT)[zero_stage]
    freed = profile.num_parameters * per_parameter * (1.0 / before - 1.0 / after)
    caps = tuple(_moved_cap(profile.ranks[rank], stage.max_micro_batch_size[rank], freed) for rank in ranks)
    return replace(
        stage,
        max_micro_batch_size=caps,
        per_micro_step_s=stage.per_micro_step_s * factor,
        per_step_s=stage.per_step_s * factor,
    )


def _moved_cap(rank: RankProfile, cap: int, freed_bytes: float) -> int:
    measured = [point for point in rank.points if point.peak_memory_bytes > 0]
    if cap == 0 or len(measured) < 2:
        return cap
    first, last = measured[0], measured[-1]
    per_sample = (last.peak_memory_bytes - first.peak_memory_bytes) / (last.micro_batch_size - first.micro_batch_size)
    if per_sample <= 0.0:
        return cap
    # Rounding down in both directions: what is not certain to fit does not count.
    return max(0, cap + int(freed_bytes // per_sample))
