"""DeepSpeed's `zero.Init` and optimizer of ZeRO stage 3 with unequal shares.

Every parameter is cut by itself. The stock code finds a rank's slice at `ds_numel * rank`, which a `ShardSize` answers
for unequal slices; what moves slices between ranks is replaced, because it counts on equal ones.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import PARAM
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus, is_zero_param
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ._compat import rebind, require_stage3
from .errors import CompatibilityError
from .state_collectives import Sharded, ShardGathering, ShardGatherings, gather_shards, reduce_scatter_tensors
from .state_layout import ShardSize, ShardTotal, StateShares
from .state_record import RECORD_KEY, check_record, share_record
from .state_refusals import check_engine


class UnevenInit(Init):  # type: ignore[misc]
    """`deepspeed.zero.Init` that cuts parameters by the shares in `shares`; made by `uneven_init`."""

    shares: StateShares

    def _aligned_size(self, param: Sharded) -> ShardTotal:
        return ShardTotal(self.shares.size(param.ds_numel, self._partition_rank(param)))

    def _padding_size(self, param: Sharded) -> int:
        return int(self._aligned_size(param)) - int(param.ds_numel)

    def _convert_to_deepspeed_param(self, param: Sharded) -> None:
        super()._convert_to_deepspeed_param(param)
        param.all_gather_coalesced = self._gather_coalesced

    def _gather_coalesced(
        self, params: Iterable[Sharded], safe_mode: bool = False, quantize: bool = False
    ) -> ShardGatherings:
        """Start gathering parameters; in place of the stock method of the parameters, whose arguments it takes."""
        # Every rank must name the parameters in the same order; a caller's order may differ.
        wanted = sorted(params, key=lambda p: p.ds_id)
        for param in wanted:
            if param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(f"parameter is not sharded now: {param.ds_summary()}")
            param.ds_status = ZeroParamStatus.INFLIGHT
        alike: dict[tuple[str, int], list[Sharded]] = {}
        for param in wanted:
            alike.setdefault((str(param.ds_tensor.dtype), id(self.get_partition_dp_group(param))), []).append(param)
        return ShardGatherings(
            [
                ShardGathering(own, self.get_partition_dp_group(own[0]), self.shares.bounds)
                for _, own in sorted(alike.items())
            ]
        )

    def _all_gather(self, param_list: Sequence[Sharded], async_op: bool = False, hierarchy: Any = None) -> Any:
        gathering = self._gather_coalesced([p for p in param_list if p.ds_status == ZeroParamStatus.NOT_AVAILABLE])
        if async_op:
            return [gathering]
        gathering.wait()
        if not get_accelerator().resolves_data_dependency():
            get_accelerator().synchronize()
        return None

    def cut_again(self, param: Sharded) -> None:
        """Give a parameter that a stock `Init` has sharded this object's shares instead; a collective call."""
        param.all_gather()
        kept = {name: getattr(param, name) for name in ("ds_id", "ds_persist", "is_external_param", "item")}
        next_id = Init.param_id
        param.ds_tensor = None
        self._convert_to_deepspeed_param(param)
        Init.param_id = next_id
        for name, value in kept.items():
            setattr(param, name, value)
        param.partition()


