"""Where every rank's shard of the training state begins and ends, for shares that need not be equal.

Sharded code usually finds a shard at `shard_size * rank`. `ShardSize` keeps that expression true for unequal shards:
it is this rank's size as a number, and its product with a rank is that rank's start.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .config_checks import SHARE_TOLERANCE
from .errors import ConfigError

LAYOUT_VERSION = 1
"""Number of the rule by which `StateShares.bounds` cuts; recorded in checkpoints."""

_LARGEST_BLOCK = 256
"""Elements to whose multiples cuts are rounded where shards are large: aligned copies are the fast ones."""
_ROUNDING = 0.005
"""Largest part of the smallest shard that rounding to a block may move."""


@dataclass(frozen=True, kw_only=True)
class StateShares:
    """The share of the sharded training state that each rank holds.

    Raises:
        ConfigError: A fraction is not above 0, or they do not sum to 1.
    """

    fractions: tuple[float, ...]
    """Share per rank, indexed by rank; each above 0, together 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fractions", tuple(float(fraction) for fraction in self.fractions))
        wrong = [
            f"rank {rank} has {fraction}"
            for rank, fraction in enumerate(self.fractions)
            if not (math.isfinite(fraction) and fraction > 0.0)
        ]
        if wrong:
            raise ConfigError(
                "state fractions must be finite and above 0, because every rank takes part in every exchange, "
                f"but {', '.join(wrong)}. Give such a rank a small share, 0.001 say, or leave it out of the run."
            )
        total = math.fsum(self.fractions)
        if abs(total - 1.0) > SHARE_TOLERANCE:
            raise ConfigError(
                f"state fractions {list(self.fractions)} sum to {total:.6g}; they are shares of the whole and must "
                "sum to 1."
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.fractions)

    def bounds(self, numel: int, *, block: int = 1) -> tuple[int, ...]:
        """Cut `numel` elements into one shard per rank.

        Every shard has at least one block. Cuts fall on multiples of the block, and on multiples of up to 256
        elements where that moves no shard by more than 0.5% of the smallest one.

        Args:
            numel: Elements to cut. Fewer than one block per rank are padded to that many.
            block: Smallest unit, in elements; a power of two.

        Returns:
            Shape (world_size + 1,): rank r holds elements [bounds[r], bounds[r + 1]).
        """
        return _bounds(self.fractions, numel, block)

    def size(self, numel: int, rank: int, *, block: int = 1) -> ShardSize:
        """The size of one rank's shard of `numel` elements, in a form that knows all starts; arguments as `bounds`."""
        return ShardSize(self.bounds(numel, block=block), rank)


class ShardSize(int):
    """One rank's shard size, in elements; `size * r` is where the shard of rank r begins.

    Args:
        bounds: Shape (world_size + 1,), as `StateShares.bounds` gives them.
        rank: The rank whose size this is.
    """

    bounds: tuple[int, ...]

    def __new__(cls, bounds: Sequence[int], rank: int) -> ShardSize:
        """The size of `rank`'s shard."""
        size = super().__new__(cls, bounds[rank + 1] - bounds[rank])
        size.bounds = tuple(bounds)
        return size

    def __mul__(self, rank: int) -> int:
        """Start of a rank's shard; times the number of ranks, the end of the last one."""
        if not 0 <= rank < len(self.bounds):
            raise ValueError(f"{rank} is no rank of {len(self.bounds) - 1}: an uneven shard size has no such product.")
        return self.bounds[rank]

    __rmul__ = __mul__

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Pickled, it is a plain number."""
        return int, (int(self),)

    @property
    def total(self) -> int:
        """Elements of all shards together, padding included."""
        return self.bounds[-1]


class ShardTotal(int):
    """Elements of all shards together; divided by the number of ranks, it gives this rank's `ShardSize`."""

    own: ShardSize

    def __new__(cls, own: ShardSize) -> ShardTotal:
        """The total that `own` is a shard of."""
        total = super().__new__(cls, own.total)
        total.own = own
        return total

    def __floordiv__(self, world_size: int) -> int:
        """This rank's shard size."""
        if world_size != len(self.own.bounds) - 1:
            raise ValueError(f"cut for {len(self.own.bounds) - 1} ranks, not for {world_size}.")
        return self.own

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Pickled, it is a plain number."""
        return int, (int(self),)


@functools.lru_cache(maxsize=65536)
def _bounds(fractions: tuple[float, ...], numel: int, block: int) -> tuple[int, ...]:
    world_size = len(fractions)
    if numel < world_size * block:
        return tuple(block * rank for rank in range(world_size + 1))
    unit = block
    while unit * 2 <= min(_LARGEST_BLOCK, _ROUNDING * min(fractions) * numel):
        unit *= 2
    units = numel // unit
    cuts = [0]
    for rank in range(1, world_size):
        wanted = round(math.fsum(fractions[:rank]) * numel / unit)
        cuts.append(max(wanted, cuts[-1] + 1))
    for rank in range(world_size - 1, 0, -1):
        cuts[rank] = min(cuts[rank], units - (world_size - rank))
    return (*(cut * unit for cut in cuts), numel)
