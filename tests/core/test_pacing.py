"""Emulated ranks keep to the profile where a micro-batch is like those that were profiled."""

from __future__ import annotations

import pytest
import torch

from accelerate_poplar import ClusterProfile
from accelerate_poplar.pacing import ProfiledPace
from accelerate_poplar.profiles import Measurement, RankProfile, StageProfile


def batch(rows: int, length: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def test_only_rows_as_long_as_the_profiled_ones_are_paced() -> None:
    points = tuple(
        Measurement(micro_batch_size=size, step_time_s=0.1 * size, peak_memory_bytes=size) for size in (1, 2, 4)
    )
    rank = RankProfile(rank=0, host="one", device="cpu", memory_bytes=100, peak_flops=0.0, points=points)
    profile = ClusterProfile(
        model="tiny",
        num_parameters=1,
        seq_len=8,
        dtype="fp32",
        ranks=(rank,),
        zero_stages={1: StageProfile(max_micro_batch_size=(4,))},
        emulated=True,
    )
    pace = ProfiledPace(profile, zero_stage=1, rank=0, row=batch(1))
    assert [pace.seconds(batch(rows)) for rows in (1, 3, 4)] == pytest.approx([0.1, 0.3, 0.4])
    assert pace.seconds(batch(5)) is None, "above the cap"
    assert pace.seconds(batch(2, length=4)) is None, "shorter rows"
    assert pace.seconds({}) is None
