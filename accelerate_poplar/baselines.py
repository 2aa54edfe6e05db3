"""The strategies the optimum is compared with, each as published and no better."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import InsufficientMemoryError
from .step_model import RankType


def plan_even(
    types: Sequence[RankType], global_batch_size: int, *, micro_batch_size: int | None = None
) -> dict[int, tuple[int, ...]]:
    """What DeepSpeed does by itself: the same samples on every rank, in the same micro-batches.

    The micro-batch is the largest that fits on every rank; it fixes the number of micro-steps, over which the samples
    are then spread evenly. The last micro-step holds what is left of the global batch.

    Args:
        types: The ranks.
        global_batch_size: Samples to give out, at least 1.
        micro_batch_size: Largest micro-batch to use instead of the largest that fits.

    Raises:
        InsufficientMemoryError: Some rank cannot hold one sample, or not `micro_batch_size`.
    """
    ranks = sorted(rank for kind in types for rank in kind.ranks)
    tightest = min(types, key=lambda kind: kind.curve.max_micro_batch_size)
    cap = tightest.curve.max_micro_batch_size
    wanted = cap if micro_batch_size is None else micro_batch_size
    if cap < max(1, wanted):
        raise InsufficientMemoryError(
            f"rank {tightest.ranks[0]}: an even split gives every rank the same micro-batch, of at least "
            f"{max(1, wanted)} samples, but at most {cap} fit there. Use the strategy `optimal`, a smaller "
            "micro-batch, a higher ZeRO stage, or leave the rank out."
        )
    steps = -(-global_batch_size // (len(ranks) * wanted))
    size = -(-global_batch_size // (len(ranks) * steps))
    left = global_batch_size - (steps - 1) * size * len(ranks)
    base, extra = divmod(left, len(ranks))
    return {rank: (size,) * (steps - 1) + (base + (1 if i < extra else 0),) for i, rank in enumerate(ranks)}
