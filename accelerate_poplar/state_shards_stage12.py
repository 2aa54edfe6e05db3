"""DeepSpeed's optimizer of ZeRO stages 1 and 2 with unequal shares.

Its own methods do nearly all of the work: they find a rank's part of a flat parameter group at
`partition_size * rank`, which a `ShardSize` answers for unequal parts. Norms, padding, averaging, offload and the step
itself are untouched.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, link_hp_params

from ._compat import rebind, require_stage12
from .errors import CompatibilityError
from .state_collectives import gather_shards
from .state_layout import ShardSize, StateShares
from .state_record import RECORD_KEY, check_record, share_record
from .state_refusals import check_engine

BLOCK = 2
"""Shards begin at multiples of this many elements: DeepSpeed wants them aligned to 4 bytes."""


class UnevenStage12(DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """`DeepSpeedZeroOptimizer` whose ranks hold the shares in `shares`; made by `uneven_stage12`."""

    shares: StateShares
    built: list[str]

    def __init__(self, init_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        check_engine(
            shares=self.shares.world_size,
            ranks=dist.get_world_size(group=kwargs.get("dp_process_group")),
            optimizer=init_optimizer,
            has_experts=bool(kwargs.get("has_moe_layers")),
        )
        super().__init__(init_optimizer, *args, **kwargs)
        self._check_layout()
        self.built.append(type(self).__name__)

    def _shard_size(self, group: int) -> ShardSize:
        rank = dist.get_rank(group=self.real_dp_process_group[group])
        return self.shares.size(self.bit16_groups_flat[group].numel(), rank, block=BLOCK)

    def _check_layout(self) -> None:
        """What the stock constructor made of the shares must be the shares."""
        for group, master in enumerate(self.single_partition_of_fp32_groups):
            wanted = self._shard_size(group)
            sizes = [t.numel() for t in self.parallel_partitioned_bit16_groups[group]]
            bounds = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
            if master.numel() != wanted or bounds != list(wanted.bounds):
                raise CompatibilityError(
                    f"parameter group {group}: DeepSpeed cut the training state at {bounds} with {master.numel()} "
                    f"elements here, wanted {list(wanted.bounds)}. This DeepSpeed does not support uneven state."
                )

    # ---- where shards begin ---------------------------------------------------------------------------------------

    def get_data_parallel_partitions(self, tensor: torch.Tensor, group_id: int) -> list[torch.Tensor]:
        """One view per rank of a flat group."""
        bounds = self.shares.bounds(tensor.numel(), block=BLOCK)
        return [tensor[start:end] for start, end in itertools.pairwise(bounds)]

    def get_partition_info(
        self, tensor_list: list[Any], partition_size: int, partition_id: int, param_padding: Any = None
    ) -> Any:
        """As the stock method, with this group's uneven size."""
        group = next(i for i, tensors in enumerate(self.round_robin_bit16_groups) if tensors is tensor_list)
        return super().get_partition_info(tensor_list, self._shard_size(group), partition_id, param_padding)

    def get_grad_position(self, group_id: int, tensor_list: list[Any], first_offset: int, partition_size: int) -> None:
        """As the stock method, with this group's uneven size."""
        super().get_grad_position(group_id, tensor_list, first_offset, self._shard_size(group_id))

    def initialize_gradient_partitioning_data_structures(self) -> None:
        """As the stock method, with uneven sizes, which everything later reads from `partition_size`."""
        self.partition_size = [self._shard_size(group) for group in range(len(self.bit16_groups_flat))]
        super().initialize_gradient_partitioning_data_structures()

    def _link_all_hp_params(self) -> None:
        def link(*, param_group_index: int, **kwargs: Any) -> None:
            size = self._shard_size(param_group_index)
            start = size * dist.get_rank(group=self.real_dp_process_group[param_group_index])
            kwargs |= {"partition_start": start, "partition_size": int(size)}
            link_hp_params(param_group_index=param_group_index, **kwargs)

        rebind(DeepSpeedZeroOptimizer._link_all_hp_params, link_hp_params=link)(self)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The stock state, and the shares it was cut by."""
        stage = 2 if self.partition_gradients else 1
        return {**super().state_dict(), RECORD_KEY: share_record(self.shares, zero_stage=stage)}

    def _load_legacy_checkpoint(self, state_dict_list: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        """As the stock method, after checking that the state was cut the same way."""
        rank = dist.get_rank(group=self.dp_process_group)
        check_record(state_dict_list[rank].get(RECORD_KEY), self.shares)
        super()._load_legacy_checkpoint(state_dict_list, *args, **kwargs)


def uneven_stage12(shares: StateShares, built: list[str]) -> type[UnevenStage12]:
    """The optimizer class for given shares.

    Args:
        shares: One share per rank.
        built: Every optimizer that is made of the class leaves its name here.

    Raises:
        CompatibilityError: This DeepSpeed is not built as expected.
    """
    require_stage12(DeepSpeedZeroOptimizer)
    methods = {
        "shares": shares,
        "built": built,
        "step": rebind(DeepSpeedZeroOptimizer.step, all_gather_dp_groups=_gather_groups),
        "update_lp_params": torch.no_grad()(
            rebind(DeepSpeedZeroOptimizer.update_lp_params, all_gather_dp_groups=_gather_groups)
        ),
    }
    return type("UnevenStage12", (UnevenStage12,), methods)


def _gather_groups(
    groups_flat: Any, partitioned_param_groups: list[list[torch.Tensor]], dp_process_group: list[Any], **_: Any
) -> None:
    """In place of DeepSpeed's gathering of updated weights; its buckets and alignment are not needed."""
    for shards, group in zip(partitioned_param_groups, dp_process_group, strict=True):
        gather_shards(shards, group)
