"""Plans and profiles keep their rules and their JSON form."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from accelerate_poplar import ClusterProfile, Plan, PlanError, ProfileError, RankPlan

PROFILE: dict[str, Any] = {
    "version": 1,
    "model": "llama-0.5b",
    "num_parameters": 500000000,
    "seq_len": 2048,
    "dtype": "bf16",
    "ranks": [
        {
            "rank": rank,
            "host": "n1",
            "device": "NVIDIA A100-SXM4-80GB",
            "memory_bytes": 85899345920,
            "peak_flops": 3.12e14,
            "step_overhead_s": 0.012,
            "points": [
                {"micro_batch_size": 1, "step_time_s": 0.081, "peak_memory_bytes": 9000000000},
                {"micro_batch_size": 2, "step_time_s": 0.12, "peak_memory_bytes": 9900000000},
            ],
        }
        for rank in range(2)
    ],
    "zero_stages": {
        "2": {"max_micro_batch_size": [24, 12], "per_micro_step_s": 0.05, "per_step_s": 0.1, "overlap": 0.5}
    },
}


def changed(*path: Any, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(PROFILE)
    target: Any = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return data


def test_a_profile_survives_its_json_form(tmp_path: Path) -> None:
    profile = ClusterProfile.from_dict(PROFILE)
    assert profile.to_dict() == PROFILE
    profile.save(tmp_path / "profiles.json")
    assert ClusterProfile.load(tmp_path / "profiles.json") == profile


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (changed("ranks", 1, "points", value=[]), ["rank 1", "points"]),
        (changed("ranks", 1, "points", 0, "step_time_s", value=float("nan")), ["rank 1", "points[0]", "step_time_s"]),
        (changed("ranks", 0, "points", 1, "step_time_s", value=-1), ["rank 0", "points[1]", "step_time_s", "-1"]),
        (changed("ranks", 0, "points", 1, "step_time_s", value=0), ["rank 0", "more than 0"]),
        (changed("ranks", 0, "points", 1, "micro_batch_size", value=1), ["rank 0", "points[1]", "must increase"]),
        (changed("ranks", 0, "points", 0, "micro_batch_size", value=-2), ["rank 0", "micro_batch_size", "-2"]),
        (changed("ranks", 1, "rank", value=0), ["rank 0 appears 2 times"]),
        (changed("ranks", 1, "rank", value=5), ["[0, 5]", "without gaps"]),
        (changed("zero_stages", "2", "max_micro_batch_size", value=[24]), ["1 entries for 2 ranks"]),
        (changed("zero_stages", "2", "overlap", value=1.5), ["overlap", "1.5"]),
        (changed("zero_stages", value={"7": {}}), ["'7'"]),
        (changed("version", value=9), ["version is 9"]),
        (changed("ranks", value=[]), ["ranks"]),
        (changed("ranks", 0, "points", 0, "step_time_s", value="fast"), ["step_time_s", "'fast'"]),
    ],
)
def test_a_wrong_profile_names_file_rank_and_field(data: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ProfileError) as error:
        ClusterProfile.from_dict(data, source="mine.json")
    assert all(word in str(error.value) for word in [*words, "mine.json"]), str(error.value)


def test_everything_wrong_is_reported_together() -> None:
    data = changed("ranks", 0, "points", 0, "step_time_s", value=None)
    data["ranks"][1]["points"][1]["micro_batch_size"] = 0
    with pytest.raises(ProfileError) as error:
        ClusterProfile.from_dict(data)
    assert len(error.value.problems) >= 2
    assert "rank 0" in str(error.value)
    assert "rank 1" in str(error.value)


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none\.json: no such file"):
        ClusterProfile.load(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(PlanError, match=r"broken\.json: cannot be read as JSON"):
        Plan.load(tmp_path / "broken.json")


def make_plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "zero_stage": 2,
        "global_batch_size": 7,
        "predicted_step_time_s": 1.9,
        "strategy": "optimal",
        "ranks": (RankPlan(rank=0, micro_batch_sizes=(3, 1)), RankPlan(rank=1, micro_batch_sizes=(3, 0))),
    }
    return Plan(**(values | changes))


def test_a_plan_survives_its_json_form(tmp_path: Path) -> None:
    plan = make_plan()
    plan.save(tmp_path)
    assert Plan.load(tmp_path) == plan
    assert json.loads((tmp_path / "poplar_plan.json").read_text())["digest"] == plan.digest
    assert plan.digest.startswith("sha256:")
    assert make_plan(predicted_step_time_s=1.0).digest == plan.digest
    assert make_plan(zero_stage=3).digest != plan.digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch_size": 8}, ["sum to 7", "8"]),
        ({"zero_stage": 4}, ["zero_stage is 4"]),
        ({"predicted_step_time_s": float("nan")}, ["predicted_step_time_s"]),
        ({"ranks": (RankPlan(rank=1, micro_batch_sizes=(7,)),)}, ["[1]"]),
        (
            {"ranks": (RankPlan(rank=0, micro_batch_sizes=(8,)), RankPlan(rank=1, micro_batch_sizes=(-1,)))},
            ["rank 1", "negative"],
        ),
        ({"ranks": (RankPlan(rank=0, micro_batch_sizes=(7,)), RankPlan(rank=1, micro_batch_sizes=()))}, ["rank 1"]),
    ],
)
def test_a_plan_that_breaks_a_rule(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        make_plan(**changes)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.scenario(16)
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_unequal_micro_step_counts_are_named(zero_stage: int) -> None:
    ranks = (RankPlan(rank=0, micro_batch_sizes=(3, 1)), RankPlan(rank=1, micro_batch_sizes=(3,)))
    with pytest.raises(PlanError, match=r"rank 0 has 2, rank 1 has 1.*Pad"):
        make_plan(zero_stage=zero_stage, ranks=ranks)
    assert make_plan(zero_stage=1, ranks=ranks).global_batch_size == 7


def test_an_edited_plan_is_noticed() -> None:
    data = make_plan().to_dict()
    data["ranks"][0]["micro_batch_sizes"] = [2, 2]
    with pytest.raises(PlanError, match="digest"):
        Plan.from_dict(data)
    del data["digest"]
    assert Plan.from_dict(data).ranks[0].micro_batch_sizes == (2, 2)
    del data["ranks"][0]["micro_batch_sizes"]
    with pytest.raises(PlanError, match="micro_batch_sizes"):
        Plan.from_dict(data)
