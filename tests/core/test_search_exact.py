"""The plans are the best there are: compared with exhaustive searches on small clusters."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_poplar.plan import Plan, RankPlan
from accelerate_poplar.search import find_plan
from accelerate_poplar.simulate import step_time
from tests.core.planner_cases import Case, all_assignments, exhaustive_step_time, random_case

INSTANCES = 5000
TOLERANCE = 1e-9


def optimum(case: Case) -> float:
    """The planner's step time, after checking that the plan keeps its promises."""
    profile = case.profile()
    plan = find_plan(profile, global_batch_size=case.global_batch_size, zero_stage=case.zero_stage)
    assert sum(rank.rank_batch_size for rank in plan.ranks) == case.global_batch_size
    assert all(max(r.micro_batch_sizes) <= cap for r, cap in zip(plan.ranks, case.caps, strict=True))
    assert step_time(profile, plan) == plan.predicted_step_time_s
    return plan.predicted_step_time_s


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_plans_equal_exhaustive_search_on_thousands_of_small_clusters(zero_stage: int) -> None:
    rng = random.Random(zero_stage)
    for number in range(INSTANCES):
        case = random_case(rng, zero_stage)
        assert optimum(case) == pytest.approx(exhaustive_step_time(case), rel=TOLERANCE), (number, case)


@given(st.integers(0, 2**32), st.integers(0, 3))
@settings(max_examples=500, deadline=None)
def test_plans_equal_exhaustive_search(seed: int, zero_stage: int) -> None:
    case = random_case(random.Random(seed), zero_stage)
    assert optimum(case) == pytest.approx(exhaustive_step_time(case), rel=TOLERANCE)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_plans_equal_the_best_of_literally_every_plan(zero_stage: int) -> None:
    rng = random.Random(100 + zero_stage)
    for _ in range(60):
        case = random_case(rng, zero_stage)
        tiny = Case(
            times=case.times[:3],
            caps=(max(1, min(3, case.caps[0])), *(min(2, cap) for cap in case.caps[1:3])),
            global_batch_size=1 + case.global_batch_size % 5,
            zero_stage=zero_stage,
            overheads=case.overheads[:3],
            per_micro_step_s=case.per_micro_step_s,
            per_step_s=case.per_step_s,
            overlap=case.overlap,
        )
        profile = tiny.profile()
        best = min(step_time(profile, as_plan(tiny, sizes)) for sizes in all_assignments(tiny))
        assert optimum(tiny) == pytest.approx(best, rel=TOLERANCE), tiny


def as_plan(case: Case, sizes: list[tuple[int, ...]]) -> Plan:
    return Plan(
        zero_stage=case.zero_stage,
        global_batch_size=case.global_batch_size,
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=tuple(RankPlan(rank=rank, micro_batch_sizes=own) for rank, own in enumerate(sizes)),
    )


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize(("global_batch_size", "instances"), [(97, 60), (1000, 10), (4099, 3)])
def test_large_batches_equal_a_search_without_shortcuts(
    zero_stage: int, global_batch_size: int, instances: int
) -> None:
    rng = random.Random(global_batch_size)
    for _ in range(instances):
        small = random_case(rng, zero_stage)
        case = Case(
            times=small.times[:2],
            caps=tuple(max(1, cap) for cap in small.caps[:2]),
            global_batch_size=global_batch_size if zero_stage > 1 else global_batch_size // 8,
            zero_stage=zero_stage,
            overheads=small.overheads[:2],
            per_micro_step_s=small.per_micro_step_s,
            per_step_s=small.per_step_s,
            overlap=small.overlap,
        )
        assert optimum(case) == pytest.approx(exhaustive_step_time(case), rel=TOLERANCE), case


def test_trimming_the_last_micro_step_reaches_the_batch_exactly() -> None:
    case = Case(times=((1.0, 1.5, 2.0), (1.0, 2.0, 3.0)), caps=(3, 3), global_batch_size=9, zero_stage=2)
    plan = find_plan(case.profile(), global_batch_size=9, zero_stage=2)
    # Two seconds hold 3 + 2 samples; the four samples left need 1.5 seconds on rank 0 only if rank 1 could help more.
    assert plan.predicted_step_time_s == pytest.approx(4.0)
    assert [r.micro_batch_sizes for r in plan.ranks] == [(3, 3), (2, 1)]


def test_overlap_makes_larger_micro_steps_free() -> None:
    # Up to 2 s of compute hide inside 2 s of communication, so a micro-step costs 2 s whatever its size.
    case = Case(
        times=((0.5, 1.0, 1.5, 2.0),), caps=(4,), global_batch_size=4, zero_stage=3, per_micro_step_s=2.0, overlap=1.0
    )
    plan = find_plan(case.profile(), global_batch_size=4, zero_stage=3)
    assert plan.ranks[0].micro_batch_sizes == (4,)
    assert plan.predicted_step_time_s == pytest.approx(2.0)


def test_the_largest_micro_batch_is_not_always_the_best() -> None:
    case = Case(times=((1.0, 1.9, 3.1, 4.4),), caps=(4,), global_batch_size=8, zero_stage=0)
    plan = find_plan(case.profile(), global_batch_size=8, zero_stage=0)
    assert plan.ranks[0].micro_batch_sizes == (2, 2, 2, 2)


def test_an_idle_rank_still_runs_its_optimizer() -> None:
    case = Case(times=((1.0,), (100.0,)), caps=(1, 1), global_batch_size=3, overheads=(0.0, 5.0))
    plan = find_plan(case.profile(), global_batch_size=3, zero_stage=0)
    assert [r.micro_batch_sizes for r in plan.ranks] == [(1, 1, 1), (0,)]
    assert plan.predicted_step_time_s == 5.0
