"""Shares of the training state and micro-batches chosen together, against every choice there is."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from accelerate_poplar.errors import ConfigError, InsufficientMemoryError, PlanError, ProfileError
from accelerate_poplar.plan import Plan, RankPlan
from accelerate_poplar.profiles import ClusterProfile, Measurement
from accelerate_poplar.search import find_plan
from accelerate_poplar.state_memory import StateMemory, fractions_for, memory_from_profile, smallest_share
from accelerate_poplar.state_plan import StatePlan, find_state_plan, plan_with_fractions
from accelerate_poplar.state_search import TradeType, lockstep_caps
from accelerate_poplar.step_model import step_time

from .planner_cases import Case, exhaustive_step_time, random_case

CASES = 2000
FACTOR = 1.25


def random_memory(rng: random.Random, case: Case) -> tuple[StateMemory, ...]:
    """Memory of every kind: ample, tight, too little; activations straight, bent and with a jump at the first sample."""
    state = float(rng.randint(20, 400))
    tightness = rng.choice((0.3, 0.6, 1.0, 1.5, 3.0))
    found: list[StateMemory] = []
    for rank, times in enumerate(case.times):
        if found and case.times[rank - 1] is times and rng.random() < 0.5:
            found.append(found[-1])
            continue
        total, table = float(rng.choice((0, rng.randint(0, 40)))), [0.0]
        for _ in times:
            total += rng.choice((0, 5, 10, rng.randint(0, 60)))
            table.append(total)
        step = state * rng.choice((0.0, 0.0, 1.0, 1.6))
        found.append(
            StateMemory(
                memory_bytes=float(round(tightness * state * rng.uniform(0.2, 2.0) + rng.choice((0.0, total)))),
                fixed_bytes=float(rng.choice((0, rng.randint(0, 30)))),
                sharded_bytes=state,
                activation_bytes=tuple(table),
                step_sharded_bytes=step,
            )
        )
    return tuple(found)


def possible(memory: tuple[StateMemory, ...], caps: tuple[int, ...]) -> bool:
    """Do shares exist beside which every rank has room for its cap? By the definition, in bytes."""
    lowest = smallest_share(len(memory))
    most = []
    for own, cap in zip(memory, caps, strict=True):
        # A rank without samples runs one of weight 0.
        share = (own.memory_bytes - own.fixed_bytes - own.activation_bytes[max(1, cap)]) / own.sharded_bytes
        if own.step_sharded_bytes:
            share = min(share, (own.memory_bytes - own.step_fixed_bytes) / own.step_sharded_bytes)
        most.append(min(share, 1.0))
    return min(most) >= lowest and math.fsum(most) >= 1.0 - 1e-9


def exhaustive(case: Case, memory: tuple[StateMemory, ...]) -> float | None:
    """The least step time over all caps and all micro-batches; even shares at even cost, others at the factor's."""
    least = math.inf
    world_size = len(memory)
    slower = replace(case, per_micro_step_s=case.per_micro_step_s * FACTOR, per_step_s=case.per_step_s * FACTOR)
    choices = [caps for caps in itertools.product(*(range(len(times) + 1) for times in case.times)) if any(caps)]
    for caps in not_dominated([caps for caps in choices if possible(memory, caps)]):
        least = min(least, exhaustive_step_time(replace(slower, caps=caps)))
    even = [own.largest_shares() >= 1.0 / world_size - 1e-9 for own in memory]
    for caps in not_dominated([c for c in choices if all(own[cap] for own, cap in zip(even, c, strict=True))]):
        least = min(least, exhaustive_step_time(replace(case, caps=caps)))
    return None if math.isinf(least) else least


