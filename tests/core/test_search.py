"""`find_plan`: what every plan keeps to, the rivals, the choice of the stage, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accelerate_poplar.errors import InsufficientMemoryError, PlanError, ProfileError
from accelerate_poplar.limits import limited_by
from accelerate_poplar.plan import Plan
from accelerate_poplar.profiles import ClusterProfile, StageProfile
from accelerate_poplar.search import STRATEGIES, find_plan, misfits
from accelerate_poplar.simulate import step_time
from tests.core.planner_cases import Case, measurements, random_case

SEEDS = st.integers(0, 2**32)
STAGES = st.integers(0, 3)
RIVALS = [name for name in STRATEGIES if name != "optimal"]


def linear(speed: float, cap: int, *, fixed: float = 0.0) -> tuple[float, ...]:
    """Seconds for 1 ... cap samples at `speed` samples per second after `fixed` seconds."""
    return tuple(fixed + size / speed for size in range(1, cap + 1))


def plan_of(case: Case, strategy: str = "optimal") -> Plan:
    return find_plan(
        case.profile(), global_batch_size=case.global_batch_size, zero_stage=case.zero_stage, strategy=strategy
    )


def sizes_of(plan: Plan) -> list[tuple[int, ...]]:
    return [rank.micro_batch_sizes for rank in plan.ranks]


# What every plan keeps to


@given(SEEDS, STAGES, st.sampled_from(STRATEGIES))
@settings(deadline=None)
def test_shares_sum_to_the_batch_within_memory_and_are_the_same_every_time(
    seed: int, zero_stage: int, strategy: str
) -> None:
    case = random_case(random.Random(seed), zero_stage)
    assume(strategy != "even" or min(case.caps) > 0)
    plan = plan_of(case, strategy)
    assert sum(rank.rank_batch_size for rank in plan.ranks) == case.global_batch_size
    assert all(max(own) <= cap for own, cap in zip(sizes_of(plan), case.caps, strict=True))
    assert plan.strategy == strategy
    assert plan.predicted_step_time_s == step_time(case.profile(), plan)
    assert plan == plan_of(case, strategy)
    assert Plan.from_dict(plan.to_dict()) == plan


@given(SEEDS, STAGES, st.sampled_from(RIVALS))
@settings(max_examples=300, deadline=None)
def test_no_rival_is_faster(seed: int, zero_stage: int, rival: str) -> None:
    rng = random.Random(seed)
    case = random_case(rng, zero_stage)
    case = replace(
        case, global_batch_size=rng.randint(1, 300), peaks=tuple(1e12 * (0.1 + rng.random()) for _ in case.times)
    )
    assume(rival != "even" or min(case.caps) > 0)
    assert plan_of(case).predicted_step_time_s <= plan_of(case, rival).predicted_step_time_s * (1 + 1e-9)


@given(SEEDS, STAGES, st.sampled_from([s for s in STRATEGIES if s != "even"]), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_permuting_ranks_permutes_the_plan(seed: int, zero_stage: int, strategy: str, rng: random.Random) -> None:
    # `even` is left out: it does not look at ranks, so its odd samples go to the first ones, whatever they are.
    case = random_case(random.Random(seed), zero_stage)
    order = list(range(len(case.times)))
    rng.shuffle(order)
    shuffled = replace(
        case,
        times=tuple(case.times[i] for i in order),
        caps=tuple(case.caps[i] for i in order),
        overheads=tuple(case.overheads[i] for i in order),
    )
    before, after = plan_of(case, strategy), plan_of(shuffled, strategy)
    assert after.predicted_step_time_s == pytest.approx(before.predicted_step_time_s, rel=1e-12)

    def by_kind(of: Case, plan: Plan) -> list[tuple[object, ...]]:
        # Which of several equal ranks gets the odd sample goes by number, so kinds are compared as a whole. Caps
        # above the global batch make no difference.
        caps = [min(cap, of.global_batch_size) for cap in of.caps]
        return sorted(zip(of.times, caps, of.overheads, sizes_of(plan), strict=True))

    assert by_kind(case, before) == by_kind(shuffled, after)


@given(SEEDS, STAGES)
@settings(deadline=None)
def test_equal_ranks_differ_by_one_sample_at_most(seed: int, zero_stage: int) -> None:
    case = random_case(random.Random(seed), zero_stage)
    twins = replace(
        case,
        times=case.times * 3,
        caps=case.caps * 3,
        overheads=case.overheads * 3,
        global_batch_size=3 * case.global_batch_size + 1,
    )
    plan, count = plan_of(twins), len(case.times)
    for rank in range(count):
        own = [plan.ranks[r].rank_batch_size for r in range(rank, 3 * count, count)]
        assert max(own) - min(own) <= 1


@given(SEEDS, STAGES, st.floats(1e-3, 1e3))
@settings(deadline=None)
def test_scaling_all_times_scales_the_step_time(seed: int, zero_stage: int, factor: float) -> None:
    case = random_case(random.Random(seed), zero_stage)
    scaled = replace(
        case,
        times=tuple(tuple(factor * t for t in own) for own in case.times),
        overheads=tuple(factor * t for t in case.overheads),
        per_micro_step_s=factor * case.per_micro_step_s,
        per_step_s=factor * case.per_step_s,
    )
    assert plan_of(scaled).predicted_step_time_s == pytest.approx(factor * plan_of(case).predicted_step_time_s)


@given(SEEDS, STAGES, st.integers(0, 3), st.sampled_from(["faster", "bigger", "lighter", "joined"]))
@settings(max_examples=300, deadline=None)
def test_a_better_rank_never_makes_the_step_slower(seed: int, zero_stage: int, which: int, better: str) -> None:
    rng = random.Random(seed)
    case = random_case(rng, zero_stage)
    case = replace(case, times=tuple(tuple(sorted(own)) for own in case.times))
    rank = which % len(case.times)

    def changed(values: tuple[object, ...], value: object) -> tuple[object, ...]:
        return (*values[:rank], value, *values[rank + 1 :])

    if better == "faster":
        factors = sorted(rng.uniform(0.3, 1.0) for _ in case.times[rank])
        best = changed(case.times, tuple(sorted(f * t for f, t in zip(factors, case.times[rank], strict=True))))
        improved = replace(case, times=best)
    elif better == "bigger":
        improved = replace(case, caps=changed(case.caps, min(len(case.times[rank]), case.caps[rank] + 1)))
    elif better == "lighter":
        improved = replace(case, overheads=changed(case.overheads, case.overheads[rank] / 2))
    else:
        improved = replace(
            case,
            times=(*case.times, (5.0,)),
            caps=(*case.caps, 1),
            overheads=(*case.overheads, 0.0),
        )
    assert plan_of(improved).predicted_step_time_s <= plan_of(case).predicted_step_time_s * (1 + 1e-12)


def test_digests_agree_across_machines() -> None:
    # Computed once; any machine must arrive at the same text.
    case = Case(
        times=(linear(10.0, 8, fixed=0.05), linear(4.0, 6, fixed=0.02), linear(10.0, 8, fixed=0.05)),
        caps=(8, 6, 8),
        global_batch_size=64,
        zero_stage=2,
        per_micro_step_s=0.1,
        overlap=0.3,
    )
    plan = plan_of(case)
    assert sizes_of(plan) == DIGEST_SIZES
    assert plan.digest == DIGEST


DIGEST_SIZES = [(8, 8, 8, 3), (3, 3, 3, 1), (8, 8, 8, 3)]
DIGEST = "sha256:7931f0c4d78921177b3318b144e0c5b15ac060ecb8e9f889a27e1432474cdfb9"


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_large_clusters_are_planned_like_small_ones(zero_stage: int) -> None:
    # 1,000 copies of the same two ranks and 1,000 times the batch: the same micro-batches.
    pair = Case(
        times=(linear(10.0, 16, fixed=0.1), linear(3.0, 8, fixed=0.1)),
        caps=(16, 8),
        global_batch_size=40,
        zero_stage=zero_stage,
        per_micro_step_s=0.05,
        overlap=0.2,
    )
    many = replace(pair, times=pair.times * 1000, caps=pair.caps * 1000, global_batch_size=40_000)
    assert plan_of(many).predicted_step_time_s == pytest.approx(plan_of(pair).predicted_step_time_s)
    assert sizes_of(plan_of(many)) == sizes_of(plan_of(pair)) * 1000


# The rivals, by hand


def test_even_gives_all_ranks_the_largest_common_micro_batch() -> None:
    case = Case(times=(linear(4.0, 9), linear(1.0, 3)), caps=(9, 3), global_batch_size=14, zero_stage=2)
    assert sizes_of(plan_of(case, "even")) == [(3, 3, 1), (3, 3, 1)]


def test_even_spreads_the_samples_over_its_micro_steps() -> None:
    case = Case(times=(linear(1.0, 8),) * 2, caps=(8, 8), global_batch_size=20, zero_stage=1)
    assert sizes_of(plan_of(case, "even")) == [(5, 5), (5, 5)]
    odd = replace(case, global_batch_size=21)
    assert sizes_of(plan_of(odd, "even")) == [(6, 5), (6, 4)]


def test_flops_shares_by_peak_whatever_was_measured() -> None:
    case = Case(
        times=(linear(1.0, 4), linear(1.0, 4)), caps=(4, 4), global_batch_size=12, peaks=(3e12, 1e12), zero_stage=3
    )
    assert sizes_of(plan_of(case, "flops")) == [(3, 3, 3), (1, 1, 1)]
    local = replace(case, zero_stage=0)
    assert sizes_of(plan_of(local, "flops")) == [(3, 3, 3), (3,)]


def test_flops_needs_to_know_the_peaks() -> None:
    case = Case(times=(linear(1.0, 4),) * 2, caps=(4, 3), global_batch_size=12, peaks=(1e12, 0.0))
    with pytest.raises(PlanError, match=r"`peak_flops` of every rank, but it is 0 for rank 1\b.*`proportional`"):
        plan_of(case, "flops")


def test_proportional_shares_by_measured_speed_and_rounds_by_largest_remainder() -> None:
    case = Case(times=(linear(2.0, 9), linear(1.0, 9), linear(1.0, 9)), caps=(9, 9, 9), global_batch_size=11)
    assert [r.rank_batch_size for r in plan_of(case, "proportional").ranks] == [5, 3, 3]


def test_poplar_greedy_works_at_the_fastest_size_and_gives_the_rest_to_the_earliest() -> None:
    # Rank 0 is fastest at size 2 (2 samples/s); rank 1 does 1 sample/s.
    case = Case(times=((0.9, 1.0, 1.8), (1.0, 2.0, 3.0)), caps=(3, 3), global_batch_size=7)
    plan = plan_of(case, "poplar")
    assert sizes_of(plan) == [(2, 2, 1), (1, 1)]


def test_poplar_greedy_starts_from_shares_of_speed_and_not_from_nothing() -> None:
    # Rank 0 has a long optimizer step; one by one from the start it would get a single sample.
    case = Case(times=((1.0,), (1.0,)), caps=(1, 1), global_batch_size=4, overheads=(3.0, 0.0))
    assert sizes_of(plan_of(case, "poplar")) == [(1, 1), (1, 1)]


def test_poplar_sweep_repeats_one_micro_step() -> None:
    case = Case(times=(linear(2.0, 8), linear(1.0, 8)), caps=(8, 4), global_batch_size=30, zero_stage=3)
    sizes = sizes_of(plan_of(case, "poplar"))
    assert all(len(set(own[:-1])) == 1 for own in sizes)
    assert sum(map(sum, sizes)) == 30


# Ties


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_of_equally_fast_micro_batches_the_largest_are_run(zero_stage: int) -> None:
    # At a constant speed any split takes the same time; fewer micro-steps are less to go wrong.
    case = Case(times=(linear(8.0, 4),), caps=(4,), global_batch_size=403, zero_stage=zero_stage)
    assert sizes_of(plan_of(case)) == [(4,) * 100 + (3,)]


# Shares people asked for


@pytest.mark.scenario(2)
def test_four_kinds_of_card_get_shares_by_what_they_can_do() -> None:
    caps = (24, 12, 16, 24)
    case = Case(times=tuple(linear(float(cap), cap) for cap in caps), caps=caps, global_batch_size=76, zero_stage=2)
    plan = plan_of(case)
    assert plan.global_batch_size == 76
    weights = [rank.rank_batch_size / plan.global_batch_size for rank in plan.ranks]
    assert weights == [24 / 76, 12 / 76, 16 / 76, 24 / 76]


@pytest.mark.scenario(5)
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_equal_speed_and_unequal_memory_is_limited_by_the_small_rank(zero_stage: int) -> None:
    curve = linear(10.0, 16, fixed=0.2)
    case = Case(times=(curve, curve), caps=(8, 16), global_batch_size=160, zero_stage=zero_stage)
    assert limited_by(case.profile(), plan_of(case)) == ("memory", "speed")


@pytest.mark.scenario(5)
def test_where_ranks_do_not_wait_both_use_all_their_memory() -> None:
    curve = linear(10.0, 16, fixed=0.2)
    case = Case(times=(curve, curve), caps=(8, 16), global_batch_size=160, zero_stage=1)
    plan = plan_of(case)
    assert [max(own) for own in sizes_of(plan)] == [8, 16]
    assert limited_by(case.profile(), plan) == ("memory", "memory")


def test_a_rank_with_room_to_spare_is_limited_by_speed() -> None:
    case = Case(times=(linear(10.0, 8), linear(1.0, 8)), caps=(8, 8), global_batch_size=22, zero_stage=0)
    profile = case.profile()
    assert limited_by(profile, plan_of(case)) == ("speed", "speed")
    assert limited_by(profile, replace(plan_of(case), strategy="manual")) == ("speed", "speed")


def test_further_caps_count_as_memory() -> None:
    curve = linear(10.0, 16, fixed=0.2)
    case = Case(times=(curve, curve), caps=(16, 16), global_batch_size=160, zero_stage=2)
    profile = case.profile()
    plan = find_plan(profile, global_batch_size=160, zero_stage=2, max_micro_batch_size=[4, 16])
    assert max(plan.ranks[0].micro_batch_sizes) == 4
    assert limited_by(profile, plan, max_micro_batch_size=[4, 16])[0] == "memory"


@pytest.mark.scenario(7)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_speeds_of_three_to_two_make_shares_of_three_to_two(zero_stage: int) -> None:
    case = Case(times=(linear(3.0, 12), linear(2.0, 12)), caps=(12, 12), global_batch_size=100, zero_stage=zero_stage)
    plan = plan_of(case)
    assert [rank.rank_batch_size for rank in plan.ranks] == [60, 40]
    gain = plan_of(case, "even").predicted_step_time_s / plan.predicted_step_time_s
    assert gain == pytest.approx(2.5 / 2.0)


@pytest.mark.scenario(24)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_eight_samples_on_three_ranks_can_be_four_two_two(zero_stage: int) -> None:
    case = Case(
        times=(linear(4.0, 8), linear(2.0, 8), linear(2.0, 8)),
        caps=(8, 8, 8),
        global_batch_size=8,
        zero_stage=zero_stage,
        per_micro_step_s=0.1,
    )
    assert [rank.rank_batch_size for rank in plan_of(case).ranks] == [4, 2, 2]


def test_a_batch_smaller_than_the_cluster_leaves_ranks_without_samples() -> None:
    case = Case(times=(linear(1.0, 4),) * 4, caps=(4,) * 4, global_batch_size=2, zero_stage=3)
    assert sorted(sizes_of(plan_of(case))) == [(0,), (0,), (1,), (1,)]


# Stages


def staged(profile: ClusterProfile, **stages: StageProfile) -> ClusterProfile:
    """`staged(profile, z0=..., z3=...)`."""
    return replace(profile, zero_stages={int(name[1:]): stage for name, stage in stages.items()})


def two_ranks() -> ClusterProfile:
    curve = linear(10.0, 8, fixed=0.1)
    return Case(times=(curve, curve), caps=(8, 8), global_batch_size=64).profile()


def test_auto_takes_the_fastest_stage_at_which_every_rank_fits() -> None:
    profile = staged(
        two_ranks(),
        z0=StageProfile(max_micro_batch_size=(8, 0)),
        z1=StageProfile(max_micro_batch_size=(2, 2)),
        z2=StageProfile(max_micro_batch_size=(8, 8), per_micro_step_s=0.01),
        z3=StageProfile(max_micro_batch_size=(8, 8), per_micro_step_s=9.0),
    )
    assert find_plan(profile, global_batch_size=64, zero_stage="auto").zero_stage == 2
    assert misfits(profile) == {0: (1,)}


def test_auto_prefers_the_lower_of_equally_fast_stages() -> None:
    same = StageProfile(max_micro_batch_size=(8, 8))
    profile = staged(two_ranks(), z3=same, z1=same, z2=same)
    assert find_plan(profile, global_batch_size=64, zero_stage="auto").zero_stage == 1


def test_auto_respects_further_caps() -> None:
    profile = staged(two_ranks(), z0=StageProfile(max_micro_batch_size=(8, 8)))
    with pytest.raises(InsufficientMemoryError, match=r"ZeRO stage 0 on rank 1 "):
        find_plan(profile, global_batch_size=8, zero_stage="auto", max_micro_batch_size=[8, 0])


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_stage_asked_for_by_number_gives_a_rank_without_room_nothing(zero_stage: int) -> None:
    case = Case(times=(linear(1.0, 4), linear(9.0, 4)), caps=(4, 0), global_batch_size=8, zero_stage=zero_stage)
    plan = plan_of(case)
    assert [rank.rank_batch_size for rank in plan.ranks] == [8, 0]


def test_auto_without_any_fitting_stage_names_rank_memory_and_remedy() -> None:
    profile = staged(two_ranks(), z2=StageProfile(max_micro_batch_size=(8, 0)))
    points = tuple(replace(p, peak_memory_bytes=3 * 2**30) for p in profile.ranks[1].points)
    profile = replace(profile, ranks=(profile.ranks[0], replace(profile.ranks[1], points=points)))
    with pytest.raises(
        InsufficientMemoryError,
        match=r"ZeRO stage 2 on rank 1 \(d, 16.0 GiB; a micro-batch of 1 alone takes 3.0 GiB.*gradient checkpointing",
    ):
        find_plan(profile, global_batch_size=8, zero_stage="auto")


def test_nothing_fits_anywhere() -> None:
    case = Case(times=(linear(1.0, 4),) * 12, caps=(0,) * 12, global_batch_size=8, zero_stage=1)
    with pytest.raises(InsufficientMemoryError, match=r"stage 1 on rank 0 .*; rank 7 .*; 4 more ranks"):
        plan_of(case)


def test_even_cannot_leave_a_rank_out() -> None:
    case = Case(times=(linear(1.0, 4),) * 2, caps=(4, 0), global_batch_size=8, zero_stage=2)
    with pytest.raises(InsufficientMemoryError, match=r"rank 1: an even split .* `optimal`"):
        plan_of(case, "even")


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0; it must be a whole number of at least 1"),
        ({"global_batch_size": 2.5}, "global_batch_size is 2.5"),
        ({"zero_stage": 4}, "zero_stage is 4; it must be 0, 1, 2, 3 or 'auto'"),
        ({"strategy": "best"}, "strategy is 'best'; it must be one of optimal, poplar"),
        ({"max_micro_batch_size": [1]}, "max_micro_batch_size has 1 entries for 2 ranks"),
        ({"max_micro_batch_size": [1, -1]}, "rank 1: max_micro_batch_size is -1"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, object], message: str) -> None:
    request = {"global_batch_size": 8, "zero_stage": 0, **changes}
    with pytest.raises(PlanError, match=message):
        find_plan(two_ranks(), **request)


def test_several_mistakes_are_named_together() -> None:
    with pytest.raises(PlanError, match=r"(?s)2 problems.*global_batch_size is -1.*strategy is 'fast'"):
        find_plan(two_ranks(), global_batch_size=-1, zero_stage=0, strategy="fast")


def test_a_stage_that_was_not_profiled_is_named() -> None:
    with pytest.raises(ProfileError, match=r"ZeRO stage 3 was not profiled \(profiled stages: 0\)"):
        find_plan(two_ranks(), global_batch_size=8, zero_stage=3)


def test_profiles_that_do_not_hold_together_are_refused() -> None:
    profile = two_ranks()
    short = staged(profile, z0=StageProfile(max_micro_batch_size=(8,)))
    with pytest.raises(PlanError, match="has 1 entries for 2 ranks"):
        find_plan(short, global_batch_size=8, zero_stage=0)
    twice = replace(profile, ranks=(profile.ranks[0], profile.ranks[0]))
    with pytest.raises(PlanError, match=r"ranks are \[0, 0\]"):
        find_plan(twice, global_batch_size=8, zero_stage=0)
    with pytest.raises(PlanError, match="no ranks"):
        find_plan(replace(profile, ranks=(), zero_stages={}), global_batch_size=8, zero_stage=0)


def test_points_that_are_no_curve_name_the_rank() -> None:
    profile = two_ranks()
    broken = replace(profile.ranks[1], points=measurements([1.0, float("nan")]))
    with pytest.raises(ProfileError, match=r"rank 1: points\[1\]: `step_time_s` is nan"):
        find_plan(replace(profile, ranks=(profile.ranks[0], broken)), global_batch_size=8, zero_stage=0)
    empty = replace(profile.ranks[0], points=())
    with pytest.raises(ProfileError, match="rank 0: `points` is empty"):
        find_plan(replace(profile, ranks=(empty, profile.ranks[1])), global_batch_size=8, zero_stage=0)


def test_step_times_of_plans_that_do_not_suit_the_profile_are_refused() -> None:
    case = Case(times=(linear(1.0, 4, fixed=1.0),) * 2, caps=(4, 4), global_batch_size=8, zero_stage=2)
    plan = plan_of(case)
    with pytest.raises(PlanError, match="the plan is for 2 ranks, the profile for 1"):
        step_time(Case(times=(linear(1.0, 4),), caps=(4,), global_batch_size=8, zero_stage=2).profile(), plan)
    with pytest.raises(PlanError, match=r"rank 1: micro-batch size 4 is above 3, the largest that fits"):
        step_time(replace(case, caps=(4, 3)).profile(), plan)
