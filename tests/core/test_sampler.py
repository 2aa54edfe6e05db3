"""Every sample exactly once, whatever the plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_poplar import DataError, Plan, PlanError, RankPlan
from accelerate_poplar.plan import LOCK_STEP_STAGES
from accelerate_poplar.sampler import PlanSampler, micro_batch_sizes_for, num_steps


def make_plan(zero_stage: int, sizes: list[list[int]]) -> Plan:
    return Plan(
        zero_stage=zero_stage,
        global_batch_size=sum(map(sum, sizes)),
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=tuple(RankPlan(rank=rank, micro_batch_sizes=tuple(own)) for rank, own in enumerate(sizes)),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    stage = draw(st.integers(0, 3))
    world_size = draw(st.integers(1, 4))
    size = st.integers(0, 5)
    if stage in LOCK_STEP_STAGES:
        count = draw(st.integers(1, 4))
        lists = st.lists(size, min_size=count, max_size=count)
    else:
        lists = st.lists(size, min_size=1, max_size=4)
    sizes = [draw(lists) for _ in range(world_size)]
    if not any(map(sum, sizes)):
        sizes[0][0] = 1
    return make_plan(stage, sizes)


def samplers(plan: Plan, count: int, *, drop_last: bool = False) -> list[PlanSampler]:
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng(epoch).permutation(count)

    return [
        PlanSampler(plan=plan, rank=rank, num_samples=count, order=order, drop_last=drop_last)
        for rank in range(plan.world_size)
    ]


@settings(max_examples=400, deadline=None)
@given(plan=plans(), count=st.integers(1, 120), epoch=st.integers(0, 3))
def test_every_sample_once_and_in_the_right_step(plan: Plan, count: int, epoch: int) -> None:
    ranks = samplers(plan, count)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    order = np.random.default_rng(epoch).permutation(count).tolist()
    steps = list(zip(*(list(sampler) for sampler in ranks), strict=True))
    assert len(steps) == len(ranks[0]) == -(-count // plan.global_batch_size)
    for number, parts in enumerate(steps):
        wanted = order[number * plan.global_batch_size : (number + 1) * plan.global_batch_size]
        # Rank after rank, in order: the pieces laid end to end are the slice itself.
        assert [index for part in parts for index in part.indices()] == wanted
        assert {part.num_samples for part in parts} == {len(wanted)}
        if plan.zero_stage in LOCK_STEP_STAGES:
            assert len({len(part.micro_batches) for part in parts}) == 1


@settings(max_examples=400, deadline=None)
@given(plan=plans(), data=st.data())
def test_a_short_step_stays_within_the_plan(plan: Plan, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, plan.global_batch_size))
    sizes = micro_batch_sizes_for(plan, count)
    assert sum(map(sum, sizes)) == count
    for own, planned in zip(sizes, plan.ranks, strict=True):
        assert own
        assert all(size <= full for size, full in zip(own, planned.micro_batch_sizes, strict=False))
        assert len(own) <= len(planned.micro_batch_sizes)


@pytest.mark.scenario(17)
def test_ten_samples() -> None:
    plan = make_plan(2, [[3], [1]])
    sizes = [[len(part.indices()) for part in sampler] for sampler in samplers(plan, 10)]
    assert [sum(step) for step in zip(*sizes, strict=True)] == [4, 4, 2]


@pytest.mark.scenario(18)
def test_the_empty_rank_still_has_a_micro_step() -> None:
    parts = [list(sampler)[-1] for sampler in samplers(make_plan(3, [[3], [1]]), 9)]
    assert [len(part.indices()) for part in parts] == [1, 0]
    assert [len(part.micro_batches) for part in parts] == [1, 1]


@pytest.mark.scenario(21)
def test_drop_last_with_too_few_samples() -> None:
    with pytest.raises(DataError, match=r"3 samples.*global batch of 4.*drop_last"):
        num_steps(3, 4, drop_last=True)
    assert num_steps(3, 4, drop_last=False) == 1
    with pytest.raises(DataError, match="empty"):
        num_steps(0, 4, drop_last=False)


@pytest.mark.scenario(35)
@settings(max_examples=100, deadline=None)
@given(before=plans(), after=plans(), data=st.data())
def test_a_resumed_run_goes_on_at_the_next_sample(before: Plan, after: Plan, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 60))
    done = data.draw(st.integers(0, -(-count // after.global_batch_size)))
    order = np.random.default_rng(0).permutation(count).tolist()
    seen = []
    for sampler in samplers(after, count):
        sampler.skip_steps(done)
        seen.append([part for part in sampler if part is not None])
    rest = [index for parts in zip(*seen, strict=True) for part in parts for index in part.indices()]
    assert rest == order[done * after.global_batch_size :]


@pytest.mark.scenario(38)
def test_skipping_builds_nothing() -> None:
    plan = make_plan(1, [[3], [1]])
    sampler = samplers(plan, 4_000_000)[0]
    built = 0
    sampler.skip_steps(999_990)
    for part in sampler:
        built += part is not None
    assert built == 10


def test_a_new_plan_takes_over_at_its_step() -> None:
    first, second = make_plan(2, [[3], [1]]), make_plan(2, [[1, 1], [1, 1]])
    ranks = samplers(first, 16)
    for sampler in ranks:
        sampler.set_plan(second, from_step=2)
    steps = list(zip(*(list(sampler) for sampler in ranks), strict=True))
    assert [[len(part.indices()) for part in step] for step in steps] == [[3, 1], [3, 1], [2, 2], [2, 2]]
    with pytest.raises(PlanError, match=r"5 samples.*has 4"):
        ranks[0].set_plan(make_plan(2, [[4], [1]]), from_step=3)


def test_a_sampler_that_breaks_its_word() -> None:
    sampler = PlanSampler(plan=make_plan(0, [[2]]), rank=0, num_samples=4, order=lambda _: np.arange(3))
    with pytest.raises(DataError, match=r"3 indices.*announced 4"):
        next(iter(sampler))
