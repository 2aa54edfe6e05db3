"""Gathering and reducing shards of unequal sizes.

Neither library has a single call for it everywhere. NCCL takes lists of unequal tensors and runs them as one group of
broadcasts or reductions; gloo refuses them, so there each shard is a broadcast or reduction of its own, all in
flight at once. Either way no more bytes travel than with equal shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus

Sharded = Any
"""A `torch.nn.Parameter` as ZeRO-3 has furnished it, with its `ds_` attributes."""
Bounds = Callable[[int], tuple[int, ...]]
"""Elements of a tensor -> where each rank's shard of it begins; shape (world_size + 1,)."""


def gather_shards(shards: Sequence[torch.Tensor], group: Any, *, async_op: bool = False) -> list[Any]:
    """Fill every rank's shard with that rank's data, in place.

    Args:
        shards: One tensor per rank of the group, in rank order; this rank's holds the data it gives.
        group: The process group.
        async_op: Return without waiting.

    Returns:
        What to wait for; empty unless `async_op`.
    """
    rank = dist.get_rank(group=group)
    if torch.distributed.get_backend(group) == "nccl":
        works = [dist.all_gather(list(shards), shards[rank], group=group, async_op=True)]
    else:
        works = [
            dist.broadcast(shard, dist.get_global_rank(group, owner), group=group, async_op=True)
            for owner, shard in enumerate(shards)
        ]
    return works if async_op else _wait(works)


def reduce_shards(shards: Sequence[torch.Tensor], group: Any) -> torch.Tensor:
    """Sum every shard over the ranks on the rank that owns it; the other shards' contents are lost.

    Args:
        shards: One tensor per rank of the group, in rank order.
        group: The process group.

    Returns:
        This rank's shard, summed.
    """
    own: torch.Tensor = shards[dist.get_rank(group=group)]
    if torch.distributed.get_backend(group) == "nccl":
        dist.reduce_scatter(own, list(shards), group=group)
        return own
    _wait(
        [
            dist.reduce(shard, dist.get_global_rank(group, owner), group=group, async_op=True)
            for owner, shard in enumerate(shards)
        ]
    )
    return own


def _wait(works: list[Any]) -> list[Any]:
    for work in works:
        if work is not None:
            work.wait()
    return []


def reduce_scatter_tensors(tensors: Sequence[torch.Tensor], group: Any, bounds: Bounds) -> list[torch.Tensor]:
    """Average whole tensors over the ranks and keep this rank's shard of each.

    Args:
        tensors: Gradients, of any shapes, the same on every rank; they are used as scratch space.
        group: The process group.
        bounds: How a tensor is cut.

    Returns:
        One flat tensor each: this rank's shard without padding, possibly empty.
    """
    rank, world_size = dist.get_rank(group=group), dist.get_world_size(group=group)
    flat = [tensor.view(-1) for tensor in tensors]
    cuts = [_unpadded(bounds(tensor.numel()), tensor.numel()) for tensor in flat]
    if len(flat) == 1:
        buffer = flat[0]
    else:
        # Rank after rank, so that what one rank keeps of all tensors travels as one piece.
        buffer = torch.cat([t[c[r] : c[r + 1]] for r in range(world_size) for t, c in zip(flat, cuts, strict=True)])
    buffer.div_(world_size)
    sizes = [sum(c[r + 1] - c[r] for c in cuts) for r in range(world_size)]
    own = reduce_shards(torch.split(buffer, sizes), group)
    return list(torch.split(own, [c[rank + 1] - c[rank] for c in cuts]))


def _unpadded(cuts: Sequence[int], numel: int) -> list[int]:
    return [min(cut, numel) for cut in cuts]


class ShardGathering:
    """Several ZeRO-3 parameters on their way from shards to whole tensors; DeepSpeed calls this a handle.

    Args:
        params: Parameters whose status is INFLIGHT, all of one dtype; the same on every rank, in the same order.
        group: The process group they are sharded over.
        bounds: How a parameter is cut.
    """

    def __init__(self, params: Sequence[Sharded], group: Any, bounds: Bounds) -> None:
        self._params = params
        self._cuts = [bounds(param.ds_numel) for param in params]
        self._sizes = [
            [cuts[rank + 1] - cuts[rank] for cuts in self._cuts] for rank in range(dist.get_world_size(group=group))
        ]
        device = get_accelerator().current_device_name()
        own = [param.ds_tensor.to(device) for param in params]
        self._buffer = torch.empty(sum(map(sum, self._sizes)), dtype=own[0].dtype, device=device, requires_grad=False)
        self._shards = torch.split(self._buffer, [sum(sizes) for sizes in self._sizes])
        torch.cat(own, out=self._shards[dist.get_rank(group=group)])
        self._works = gather_shards(self._shards, group, async_op=True)
        self._complete = False

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait, then give every parameter its whole tensor.

        Args:
            handle_dependency: False: the caller orders the streams, and frees what is kept for them.
        """
        if self._complete:
            return
        _wait(self._works)
        if len(self._params) == 1:
            self._finish(self._params[0], self._buffer)
        else:
            pieces = [torch.split(shard, sizes) for shard, sizes in zip(self._shards, self._sizes, strict=True)]
            for param, own in zip(self._params, zip(*pieces, strict=True), strict=True):
                self._finish(param, torch.cat(own))
            self._order_streams(pieces, handle_dependency)
        self._complete = True

    def _finish(self, param: Sharded, flat: torch.Tensor) -> None:
        param.data = flat.narrow(0, 0, param.ds_numel).view(param.ds_shape)
        param.ds_status = ZeroParamStatus.AVAILABLE

    def _order_streams(self, pieces: list[tuple[torch.Tensor, ...]], handle_dependency: bool) -> None:
        if get_accelerator().is_synchronized_device():
            return
        if handle_dependency:
            self._buffer.record_stream(get_accelerator().current_stream())
        else:
            AllGatherCoalescedHandle.data_buffer.append(pieces)


class ShardGatherings:
    """Several `ShardGathering`, waited for together."""

    def __init__(self, gatherings: Sequence[ShardGathering]) -> None:
        self._gatherings = gatherings

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait for all of them; the argument as there."""
        for gathering in self._gatherings:
            gathering.wait(handle_dependency=handle_dependency)
