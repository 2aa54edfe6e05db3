"""Which ranks to leave out, which stage, which card to add."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from accelerate_poplar.advice import advise
from accelerate_poplar.cluster import cluster_from_dict
from accelerate_poplar.errors import PlanError
from accelerate_poplar.model_shape import find_model
from accelerate_poplar.profiles import ClusterProfile, Measurement, StageProfile
from accelerate_poplar.resize import resize
from accelerate_poplar.search import find_plan
from accelerate_poplar.simulate import Workload, simulated_profile
from tests.core.planner_cases import Case


def linear(speed: float, cap: int) -> tuple[float, ...]:
    return tuple(size / speed for size in range(1, cap + 1))


def slow_rank(zero_stage: int = 3) -> Case:
    """Two fast ranks and one that is fifty times slower, on a network that is felt."""
    return Case(
        times=(linear(10.0, 8), linear(10.0, 8), linear(0.2, 8)),
        caps=(8, 8, 8),
        global_batch_size=32,
        zero_stage=zero_stage,
        per_micro_step_s=0.2 if zero_stage > 1 else 0.0,
        per_step_s=0.2,
    )


@pytest.mark.scenario(8)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_rank_that_costs_more_than_it_brings_is_named_with_numbers(zero_stage: int) -> None:
    case = slow_rank(zero_stage)
    profile = case.profile()
    advice = advise(profile, global_batch_size=32, zero_stage=zero_stage)
    assert advice.leave_out is not None
    assert advice.leave_out.ranks == (2,)
    # A ring of two instead of three: 3/4 of the communication, and the plan without rank 2 proves the numbers.
    without = find_plan(resize(profile, [0, 1]), global_batch_size=32, zero_stage=zero_stage)
    assert advice.leave_out.step_time_s == without.predicted_step_time_s
    gain = advice.now.step_time_s / without.predicted_step_time_s
    assert advice.leave_out.gain == pytest.approx(gain)
    assert gain > 1.01
    sentence = advice.sentences()[0]
    assert sentence.startswith("Leave out rank 2: ")
    assert (
        f"{32 / without.predicted_step_time_s:.4g} instead of {32 / advice.now.step_time_s:.4g} samples/s" in sentence
    )


def test_ranks_worth_having_are_kept() -> None:
    case = Case(times=(linear(10.0, 8), linear(5.0, 8)), caps=(8, 8), global_batch_size=60, per_step_s=0.01)
    advice = advise(case.profile(), global_batch_size=60, zero_stage=0)
    assert advice.leave_out is None
    assert advice.unused_ranks == ()
    assert not any("Leave out" in sentence for sentence in advice.sentences())


def test_ranks_without_samples_are_mentioned_where_leaving_them_out_gains_nothing() -> None:
    case = Case(times=(linear(10.0, 8), linear(0.1, 8)), caps=(8, 8), global_batch_size=8)
    advice = advise(case.profile(), global_batch_size=8, zero_stage=0)
    assert advice.unused_ranks == (1,)
    assert advice.leave_out is None
    assert advice.sentences()[0].startswith("Rank 1 gets no samples: ")


def test_the_best_subset_may_be_part_of_a_kind() -> None:
    # Communication that grows with every rank: some but not all of the equal ranks are worth it.
    def reshaped(ranks: list[int]) -> ClusterProfile:
        count = len(ranks)
        return Case(
            times=(linear(1.0, 16),) * count,
            caps=(16,) * count,
            global_batch_size=16,
            zero_stage=3,
            per_micro_step_s=1.0 * (count - 1),
        ).profile()

    advice = advise(reshaped([0] * 8), global_batch_size=16, zero_stage=3, reshape=reshaped)
    # 16/4 + 3 = 7 seconds; 3 ranks: 6 + 2 = 8, 5 ranks: 4 + 4 = 8, 8 ranks: 2 + 7 = 9.
    assert advice.now.step_time_s == pytest.approx(9.0)
    assert advice.leave_out is not None
    assert advice.leave_out.ranks == (4, 5, 6, 7)
    assert advice.leave_out.step_time_s == pytest.approx(7.0)


def test_large_clusters_are_searched_kind_by_kind() -> None:
    case = Case(
        times=(linear(10.0, 4),) * 150 + (linear(0.05, 4),) * 150,
        caps=(4,) * 300,
        global_batch_size=600,
        zero_stage=3,
        overheads=(0.0,) * 150 + (0.5,) * 150,
    )
    advice = advise(case.profile(), global_batch_size=600, zero_stage=3)
    assert advice.leave_out is not None
    assert advice.leave_out.ranks == tuple(range(150, 300))


def test_the_best_stage_is_proposed() -> None:
    profile = Case(times=(linear(10.0, 8),) * 2, caps=(8, 8), global_batch_size=64).profile()
    profile = replace(
        profile,
        zero_stages={
            1: StageProfile(max_micro_batch_size=(8, 8), per_step_s=0.1),
            3: StageProfile(max_micro_batch_size=(8, 8), per_micro_step_s=1.0),
        },
    )
    advice = advise(profile, global_batch_size=64, zero_stage=3)
    assert [option.zero_stage for option in advice.stages] == [1, 3]
    assert any(sentence.startswith("Use ZeRO stage 1: ") for sentence in advice.sentences())
    settled = advise(profile, global_batch_size=64, zero_stage="auto")
    assert settled.now.zero_stage == 1
    assert not any("Use ZeRO stage" in sentence for sentence in settled.sentences())


def test_one_more_card_of_each_kind() -> None:
    case = Case(times=(linear(10.0, 8), linear(5.0, 8), linear(10.0, 8)), caps=(8, 8, 8), global_batch_size=100)
    advice = advise(case.profile(), global_batch_size=100, zero_stage=0)
    assert [option.ranks for option in advice.one_more] == [(0,), (1,)]
    fast, slow = (option.gain for option in advice.one_more)
    assert fast == pytest.approx(35 / 25, rel=0.05)
    assert slow == pytest.approx(30 / 25, rel=0.05)


def test_advice_can_be_written_as_json() -> None:
    advice = advise(slow_rank().profile(), global_batch_size=32, zero_stage=3)
    assert json.loads(json.dumps(advice.to_dict()))["leave_out"]["ranks"] == [2]


def test_a_simulated_cluster_is_advised_by_its_own_links_and_memory() -> None:
    described = cluster_from_dict(
        {
            "hosts": [
                {"device": "A100-80GB", "count": 2, "link_gbytes_per_s": 20},
                {"device": "T4", "count": 1},
            ],
            "inter_host_gbytes_per_s": 0.2,
        }
    )
    work = Workload(model=find_model("llama-0.5b"))

    def reshaped(ranks: list[int]) -> ClusterProfile:
        placed = replace(described, placement=tuple(described.placement[rank] for rank in ranks))
        return simulated_profile(placed, work, zero_stage=2)

    profile = simulated_profile(described, work, zero_stage=2)
    own = advise(profile, global_batch_size=64, zero_stage=2, reshape=reshaped)
    assert own.leave_out is not None
    assert own.leave_out.ranks == (2,)
    # Without the T4 the slow network is not crossed at all, which a profile alone cannot know.
    estimated = advise(profile, global_batch_size=64, zero_stage=2)
    assert estimated.leave_out is None or estimated.leave_out.gain < own.leave_out.gain


# Other ranks of the same kinds


def test_resizing_scales_communication_like_a_ring() -> None:
    profile = slow_rank().profile()
    pair = resize(profile, [0, 2]).stage(3)
    assert pair.per_micro_step_s == pytest.approx(0.2 * (1 / 2) / (2 / 3))
    assert resize(profile, [1]).stage(3).per_micro_step_s == 0.0
    more = resize(profile, [0, 1, 2, 2])
    assert more.stage(3).per_step_s == pytest.approx(0.2 * (3 / 4) / (2 / 3))
    assert [rank.rank for rank in more.ranks] == [0, 1, 2, 3]
    assert more.ranks[3].points == profile.ranks[2].points


def test_resizing_moves_caps_by_the_state_that_is_shared() -> None:
    profile = slow_rank().profile()
    points = tuple(
        Measurement(micro_batch_size=b, step_time_s=float(b), peak_memory_bytes=10_000 + 2000 * b) for b in (1, 4)
    )
    measured = replace(
        profile, num_parameters=3001, ranks=tuple(replace(rank, points=points) for rank in profile.ranks)
    )
    # fp32 at stage 3: 16 bytes each; from a third to a half is 8,003 bytes more: not quite four samples
    # are enough, so five go.
    assert resize(measured, [0, 1]).stage(3).max_micro_batch_size == (3, 3)
    # From a third to a quarter: 4,001 bytes and two samples.
    assert resize(measured, [0, 1, 2, 0]).stage(3).max_micro_batch_size == (10, 10, 10, 10)
    # Where memory was not measured, nothing is known to change.
    assert resize(profile, [0, 1]).stage(3).max_micro_batch_size == (8, 8)


@pytest.mark.parametrize("ranks", [[], [3], [-1, 0]])
def test_resizing_to_ranks_that_do_not_exist_is_refused(ranks: list[int]) -> None:
    with pytest.raises(PlanError, match="are not among 0 to 2"):
        resize(slow_rank().profile(), ranks)
