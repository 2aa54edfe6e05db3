"""Uneven shares on simulated clusters."""

from __future__ import annotations

import pytest

from accelerate_poplar.cluster import cluster_from_dict
from accelerate_poplar.model_shape import find_model
from accelerate_poplar.simulate import Workload, simulated_profile
from accelerate_poplar.state_simulation import compare_shares, largest_model, simulated_state_memory

SMALL_AND_LARGE = cluster_from_dict(
    {
        "hosts": [
            {"device": "V100-SXM2-16GB", "count": 4, "link_gbytes_per_s": 20},
            {"device": "A100-80GB", "count": 4, "link_gbytes_per_s": 20},
        ],
        "inter_host_gbytes_per_s": 10,
    }
)


def workload(model: str = "llama-1.1b", seq_len: int = 2048) -> Workload:
    return Workload(model=find_model(model, seq_len=seq_len), checkpointing=True)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_even_shares_have_the_simulator_s_own_limits(zero_stage: int) -> None:
    work = workload()
    profile = simulated_profile(SMALL_AND_LARGE, work, zero_stage=zero_stage)
    memory = simulated_state_memory(SMALL_AND_LARGE, work, zero_stage=zero_stage, largest_micro_batch=512)
    caps = profile.stage(zero_stage).max_micro_batch_size
    assert tuple(own.cap(1 / 8) for own in memory) == caps


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_free_shares_are_never_slower_and_fit_larger_models(zero_stage: int) -> None:
    found = compare_shares(SMALL_AND_LARGE, workload(), zero_stage=zero_stage, global_batch_size=256)
    assert found.free is not None
    if found.even is not None:
        assert found.speedup is not None
        assert found.speedup >= 1.0
    even = largest_model(SMALL_AND_LARGE, workload(), zero_stage=zero_stage, uneven=False)
    free = largest_model(SMALL_AND_LARGE, workload(), zero_stage=zero_stage, uneven=True)
    assert even is not None
    assert free is not None
    assert free.num_layers > even.num_layers
    assert free.layer_parameters == even.layer_parameters


def test_what_fits_nowhere_has_no_plan() -> None:
    tiny = cluster_from_dict(
        {
            "devices": {"toy": {"peak_tflops": 1, "memory_gib": 3, "bandwidth_gbytes_per_s": 100}},
            "hosts": [{"device": "toy", "count": 2, "link_gbytes_per_s": 1}],
        }
    )
    found = compare_shares(tiny, workload(), zero_stage=3, global_batch_size=8)
    assert found.even is None
    assert found.free is None
    assert found.speedup is None
    assert largest_model(tiny, workload(), zero_stage=1, uneven=True) is None
