"""A checkpoint's training state cut into equal shares, one rank at a time."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .errors import ConfigError
from .state_layout import StateShares

STAGE12_BLOCK = 2
"""Elements to whose multiples stages 1 and 2 cut (`state_shards_stage12.BLOCK`)."""


def _padded(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, numel - tensor.numel()))


class FlatGroups:
    """ZeRO stages 1 and 2: flat parameter groups.

    Args:
        states: Every rank's optimizer state.
        shares: What they were cut by.
    """

    def __init__(self, states: Sequence[Mapping[str, Any]], shares: StateShares) -> None:
        self._states, self._world_size = states, shares.world_size
        self._bounds, self._lean = [], []
        for group in range(len(states[0]["single_partition_of_fp32_groups"])):
            lean = [state["single_partition_of_fp32_groups"][group].numel() for state in states]
            sizes = [numel + state["group_paddings"][group] for numel, state in zip(lean, states, strict=True)]
            bounds = shares.bounds(sum(sizes), block=STAGE12_BLOCK)
            if [after - before for before, after in itertools.pairwise(bounds)] != sizes:
                raise ConfigError(
                    f"parameter group {group}: the ranks' shards have {sizes} elements, the recorded shares mean "
                    f"{bounds}. The checkpoint is damaged, or mixes several."
                )
            self._bounds.append(bounds)
            self._lean.append(sum(lean))

    def rank_state(self, rank: int) -> dict[str, Any]:
        """A rank's optimizer state in equal shares."""
        groups = range(len(self._bounds))
        own = self._states[rank]
        masters = [[state["single_partition_of_fp32_groups"][group] for state in self._states] for group in groups]
        sizes = [self._size(group) for group in groups]
        real = [min(max(self._lean[g] - rank * sizes[g], 0), sizes[g]) for g in groups]
        base = own["base_optimizer_state"]
        moments = {
            key: {name: self._moment(group, key, name, rank) for name in base["state"][key]}
            for group, key in enumerate(entry["params"][0] for entry in base["param_groups"])
            if key in base["state"]
        }
        return {
            **own,
            "single_partition_of_fp32_groups": [self._even(g, masters[g], rank)[: real[g]].clone() for g in groups],
            "base_optimizer_state": {**base, "state": moments},
            "group_paddings": [sizes[g] - real[g] for g in groups],
            "param_slice_mappings": [self._fragments(group, rank) for group in groups],
        }

    def _size(self, group: int) -> int:
        return self._bounds[group][-1] // self._world_size

    def _even(self, group: int, shards: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        """A rank's equal part of a flat group, padding included."""
        bounds, size = self._bounds[group], self._size(group)
        start, end = rank * size, (rank + 1) * size
        pieces = [
            _padded(shard, bounds[r + 1] - bounds[r])[max(0, start - bounds[r]) : max(0, end - bounds[r])]
            for r, shard in enumerate(shards)
        ]
        return torch.cat(pieces)

    def _moment(self, group: int, key: int, name: str, rank: int) -> Any:
        values = [state["base_optimizer_state"]["state"][key][name] for state in self._states]
        bounds = self._bounds[group]
        sharded = all(
            torch.is_tensor(value) and value.shape == (bounds[r + 1] - bounds[r],) for r, value in enumerate(values)
        )
        return self._even(group, values, rank).clone() if sharded else values[rank]

    def _fragments(self, group: int, rank: int) -> OrderedDict[str, Any]:
        """Where each parameter lies in a rank's equal part: `fragment_address` by name."""
        bounds, size = self._bounds[group], self._size(group)
        whole: OrderedDict[str, list[int]] = OrderedDict()
        kind: Any = None
        for r, state in enumerate(self._states):
            for name, address in state["param_slice_mappings"][group].items():
                kind, start = type(address), bounds[r] + address.start
                known = whole.setdefault(name, [start, start])
                known[0], known[1] = min(known[0], start), max(known[1], start + address.numel)
        found: OrderedDict[str, Any] = OrderedDict()
        for name, (start, end) in whole.items():
            first, last = max(start, rank * size), min(end, (rank + 1) * size)
            if first < last:
                found[name] = kind(start=first - rank * size, numel=last - first)
        return found


class SingleParameters:
    """ZeRO stage 3: every parameter by itself.

    Args:
        states: Every rank's optimizer state.
        models: Every rank's model state.
        shares: What they were cut by.
    """

    def __init__(
        self, states: Sequence[Mapping[str, Any]], models: Sequence[dict[str, Any]], shares: StateShares
    ) -> None:
        self._states, self._models, self._shares = states, models, shares
        self._shapes = [list(shapes.values()) for shapes in self._models[0]["param_shapes"]]

    def model_state(self, rank: int) -> dict[str, Any]:
        """A rank's model state; frozen weights are sharded, too."""
        own = self._models[rank]
        fragments = own.get("frozen_param_fragments")
        if not fragments:
            return own
        even = OrderedDict(
            (name, self._even([model["frozen_param_fragments"][name] for model in self._models], shape.numel(), rank))
            for name, shape in own["frozen_param_shapes"].items()
        )
        return {**own, "frozen_param_fragments": even}

    def rank_state(self, rank: int) -> dict[str, Any]:
        """A rank's optimizer state in equal shares."""
        own = self._states[rank]
        inner = own["optimizer_state_dict"]
        moments = {
            group: {name: self._moment(group, name, rank) for name in inner["state"][group]}
            for group in inner["state"]
        }
        masters = [
            self._sub_group(group, [state["fp32_flat_groups"][group] for state in self._states], rank)
            for group in range(len(self._shapes))
        ]
        return {**own, "fp32_flat_groups": masters, "optimizer_state_dict": {**inner, "state": moments}}

    def _moment(self, group: int, name: str, rank: int) -> Any:
        values = [state["optimizer_state_dict"]["state"][group][name] for state in self._states]
        masters = [state["fp32_flat_groups"][group] for state in self._states]
        sharded = all(
            torch.is_tensor(value) and value.shape == master.shape
            for value, master in zip(values, masters, strict=True)
        )
        return self._sub_group(group, values, rank) if sharded else values[rank]

    def _sub_group(self, group: int, flat: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        offsets = [0] * len(flat)
        pieces = []
        for shape in self._shapes[group]:
            bounds = self._shares.bounds(shape.numel())
            slices = []
            for owner, tensor in enumerate(flat):
                size = bounds[owner + 1] - bounds[owner]
                slices.append(tensor.detach()[offsets[owner] : offsets[owner] + size])
                offsets[owner] += size
            pieces.append(self._even(slices, shape.numel(), rank))
        if offsets != [tensor.numel() for tensor in flat]:
            raise ConfigError(
                f"sub-group {group}: the ranks hold {[tensor.numel() for tensor in flat]} elements, the recorded shares "
                f"mean {offsets}. The checkpoint is damaged, or mixes several."
            )
        return torch.cat(pieces)

    def _even(self, slices: Sequence[torch.Tensor], numel: int, rank: int) -> torch.Tensor:
        size = -(-numel // self._shares.world_size)
        whole = torch.cat([piece.detach().view(-1) for piece in slices])[:numel]
        return _padded(whole[rank * size : (rank + 1) * size], size)