class UnevenStage3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """`DeepSpeedZeroOptimizer_Stage3` whose ranks hold the shares in `shares`; made by `uneven_stage3`."""

    shares: StateShares
    init: type[UnevenInit]
    built: list[str]

    def __init__(self, module: torch.nn.Module, init_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        check_engine(
            shares=self.shares.world_size,
            ranks=dist.get_world_size(group=kwargs.get("dp_process_group")),
            optimizer=init_optimizer,
            has_experts=any(is_moe_param(parameter) for parameter in module.parameters()),
        )
        super().__init__(module, init_optimizer, *args, **kwargs)
        self._check_layout()
        self.built.append(type(self).__name__)

    def _check_layout(self) -> None:
        """What the stock constructor made of the shares must be the shares."""
        for number, group in enumerate(self.fp16_groups):
            wanted = sum(int(self._shard_size(param)) for param in group)
            found = self.fp32_partitioned_groups_flat[number].numel()
            if found != wanted or any(not isinstance(p.ds_tensor.ds_numel, ShardSize) for p in group):
                raise CompatibilityError(
                    f"sub-group {number}: DeepSpeed gave this rank {found} elements of training state, wanted "
                    f"{wanted}. This DeepSpeed does not support uneven state."
                )

    def _shard_size(self, param: Sharded) -> ShardSize:
        return self.shares.size(param.ds_numel, self._get_param_partition_rank(param))

    def initialize_ds_offload(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As the stock method; parameters that a stock `zero.Init` has sharded are cut again first."""
        sharded: list[Sharded] = [p for p in module.parameters() if is_zero_param(p)]
        stock = [p for p in sharded if not isinstance(p.ds_tensor.ds_numel, ShardSize)]
        if stock:
            init = self.init(
                data_parallel_group=stock[0].ds_process_group,
                dtype=stock[0].dtype,
                config_dict_or_path=kwargs.get("ds_config"),
                remote_device=stock[0].ds_tensor.device.type if _is_offloaded(stock[0]) else None,
                mpu=kwargs.get("mpu"),
            )
            for param in stock:
                init.cut_again(param)
        return super().initialize_ds_offload(module, *args, **kwargs)

    def _create_fp16_sub_groups(self, params_group: Sequence[Sharded]) -> list[list[Sharded]]:
        """As the stock method for equal shares.

        It counts a rank's own elements; ranks with unequal ones would form different numbers of sub-groups, and wait
        for each other forever in the reductions of each.
        """
        counted = [_EvenlyCounted(param, self.shares.world_size) for param in params_group]
        return [[c.param for c in group] for group in super()._create_fp16_sub_groups(counted)]

    # ---- state by parameter -------------------------------------------------------------------------------------

    def _fp32_state_allgather(self, param: Sharded, fp32_state_partition: torch.Tensor) -> torch.Tensor:
        size = self._shard_size(param)
        buffer = torch.empty(size.total, dtype=fp32_state_partition.dtype, device=param.device)
        shards = [buffer[start:end] for start, end in itertools.pairwise(size.bounds)]
        shards[self._get_param_partition_rank(param)].copy_(fp32_state_partition)
        gather_shards(shards, self._get_param_partition_group(param))
        return buffer.narrow(0, 0, param.ds_numel).view(param.ds_shape)

    def _own_shard(self, value: torch.Tensor, param: Sharded) -> torch.Tensor:
        """This rank's shard of a whole tensor; zeros where the ranks are more than its elements."""
        size, rank = self._shard_size(param), self._get_param_partition_rank(param)
        own = value.flatten()[size * rank : size * (rank + 1)]
        return torch.nn.functional.pad(own, (0, int(size) - own.numel()))

    def _as_if_even(self, value: torch.Tensor, param: Sharded) -> torch.Tensor:
        """A tensor that has this rank's shard where the stock code, counting on equal ones, looks for it."""
        own, rank = self._own_shard(value, param), self._get_param_partition_rank(param)
        return torch.nn.functional.pad(own, (rank * own.numel(), 0))

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Sharded) -> None:
        """As the stock method."""
        super().set_fp32_grad_for_param(self._as_if_even(value, param), param)

    def set_full_hp_param(self, value: torch.Tensor, param: Sharded, optim_state_key: str | None = None) -> None:
        """As the stock method."""
        if param.requires_grad:
            self.set_local_hp_param(self._own_shard(value, param), param, optim_state_key)

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[..., torch.Tensor], param_list: Sequence[Sharded]
    ) -> None:
        """As the stock method."""
        super().update_fp32_grad_for_param_vectorized(
            lambda gradient, param: self._as_if_even(update_func(gradient, param), param), param_list
        )

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The stock state, and the shares it was cut by."""
        return {**super().state_dict(), RECORD_KEY: share_record(self.shares, zero_stage=3)}

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        check_record(state_dict.get(RECORD_KEY), self.shares)
        super()._rigid_load_state_dict(state_dict, load_optimizer_states=load_optimizer_states)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """As the stock method, with a step counter for every sub-group.

        The stock method gives all of them one tensor, which an optimizer that counts in place (torch's) then raises once
        per sub-group and step.
        """
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        for master in self.fp32_partitioned_groups_flat:
            state = self.optimizer.state[master]
            if isinstance(state["step"], torch.Tensor):
                state["step"] = state["step"].clone()

    def load_hp_checkpoint_state(self, folder: str, key: str, param: Sharded | None = None) -> torch.Tensor:
        """This rank's shard of one state of one parameter in a universal checkpoint."""
        loaded = torch.load(os.path.join(folder, f"{key}.pt"), weights_only=False)
        whole = loaded[PARAM] if isinstance(loaded, dict) else loaded
        return self._own_shard(whole, param)


class _EvenlyCounted:
    """A parameter that says an equal share of it is held."""

    def __init__(self, param: Sharded, world_size: int) -> None:
        self.param = param
        self._share = -(-param.ds_numel // world_size)

    def partition_numel(self) -> int:
        return int(self._share)


def _is_offloaded(param: Sharded) -> bool:
    return bool(param.ds_tensor.device.type == "cpu" and get_accelerator().device_name() != "cpu")


def uneven_init(shares: StateShares) -> type[UnevenInit]:
    """The `zero.Init` for given shares.

    Args:
        shares: One share per rank.

    Raises:
        CompatibilityError: This DeepSpeed is not built as expected.
    """
    require_stage3(DeepSpeedZeroOptimizer_Stage3, Init)
    return type("UnevenInit", (UnevenInit,), {"shares": shares})


def uneven_stage3(
    shares: StateShares, init: type[UnevenInit], built: list[str], *, norms_in_fp32: bool = False
) -> type[UnevenStage3]:
    """The optimizer class for given shares.

    Args:
        shares: One share per rank.
        init: What `uneven_init` made for the same shares.
        built: Every optimizer that is made of the class leaves its name here.
        norms_in_fp32: As `mixed_offload_stage3`.

    Raises:
        CompatibilityError: This DeepSpeed is not built as expected.
    """

    def reduce_scatter(tensors: Sequence[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
        return reduce_scatter_tensors(tensors, group, shares.bounds)

    scatter = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
    stock = getattr(DeepSpeedZeroOptimizer_Stage3, scatter)
    members = {
        "shares": shares,
        "init": init,
        "built": built,
        scatter: torch.no_grad()(rebind(stock, reduce_scatter_coalesced=reduce_scatter)),
        **(_fp32_norms() if norms_in_fp32 else {}),
    }
    return type("UnevenStage3", (UnevenStage3,), members)


class MixedOffloadStage3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """`DeepSpeedZeroOptimizer_Stage3` on equal shares, where only some ranks offload their optimizer."""

    built: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.built.append(type(self).__name__)


def mixed_offload_stage3(built: list[str]) -> type[MixedOffloadStage3]:
    """The stock optimizer for ranks of which only some offload.

    Ranks that offload sum gradient norms in fp32, the others in fp64, and neither understands the other; here all use
    fp32.

    Args:
        built: Every optimizer that is made of the class leaves its name here.

    Raises:
        CompatibilityError: This DeepSpeed is not built as expected.
    """
    require_stage3(DeepSpeedZeroOptimizer_Stage3, Init)
    return type("MixedOffloadStage3", (MixedOffloadStage3,), {"built": built, **_fp32_norms()})


def _fp32_norms() -> dict[str, Any]:
    return {
        name: rebind(getattr(DeepSpeedZeroOptimizer_Stage3, name), get_norm_dtype=lambda: torch.float32)
        for name in ("get_grad_norm_direct", "_constant_buffered_norm2")
    }