def not_dominated(choices: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Without choices that another one allows on every rank: more room never makes a step longer."""
    return [
        caps
        for caps in choices
        if not any(other != caps and all(a >= b for a, b in zip(other, caps, strict=True)) for other in choices)
    ]


def small_case(rng: random.Random, zero_stage: int) -> Case:
    case = random_case(rng, zero_stage)
    times = case.times[:3]
    if len(times) == 3:
        times = tuple(own[:4] for own in times)
    times = tuple(own[:6] for own in times)
    return replace(
        case,
        times=times,
        caps=tuple(len(own) for own in times),
        overheads=case.overheads[: len(times)],
        global_batch_size=min(case.global_batch_size, 14),
    )


def solve(case: Case, memory: tuple[StateMemory, ...]) -> StatePlan:
    return find_state_plan(
        case.profile(),
        memory,
        global_batch_size=case.global_batch_size,
        zero_stage=case.zero_stage,
        max_micro_batch_size=case.caps,
        communication_factor=FACTOR,
    )


def assert_fits(found: StatePlan, memory: tuple[StateMemory, ...]) -> None:
    world_size = len(memory)
    fractions = found.fractions or (1.0 / world_size,) * world_size
    assert math.fsum(fractions) == pytest.approx(1.0, abs=1e-12)
    for own, share, rank in zip(memory, fractions, found.plan.ranks, strict=True):
        largest = max(rank.micro_batch_sizes)
        assert share >= smallest_share(world_size) * (1 - 1e-6)
        needed = own.fixed_bytes + share * own.sharded_bytes + own.activation_bytes[max(1, largest)]
        assert needed <= own.memory_bytes * (1 + 1e-6) + 1e-6
        assert own.step_fixed_bytes + share * own.step_sharded_bytes <= own.memory_bytes * (1 + 1e-6) + 1e-6


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_equals_every_choice_there_is(zero_stage: int) -> None:
    rng = random.Random(7000 + zero_stage)
    impossible = uneven = 0
    for _ in range(-(-CASES // 3)):
        case = small_case(rng, zero_stage)
        memory = random_memory(rng, case)
        want = exhaustive(case, memory)
        if want is None:
            with pytest.raises(InsufficientMemoryError):
                solve(case, memory)
            impossible += 1
            continue
        found = solve(case, memory)
        assert found.plan.predicted_step_time_s == pytest.approx(want, rel=1e-9), (case, memory)
        assert found.proven
        assert step_time(found.profile, found.plan) == pytest.approx(found.plan.predicted_step_time_s)
        assert_fits(found, memory)
        uneven += found.fractions is not None
    assert impossible > 20
    assert uneven > 60


def test_never_worse_than_even_shares() -> None:
    rng = random.Random(5)
    better = 0
    for number in range(2000):
        case = random_case(rng, 1 + number % 3)
        memory = random_memory(rng, case)
        case = replace(case, caps=tuple(len(own) for own in case.times))
        share = 1.0 / len(memory)
        caps = [own.cap(share) if own.largest_shares()[0] >= share else -1 for own in memory]
        if min(caps) < 0 or max(caps) < 1:
            continue
        even = find_plan(
            replace(case, caps=tuple(caps)).profile(),
            global_batch_size=case.global_batch_size,
            zero_stage=case.zero_stage,
        )
        found = solve(case, memory)
        assert found.plan.predicted_step_time_s <= even.predicted_step_time_s * (1 + 1e-9)
        better += found.plan.predicted_step_time_s < even.predicted_step_time_s * 0.99
    assert better > 10


def linear(memory_bytes: float, *, state: float = 160.0, per_sample: float = 10.0, largest: int = 64) -> StateMemory:
    return StateMemory(
        memory_bytes=memory_bytes,
        fixed_bytes=0.0,
        sharded_bytes=state,
        activation_bytes=tuple(per_sample * size for size in range(largest + 1)),
    )


def two_ranks(times: tuple[float, float] = (1.0, 1.0), *, largest: int = 64, zero_stage: int = 3) -> ClusterProfile:
    tables = tuple(tuple(own * (0.5 + size) for size in range(1, largest + 1)) for own in times)
    case = Case(
        times=tables, caps=(largest, largest), global_batch_size=32, zero_stage=zero_stage, per_micro_step_s=0.2
    )
    return case.profile()


def test_state_follows_memory_and_batch_follows_speed() -> None:
    memory = (linear(240.0), linear(100.0))
    found = find_state_plan(two_ranks(), memory, global_batch_size=32, zero_stage=3)
    even = find_plan(replace_caps(two_ranks(), [own.cap(0.5) for own in memory]), global_batch_size=32, zero_stage=3)
    assert found.fractions is not None
    assert found.fractions[0] > 0.7
    assert found.plan.predicted_step_time_s < even.predicted_step_time_s
    batches = [rank.rank_batch_size for rank in found.plan.ranks]
    assert abs(batches[0] - batches[1]) <= 2
    assert found.held_bytes == pytest.approx([160 * share for share in found.fractions])
    assert found.even_bytes == (80.0, 80.0)


def test_even_shares_where_memory_is_ample() -> None:
    found = find_state_plan(two_ranks(), (linear(2000.0), linear(1000.0)), global_batch_size=32, zero_stage=3)
    assert found.fractions is None
    assert found.plan.offloading_ranks == ()


def test_renumbering_ranks_renumbers_the_plan() -> None:
    memory = (linear(240.0), linear(100.0))
    found = find_state_plan(two_ranks((1.0, 2.0)), memory, global_batch_size=32, zero_stage=3)
    other = find_state_plan(two_ranks((2.0, 1.0)), memory[::-1], global_batch_size=32, zero_stage=3)
    assert found.fractions is not None
    assert other.fractions == found.fractions[::-1]
    assert [r.micro_batch_sizes for r in other.plan.ranks] == [r.micro_batch_sizes for r in found.plan.ranks][::-1]


def test_offload_only_where_shares_are_not_enough_and_only_on_as_many_ranks() -> None:
    memory = (linear(100.0), linear(50.0))
    offloaded = tuple(replace(own, sharded_bytes=40.0) for own in memory)
    with pytest.raises(InsufficientMemoryError, match=r"rank 1 \(d\) has room for .*optimizer offload"):
        find_state_plan(two_ranks(), memory, global_batch_size=32, zero_stage=3)
    found = find_state_plan(two_ranks(), memory, global_batch_size=32, zero_stage=3, offloaded=offloaded)
    assert found.plan.offloading_ranks == (1,)
    ample = find_state_plan(
        two_ranks(), (linear(900.0), linear(900.0)), global_batch_size=32, zero_stage=3, offloaded=offloaded
    )
    assert ample.plan.offloading_ranks == ()


def test_given_fractions_set_the_limits() -> None:
    memory = (linear(240.0), linear(100.0))
    found = plan_with_fractions(two_ranks(), memory, (0.75, 0.25), global_batch_size=32, zero_stage=3)
    assert found.max_micro_batch_size == (12, 6)
    assert found.fractions == (0.75, 0.25)
    even = plan_with_fractions(two_ranks(), memory, (0.5, 0.5), global_batch_size=32, zero_stage=3)
    assert even.fractions is None
    assert even.max_micro_batch_size == (16, 2)
    with pytest.raises(InsufficientMemoryError, match="beside shares of"):
        plan_with_fractions(two_ranks(), memory, (0.1, 0.9), global_batch_size=32, zero_stage=3)
    with pytest.raises(ConfigError, match=r"sum to 1.2"):
        plan_with_fractions(two_ranks(), memory, (0.6, 0.6), global_batch_size=32, zero_stage=3)
    with pytest.raises(PlanError, match="3 state fractions for 2 ranks"):
        plan_with_fractions(two_ranks(), memory, (0.4, 0.3, 0.3), global_batch_size=32, zero_stage=3)


def test_other_strategies_divide_the_batch_their_way() -> None:
    memory = (linear(240.0), linear(100.0))
    found = find_state_plan(two_ranks(), memory, global_batch_size=32, zero_stage=3, strategy="even")
    assert [rank.rank_batch_size for rank in found.plan.ranks] == [16, 16]
    assert not found.proven or found.fractions is None


def test_wrong_requests_name_everything() -> None:
    memory = (linear(240.0),)
    with pytest.raises(PlanError) as caught:
        find_state_plan(two_ranks(), memory, global_batch_size=32, zero_stage=3, communication_factor=0.5)
    assert "1 entries for 2 ranks" in str(caught.value)
    assert "communication_factor is 0.5" in str(caught.value)
    with pytest.raises(PlanError, match="stage 1, 2 and 3"):
        find_state_plan(two_ranks(zero_stage=0), (linear(1.0), linear(1.0)), global_batch_size=8, zero_stage=0)


def test_a_search_cut_short_says_so_and_is_close() -> None:
    """Eight unlike ranks: what a few looks find is within a few percent of what many find."""
    rng = random.Random(3)
    types = []
    for rank in range(8):
        slope = rng.uniform(0.5, 2.0)
        times = np.array([0.0] + [slope * (1 + size) for size in range(1, 17)])
        types.append(
            TradeType(
                ranks=(rank,), times=times, given_up=np.arange(17) * rng.uniform(0.005, 0.02), step_overhead_s=0.0
            )
        )
    few = lockstep_caps(types, 128, 0.6, lambda seconds: seconds + 0.5, most_looks=30)
    many = lockstep_caps(types, 128, 0.6, lambda seconds: seconds + 0.5, most_looks=3000)
    assert few is not None
    assert many is not None
    assert not few.proven
    assert sum(float(kind.given_up[few.caps[kind.ranks[0]]]) for kind in types) <= 0.6 + 1e-9


def test_fractions_are_as_equal_as_room_allows() -> None:
    memory = (linear(240.0), linear(240.0), linear(60.0))
    assert fractions_for(memory, (4, 4, 1)) == pytest.approx([0.34375, 0.34375, 0.3125])
    assert fractions_for((*memory[:2], linear(70.0)), (1, 1, 0)) == pytest.approx([1 / 3] * 3)
    with pytest.raises(PlanError, match="together less than 1"):
        fractions_for((linear(50.0), linear(50.0)), (1, 1))


def test_memory_from_a_profile_takes_whole_weights_and_gradients_off() -> None:
    profile = two_ranks(largest=4)
    whole = 2 * 4 * profile.num_parameters
    points = tuple(
        Measurement(micro_batch_size=size, step_time_s=float(size), peak_memory_bytes=whole + 100 * size)
        for size in (1, 2, 4)
    )
    profile = replace(profile, ranks=tuple(replace(rank, points=points) for rank in profile.ranks))
    memory = memory_from_profile(profile, 3, usable_bytes=(20_000, 30_000), largest_micro_batch=6)
    assert memory[0].activation_bytes == (0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0)
    assert (memory[0].fixed_bytes, memory[0].sharded_bytes) == (0.0, 20_000.0)
    memory = memory_from_profile(profile, 1, usable_bytes=(20_000, 30_000), largest_micro_batch=6, trainable=100)
    assert (memory[1].fixed_bytes, memory[1].sharded_bytes) == (4400.0, 1200.0)
    with pytest.raises(ProfileError, match="rank 0: memory was measured at 0 micro-batch sizes"):
        memory_from_profile(two_ranks(), 3, usable_bytes=(1, 1), largest_micro_batch=2)
    with pytest.raises(PlanError, match="shards no training state"):
        memory_from_profile(profile, 0, usable_bytes=(1, 1), largest_micro_batch=2)


def replace_caps(profile: ClusterProfile, caps: list[int]) -> ClusterProfile:
    (number, stage), *_ = profile.zero_stages.items()
    return replace(profile, zero_stages={number: replace(stage, max_micro_batch_size=tuple(caps))})


def test_found_plan_is_a_plan() -> None:
    found = find_state_plan(two_ranks(), (linear(240.0), linear(100.0)), global_batch_size=32, zero_stage=3)
    assert Plan.from_dict(found.plan.to_dict()) == found.plan
    assert found.plan.state_fractions == found.fractions
    assert [rank["state_fraction"] for rank in found.plan.to_dict()["ranks"]] == list(found.fractions or ())


def test_fractions_are_part_of_what_a_plan_decides() -> None:
    def plan(*fractions: float | None, zero_stage: int = 3) -> Plan:
        ranks = [RankPlan(rank=i, micro_batch_sizes=(2,), state_fraction=f) for i, f in enumerate(fractions)]
        return Plan(
            zero_stage=zero_stage,
            global_batch_size=2 * len(ranks),
            predicted_step_time_s=0.0,
            strategy="manual",
            ranks=tuple(ranks),
        )

    even = plan(None, None)
    assert even.state_fractions is None
    assert "state_fraction" not in even.to_dict()["ranks"][0]
    assert plan(0.75, 0.25).digest != even.digest
    assert plan(0.75, 0.25).digest != plan(0.25, 0.75).digest
    for fractions, stage, message in (
        ((0.75, None), 3, "all ranks have one, or none has"),
        ((0.75, 0.2), 3, "together 0.95; shares must sum to 1"),
        ((1.0, 0.0), 3, "a share above 0"),
        ((0.5, 0.5), 0, "ZeRO stage 0 shards no training state"),
    ):
        with pytest.raises(PlanError, match=message):
            plan(*fractions, zero_stage=stage)
