"""Unequal shares of the training state under stock DeepSpeed: the rank with little memory carries less of it.

    with uneven_state((0.75, 0.25), zero_stage=2, deepspeed_config=config):
        model, optimizer = accelerator.prepare(model, optimizer)

DeepSpeed engines built inside the block hold unequal shares for as long as they live; DeepSpeed itself is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ._compat import ENGINE_OPTIMIZER, STAGE3_OPTIMIZER, ZERO_INIT, require_deepspeed, substituted
from .comm import Ranks, agree, connect
from .errors import CompatibilityError, ConfigError
from .state_layout import StateShares
from .state_refusals import check_config, offloads_optimizer


@contextmanager
def uneven_state(
    fractions: Sequence[float] | None,
    *,
    zero_stage: int,
    deepspeed_config: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Iterator[None]:
    """Build DeepSpeed engines whose ranks hold unequal shares of the training state.

    Enter it on all ranks, after the process group exists and before the engine is built. Under ZeRO stage 3 a
    model created inside it with `deepspeed.zero.Init` is sharded unevenly from the start; one created before is cut
    again, parameter by parameter, when the engine is built.

    Ranks may differ in whether their config offloads the optimizer to the host; under ZeRO stage 3 that works only
    inside this block, also with even shares.

    Args:
        fractions: Share of each rank, indexed by rank; each above 0, together 1. None: even shares.
        zero_stage: ZeRO stage of the engine, 1 to 3.
        deepspeed_config: This rank's engine config, to refuse what uneven shares cannot be combined with.
        ranks: The other ranks; None: those of the default process group.

    Raises:
        ConfigError: The fractions are impossible or not one per rank, or the config holds a feature that cannot be
            combined with them; raised before anything is built.
        RankError: Ranks were given different fractions.
        CompatibilityError: This DeepSpeed is not one that can do it, or no engine was built inside the block.
    """
    ranks = ranks or connect()
    shares = None if fractions is None else StateShares(fractions=tuple(fractions))
    if shares is not None:
        _check_shares(shares, ranks, deepspeed_config, zero_stage)
    mixed = len(set(ranks.gather(offloads_optimizer(deepspeed_config)))) > 1
    if shares is None and not (mixed and zero_stage == 3):
        yield
        return
    require_deepspeed()
    built: list[str] = []
    with substituted(_replacements(shares, zero_stage, mixed, built)):
        yield
    if not built:
        raise CompatibilityError(
            f"no DeepSpeed engine of ZeRO stage {zero_stage} was built inside uneven_state, so its shares "
            f"{fractions} hold nowhere. Build it there (accelerator.prepare, deepspeed.initialize), with that stage "
            "in its config."
        )


def _check_shares(shares: StateShares, ranks: Ranks, config: Mapping[str, Any] | None, zero_stage: int) -> None:
    check_config(config, zero_stage=zero_stage)
    if shares.world_size != ranks.world_size:
        raise ConfigError(
            f"there are {shares.world_size} state fractions {list(shares.fractions)} for {ranks.world_size} ranks. "
            "Give one fraction per rank."
        )
    agree(ranks, shares.fractions, "the shares of the training state")


def _replacements(
    shares: StateShares | None, zero_stage: int, mixed_offload: bool, built: list[str]
) -> dict[tuple[str, str], Any]:
    if zero_stage < 3 and shares is not None:
        from .state_shards_stage12 import uneven_stage12

        return {ENGINE_OPTIMIZER: uneven_stage12(shares, built)}
    from .state_shards_stage3 import mixed_offload_stage3, uneven_init, uneven_stage3

    if shares is None:
        return {STAGE3_OPTIMIZER: mixed_offload_stage3(built)}
    init = uneven_init(shares)
    optimizer = uneven_stage3(shares, init, built, norms_in_fp32=mixed_offload)
    return {STAGE3_OPTIMIZER: optimizer, **dict.fromkeys(ZERO_INIT, init)}


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """Bytes of training state one rank really holds."""

    parameters: int
    """Weights in the compute dtype: this rank's shard at ZeRO stage 3, all of them below."""
    gradients: int
    """Gradients of this rank's shard, as they are at the moment; 0 between steps at ZeRO stages 1 and 2."""
    master: int
    """fp32 master copy; 0 where it is the weights themselves (fp32 at ZeRO stage 3)."""
    moments: int
    """Optimizer state other than the master copy; 0 before the first step."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.master + self.moments


def held_bytes(engine: Any) -> HeldBytes:
    """What this rank holds of an engine's training state.

    Args:
        engine: A DeepSpeed engine of ZeRO stage 1, 2 or 3.

    Raises:
        ConfigError: The engine does not shard its state.
    """
    optimizer: Any = getattr(engine, "optimizer", None)
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        weights = [p.ds_tensor for p in engine.module.parameters()]
        masters = list(optimizer.fp32_partitioned_groups_flat)
        gradients = [optimizer.grad_partitions_flat_buffer]
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        weights = list(engine.module.parameters())
        masters = list(optimizer.single_partition_of_fp32_groups)
        gradients = [t for group in optimizer.averaged_gradients.values() for t in group or ()]
    else:
        raise ConfigError("the engine holds no sharded training state; ZeRO stage 1, 2 or 3 is needed.")
    moments = [
        t for m in masters for t in optimizer.optimizer.state.get(m, {}).values() if isinstance(t, torch.Tensor)
    ]
    known: set[int] = set()
    return HeldBytes(
        parameters=_bytes_of(weights, known),
        master=_bytes_of(masters, known),
        gradients=_bytes_of(gradients, known),
        moments=_bytes_of(moments, known),
    )


def _bytes_of(tensors: Sequence[torch.Tensor], known: set[int]) -> int:
    """Bytes of the tensors; one that begins where an earlier one did is the same memory and not counted again."""
    total = 0
    for tensor in tensors:
        if tensor.numel() and tensor.data_ptr() not in known:
            known.add(tensor.data_ptr())
            total += tensor.numel() * tensor.element_size()
    return total
