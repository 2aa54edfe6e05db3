"""Which runs have their steps cut by length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate_poplar.comm import SingleRank
from accelerate_poplar.length_setup import IndexCutter, index_cutter
from accelerate_poplar.measure import MeasuredProfile
from accelerate_poplar.probe import ShortestRow
from accelerate_poplar.profiles import ClusterProfile, Measurement, RankProfile, StageProfile
from accelerate_poplar.search import find_plan

LONGEST = 100


def profile_of(shortest: ShortestRow | None) -> ClusterProfile:
    points = tuple(
        Measurement(micro_batch_size=size, step_time_s=float(size), peak_memory_bytes=0) for size in (1, 2, 4)
    )
    rank = RankProfile(rank=0, host="h", device="d", memory_bytes=1, peak_flops=0.0, points=points)
    values: dict[str, Any] = {
        "model": "m",
        "num_parameters": 1,
        "seq_len": LONGEST,
        "dtype": "fp32",
        "ranks": (rank,),
        "zero_stages": {0: StageProfile(max_micro_batch_size=(4,))},
    }
    return ClusterProfile(**values) if shortest is None else MeasuredProfile(**values, shortest=(shortest,))


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    return {"input_ids": torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])}


def cutter_of(lengths: list[int], shortest: ShortestRow | None = None) -> IndexCutter | None:
    profile = profile_of(shortest)
    run = SimpleNamespace(
        profile=profile,
        plan=find_plan(profile, global_batch_size=4, zero_stage=0),
        ranks=SingleRank(),
        say=lambda text: None,
    )
    return index_cutter(run, dataset=[{"input_ids": [1] * length} for length in lengths], collate=padded)


@pytest.mark.parametrize("lengths", [[10, 30, LONGEST, 20], [10, 30, 0, LONGEST, 20]])
def test_rows_of_unequal_length_are_cut_by_length_also_where_one_is_empty(lengths: list[int]) -> None:
    assert cutter_of(lengths) is not None


def test_rows_that_are_alike_are_not() -> None:
    assert cutter_of([LONGEST] * 4) is None


def test_the_cost_of_a_micro_step_comes_from_the_short_row_where_it_was_timed() -> None:
    lengths = [10, 30, LONGEST, 20]
    assert cutter_of(lengths).cutter.costs[0].times_ns[0] == 0
    timed = cutter_of(lengths, ShortestRow(tokens=10, step_time_s=0.28))
    assert timed.cutter.costs[0].times_ns[0] == 200_000_000
