"""Cutting training state into unequal shards, the record of it, and what it cannot be combined with."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerate_poplar.errors import ConfigError
from accelerate_poplar.state_layout import ShardSize, ShardTotal, StateShares
from accelerate_poplar.state_record import check_record, recorded_shares, share_record
from accelerate_poplar.state_refusals import check_config, offloads_optimizer


def shares_of(weights: list[float]) -> StateShares:
    total = math.fsum(weights)
    return StateShares(fractions=tuple(weight / total for weight in weights))


WEIGHTS = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=9)


@given(WEIGHTS, st.integers(0, 200_000), st.sampled_from([1, 2, 8]))
def test_bounds_cover_everything_in_blocks(weights: list[float], numel: int, block: int) -> None:
    shares = shares_of(weights)
    numel = numel // (block * len(weights)) * (block * len(weights)) if block > 1 else numel
    bounds = shares.bounds(numel, block=block)
    sizes = [after - before for before, after in itertools.pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == max(numel, block * len(weights))
    assert min(sizes) >= block
    assert all(bound % block == 0 for bound in bounds)


@given(WEIGHTS, st.integers(100_000, 10_000_000))
def test_sizes_are_within_one_percent_of_the_smallest_share(weights: list[float], numel: int) -> None:
    shares = shares_of(weights)
    bounds = shares.bounds(numel)
    for fraction, before, after in zip(shares.fractions, bounds, bounds[1:], strict=False):
        assert abs((after - before) - fraction * numel) <= 0.01 * min(shares.fractions) * numel + 2.0


def test_tensor_shorter_than_ranks_gives_each_one_element() -> None:
    assert shares_of([5, 2, 1]).bounds(2) == (0, 1, 2, 3)


def test_shard_size_times_rank_is_where_that_rank_begins() -> None:
    size = shares_of([3, 1, 4]).size(80, 1)
    assert int(size) == 10
    assert [size * rank for rank in range(4)] == [rank * size for rank in range(4)] == [0, 30, 40, 80]
    assert size.total == 80
    with pytest.raises(ValueError, match="no such product"):
        size * 4
    assert ShardTotal(size) // 3 is size
    with pytest.raises(ValueError, match="cut for 3 ranks, not for 2"):
        ShardTotal(size) // 2
    assert type(pickle.loads(pickle.dumps(size))) is type(pickle.loads(pickle.dumps(ShardTotal(size)))) is int
    assert type(ShardSize((0, 4, 6), 0) + 1) is int


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ((0.75, 0.2), r"\[0.75, 0.2\] sum to 0.95; they are shares of the whole and must sum to 1"),
        ((1.0, 0.0), r"above 0.*but rank 1 has 0.0. Give such a rank a small share"),
        ((1.5, -0.5), r"rank 1 has -0.5"),
        ((float("nan"), 1.0), r"rank 0 has nan"),
    ],
)
def test_impossible_fractions_are_refused(fractions: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StateShares(fractions=fractions)


def test_a_record_admits_the_same_shares_only() -> None:
    shares = shares_of([3, 1])
    record = pickle.loads(pickle.dumps(share_record(shares, zero_stage=2)))
    assert recorded_shares(record) == shares
    check_record(record, shares)
    check_record(None, None)
    with pytest.raises(ConfigError, match=r"shares of 0.75, 0.25, this run holds it in shares of 0.25, 0.75.*to-even"):
        check_record(record, shares_of([1, 3]))
    with pytest.raises(
        ConfigError, match=r"in even shares, this run holds it in shares of 0.75, 0.25.*load_universal"
    ):
        check_record(None, shares)
    with pytest.raises(ConfigError, match=r"shares of 0.75, 0.25, this run holds it in even shares"):
        check_record(record, None)
    with pytest.raises(ConfigError, match="cut by rule 99"):
        check_record({**record, "layout": 99}, shares)


@pytest.mark.parametrize(
    ("zero_stage", "config", "name"),
    [
        (0, {}, "ZeRO stage 0"),
        (3, {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer.device nvme"),
        (3, {"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device nvme"),
        (3, {"zero_optimization": {"zero_hpz_partition_size": 2}}, r"zero_hpz_partition_size \(2\)"),
        (3, {"zero_optimization": {"mics_shard_size": 4}}, "mics_shard_size"),
        (3, {"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights"),
        (3, {"zero_optimization": {"zero_quantized_nontrainable_weights": True}}, "quantized_nontrainable_weights"),
        (3, {"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        (3, {"zero_optimization": {"stage3_use_all_reduce_for_fetch_params": True}}, "use_all_reduce_for_fetch"),
        (3, {"zero_optimization": {"reduce_scatter": False}}, "reduce_scatter false"),
        (2, {"zero_optimization": {"elastic_checkpoint": True}}, "elastic_checkpoint"),
        (2, {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        (1, {"zero_optimization": {"legacy_stage1": True}}, "legacy_stage1"),
        (3, {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, r"ratio \(0.5\)"),
        (3, {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}, "super_offload"),
        (2, {"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
        (2, {"sequence_parallel_size": 2}, "sequence_parallel_size"),
        (2, {"expert_parallel": {"enabled": True}}, "expert_parallel"),
        (2, {"torch_autocast": {"enabled": True}}, "torch_autocast"),
        (3, {"compile": {"deepcompile": True}}, "deepcompile"),
        (2, {"optimizer": {"type": "Muon"}}, "Muon optimizer"),
        (
            1,
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            "grad_accum_dtype fp32 with bf16",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(zero_stage: int, config: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check_config(config, zero_stage=zero_stage)


def test_what_can_be_combined_is_not_refused() -> None:
    zero = {
        "reduce_scatter": True,
        "zero_hpz_partition_size": 1,
        "offload_optimizer": {"device": "cpu", "ratio": 1.0},
        "offload_param": {"device": "cpu"},
    }
    config = {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": "fp32"}}
    for zero_stage in (1, 2, 3):
        check_config(config, zero_stage=zero_stage)
        check_config(None, zero_stage=zero_stage)
    check_config({"zero_optimization": {"reduce_scatter": False}}, zero_stage=2)
    assert offloads_optimizer(config)
    assert not offloads_optimizer({"zero_optimization": {"offload_optimizer": {"device": "none"}}})


def test_everything_in_the_way_is_reported_together() -> None:
    config = {"zero_optimization": {"zero_quantized_weights": True}, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(ConfigError, match="2 problems") as caught:
        check_config(config, zero_stage=3, optimizer_name="AdamW")
    assert len(caught.value.problems) == 2
