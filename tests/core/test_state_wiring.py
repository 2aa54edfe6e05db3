"""Shares of the training state from the settings to the plan, without other processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_poplar import PoplarConfig, PoplarTrainingArguments
from accelerate_poplar.comm import SingleRank
from accelerate_poplar.errors import CompatibilityError, ConfigError, InsufficientMemoryError, PlanError, ProfileError
from accelerate_poplar.measure import MeasuredProfile, explain_memory
from accelerate_poplar.memory import ActivationMemory
from accelerate_poplar.model_state import ModelStates
from accelerate_poplar.plan import Plan, RankPlan
from accelerate_poplar.planning import find_shared_plan, plan_by_hand
from accelerate_poplar.profiles import Measurement, RankProfile, StageProfile
from accelerate_poplar.rank_memory import RankMemory
from accelerate_poplar.replan import judge
from accelerate_poplar.report import plan_table
from accelerate_poplar.run_request import BatchRequest, candidate_stages, state_conflicts
from accelerate_poplar.state_choice import choose_plan
from accelerate_poplar.state_engine import check_shares, require_shares, shared_state
from accelerate_poplar.state_layout import StateShares
from accelerate_poplar.step_model import break_down_plan

from .test_state_checkpoint import save_stage2

BATCH = BatchRequest(per_device_micro_batch_size=2, gradient_accumulation_steps=3, world_size=2)


class TwoRanks(SingleRank):
    """Rank 0 of two that think alike."""

    world_size = 2

    def gather(self, value: Any) -> list[Any]:
        """The value, twice."""
        return [value, value]


def measured(*budgets: int, proven: tuple[int | None, ...] = (None, None)) -> MeasuredProfile:
    """Two equally fast ranks; every stage shards 400 bytes (200 on each under even shares) and keeps 100 whole."""
    states = {
        stage: ModelStates(
            parameters=0 if stage else 100, gradients=0, optimizer=200 if stage else 400, buffers=100, step=0
        )
        for stage in range(4)
    }
    activations = ActivationMemory(one_sample=10.0, intercept=0.0, slope=10.0)
    memory = tuple(
        RankMemory(
            device_bytes=budget,
            budget_bytes=budget,
            activations=activations,
            measured_correction=1.0,
            states=states,
            proven_cap=cap,
        )
        for budget, cap in zip(budgets, proven, strict=True)
    )
    return MeasuredProfile(
        model="m",
        num_parameters=50,
        seq_len=8,
        dtype="fp32",
        ranks=tuple(
            RankProfile(
                rank=rank,
                host="h",
                device=f"d{rank}",
                memory_bytes=budget,
                peak_flops=1e9,
                points=tuple(
                    Measurement(micro_batch_size=b, step_time_s=0.5 + b, peak_memory_bytes=b) for b in (1, 2, 16)
                ),
            )
            for rank, budget in enumerate(budgets)
        ),
        zero_stages={
            stage: StageProfile(
                max_micro_batch_size=tuple(
                    activations.largest_within(budget - held.total, 16 if cap is None else cap)
                    for budget, cap in zip(budgets, proven, strict=True)
                ),
                per_micro_step_s=0.1,
                per_step_s=0.2,
            )
            for stage, held in states.items()
        },
        memory=memory,
    )


def shared(config: PoplarConfig, profile: MeasuredProfile | None = None, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "ranks": TwoRanks(),
        "config": config,
        "batch": BATCH,
        "stages": (2,),
        "global_batch_size": 8,
        "profile": lambda stages: profile,
    }
    return find_shared_plan(**{**values, **changes})[0]


# ---- settings ---------------------------------------------------------------------------------------------------


def test_the_setting_in_all_its_forms() -> None:
    assert PoplarConfig().state_shards == "even"
    assert "state_shards" not in PoplarConfig().to_dict()
    listed = PoplarConfig.from_dict({"state_shards": [0.75, 0.25]})
    assert listed.state_shards == listed.fractions_by_rank() == (0.75, 0.25)
    assert PoplarConfig.from_dict(json.loads(json.dumps(listed.to_dict()))) == listed
    assert PoplarConfig(state_shards="auto").fractions_by_rank() is None
    assert PoplarConfig(state_shards=(0.5, 0.5)).fractions_by_rank() is None, "equal shares are even ones"


def test_the_flag(tmp_path: Path) -> None:
    def parsed(text: str) -> Any:
        return PoplarTrainingArguments(output_dir=str(tmp_path), poplar_state_shards=text).poplar_overrides()

    assert parsed("auto") == {"state_shards": "auto"}
    assert parsed("1.0,")["state_shards"] == [1.0]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"state_shards": "odd"}, '"even", "auto" or a list'),
        ({"state_shards": 0.5}, '"even", "auto" or a list'),
        ({"state_shards": [0.75, 0.2]}, "together 0.95; shares must sum to 1"),
        ({"state_shards": [1.0, 0.0]}, "a share above 0"),
        ({"state_shards": []}, "a share above 0"),
        ({"state_shards": "auto", "zero_stage": 0}, "ZeRO stage 0 keeps the whole training state"),
        ({"state_shards": [0.75, 0.25], "zero_stage": 0}, "ZeRO stage 0 keeps the whole training state"),
    ],
)
def test_settings_out_of_range(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PoplarConfig.from_dict(setting)


def test_one_share_per_rank() -> None:
    config = PoplarConfig(state_shards=(0.75, 0.25))
    assert config.check_world(2) == []
    (problem,) = config.check_world(3)
    assert "state_shards has 2 shares" in problem
    assert "the run has 3 ranks" in problem


def test_what_is_refused_is_known_before_anything_is_measured() -> None:
    config = PoplarConfig(state_shards=(0.75, 0.25))
    quantised = {"zero_optimization": {"zero_quantized_weights": True}}
    assert state_conflicts(PoplarConfig(), quantised, (2,)) == []
    assert state_conflicts(PoplarConfig(state_shards="auto", enabled=False), quantised, (2,)) == []
    (problem,) = state_conflicts(config, quantised, (2,))
    assert "zero_quantized_weights" in problem
    (problem,) = state_conflicts(config, {"zero_optimization": {"stage": 0}}, (0,))
    assert "ZeRO stage 0" in problem
    given = plan_by_hand((3, 1), accumulation=1, zero_stage=2, fractions=(0.6, 0.4))
    (problem,) = state_conflicts(config, None, (2,), plan=given)
    assert "the given plan has shares [0.6, 0.4]" in problem
    assert state_conflicts(replace(config, state_shards=(0.6, 0.4)), None, (2,), plan=given) == []


def test_stage_0_is_no_candidate_for_uneven_shares() -> None:
    assert candidate_stages(PoplarConfig(state_shards=(0.75, 0.25)), None) == (1, 2, 3)
    assert candidate_stages(PoplarConfig(state_shards="auto"), None) == (0, 1, 2, 3)


# ---- plans ------------------------------------------------------------------------------------------------------


def test_plans_without_shares_keep_their_digest() -> None:
    plan = plan_by_hand((3, 1), accumulation=2, zero_stage=2)
    assert plan.digest == "sha256:658e35b24816830ea0d3b126bdbc31e59cfe7b977e528a0d528183c6809aca9a"
    assert plan.with_state((0.75, 0.25)).digest != plan.digest
    assert plan.with_state((0.75, 0.25)).with_state(None) == plan


def test_sizes_and_shares_by_hand() -> None:
    config = PoplarConfig(per_rank_micro_batch_sizes=(3, 1), state_shards=(0.75, 0.25))
    plan = shared(config)
    assert [rank.micro_batch_sizes for rank in plan.ranks] == [(3, 3, 3), (1, 1, 1)]
    assert plan.state_fractions == (0.75, 0.25)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_sizes_by_hand_and_automatic_shares_say_that_they_are_even() -> None:
    told: list[str] = []
    plan = shared(PoplarConfig(per_rank_micro_batch_sizes=(3, 1), state_shards="auto"), say=told.append)
    assert plan.state_fractions is None
    assert "shares of the training state are even" in told[0]


@pytest.mark.parametrize("setting", ["auto", (0.5, 0.5)])
def test_even_shares_win_where_memory_does_not_bind(setting: Any) -> None:
    profile = measured(2000, 2000)
    plan = shared(PoplarConfig(state_shards=setting), profile)
    assert plan == shared(PoplarConfig(), profile)
    assert plan.state_fractions is None


def test_automatic_shares_make_room_on_the_small_rank() -> None:
    profile = measured(700, 250)
    assert profile.stage(2).max_micro_batch_size[1] == 0
    with pytest.raises(InsufficientMemoryError):
        shared(PoplarConfig(), profile)
    plan, under = find_shared_plan(
        ranks=TwoRanks(),
        config=PoplarConfig(state_shards="auto"),
        batch=BATCH,
        stages=(2,),
        global_batch_size=8,
        profile=lambda stages: profile,
    )
    assert plan.state_fractions is not None
    small = plan.state_fractions[1]
    assert small < 0.4
    assert all(rank.rank_batch_size > 0 for rank in plan.ranks)
    for own, budget, share in zip(plan.ranks, (700, 250), plan.state_fractions, strict=True):
        assert 100 + 400 * share + 10 * max(own.micro_batch_sizes) <= budget + 1e-6
    assert isinstance(under, MeasuredProfile)
    assert all(under.stage(2).max_micro_batch_size)


def test_given_shares_set_the_caps() -> None:
    profile = measured(560, 560)
    chosen = choose_plan(profile, global_batch_size=16, stages=(2,), strategy="optimal", fractions=(0.75, 0.25))
    assert chosen.plan.state_fractions == (0.75, 0.25)
    assert chosen.profile.stage(2).max_micro_batch_size == (16, 16)
    tight = choose_plan(
        measured(450, 560), global_batch_size=16, stages=(2,), strategy="optimal", fractions=(0.75, 0.25)
    )
    assert tight.profile.stage(2).max_micro_batch_size == (5, 16)
    with pytest.raises(InsufficientMemoryError, match="smaller shares"):
        choose_plan(measured(300, 560), global_batch_size=16, stages=(2,), strategy="optimal", fractions=(0.75, 0.25))


def test_limits_that_have_nothing_to_do_with_shares_hold() -> None:
    profile = measured(2000, 400, proven=(None, 2))
    for fractions in (None, (0.75, 0.25)):
        chosen = choose_plan(
            profile,
            global_batch_size=16,
            stages=(2,),
            strategy="optimal",
            fractions=fractions,
            max_micro_batch_size=(3, 16),
        )
        assert chosen.profile.stage(2).max_micro_batch_size == (3, 2)
    with pytest.raises(InsufficientMemoryError, match="rank 1: memory ran out"):
        choose_plan(measured(2000, 400, proven=(None, 0)), global_batch_size=16, stages=(2,), strategy="optimal")


def test_stages_without_room_are_passed_over_and_named() -> None:
    told: list[str] = []
    plan = shared(PoplarConfig(state_shards="auto"), measured(700, 250), stages=(0, 1, 2, 3), say=told.append)
    assert plan.zero_stage == 1
    assert "ZeRO stage 0 passed over" in told[0]
    with pytest.raises(InsufficientMemoryError, match="over all ranks"):
        shared(PoplarConfig(state_shards="auto"), measured(300, 250), stages=(0, 1, 2, 3))


def test_a_rank_without_room_for_a_sample_is_named() -> None:
    profile = measured(2000, 150)
    untimed = replace(profile, ranks=tuple(replace(rank, points=()) for rank in profile.ranks))
    with pytest.raises(InsufficientMemoryError, match=r"rank 1 \(d1\): ZeRO stage 3 with one sample needs"):
        shared(PoplarConfig(state_shards="auto"), untimed, stages=(1, 2, 3), explain=explain_memory)


def test_a_profile_without_memory_is_refused() -> None:
    with pytest.raises(ProfileError, match="reprofile"):
        shared(PoplarConfig(state_shards="auto"), replace(measured(700, 250), memory=()))


@pytest.mark.parametrize("fractions", [(0.6, 0.4), None])
def test_a_resumed_run_keeps_its_shares(fractions: tuple[float, ...] | None) -> None:
    """The small rank would be given less if the planner were free."""
    profile = measured(2000, 320)
    resumed = plan_by_hand((4, 4), accumulation=1, zero_stage=2, fractions=fractions)
    config = PoplarConfig(state_shards="auto")
    free = shared(config, profile, stages=(1, 2, 3))
    assert free.state_fractions not in (None, fractions)
    assert shared(config, profile, stages=(1, 2, 3), resumed=resumed).state_fractions == fractions
    by_hand = replace(config, per_rank_micro_batch_sizes=(3, 1))
    assert shared(by_hand, resumed=resumed).state_fractions == fractions


def test_another_number_of_ranks_is_free_to_choose() -> None:
    resumed = plan_by_hand((4, 4, 4), accumulation=1, zero_stage=2, fractions=(0.2, 0.4, 0.4))
    plan = shared(PoplarConfig(state_shards="auto"), measured(700, 250), resumed=resumed)
    assert plan.state_fractions == shared(PoplarConfig(state_shards="auto"), measured(700, 250)).state_fractions


def test_planning_again_while_running_keeps_the_shares() -> None:
    chosen = choose_plan(
        measured(700, 250), global_batch_size=8, stages=(2,), strategy="optimal", fractions=(0.8, 0.2)
    )
    fast, slow = break_down_plan(chosen.profile, chosen.plan).compute_time_s
    better = judge(chosen.profile, chosen.plan, (3 * fast, slow)).better
    assert better.state_fractions == (0.8, 0.2)
    assert better.ranks[0].rank_batch_size < chosen.plan.ranks[0].rank_batch_size
    caps = chosen.profile.stage(2).max_micro_batch_size
    assert all(max(rank.micro_batch_sizes) <= cap for rank, cap in zip(better.ranks, caps, strict=True))


def test_disabled_means_even() -> None:
    assert shared(PoplarConfig(enabled=False, state_shards=(0.75, 0.25))).state_fractions is None


# ---- the table ------------------------------------------------------------------------------------------------------


def test_the_table_shows_state_only_where_it_is_uneven() -> None:
    def shown(plan: Plan, **known: Any) -> tuple[list[str], list[list[str]]]:
        table = plan_table(plan, None, **known)
        columns = [column for column in table.columns if "state" in str(column.header)]
        return [str(column.header) for column in columns], [list(map(str, column.cells)) for column in columns]

    even = plan_by_hand((3, 1), accumulation=1, zero_stage=2)
    uneven = even.with_state((0.75, 0.25))
    assert shown(even, state_bytes=2.0**33) == ([], [])
    assert shown(uneven, state_bytes=2.0**33) == (
        ["even state\nGiB", "planned state\nGiB"],
        [["4", "4"], ["6", "2"]],
    )
    assert shown(uneven)[1] == [["50.0%", "50.0%"], ["75.0%", "25.0%"]]


# ---- checkpoints ------------------------------------------------------------------------------------------------


def test_a_checkpoint_with_other_shares_is_refused_before_the_engine_is_built(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    save_stage2(folder)
    same = plan_by_hand((3, 1), accumulation=1, zero_stage=2, fractions=(0.75, 0.25))
    same.save(folder)
    check_shares(same, TwoRanks(), None, folder)
    for other in (same.with_state(None), same.with_state((0.6, 0.4))):
        with pytest.raises(ConfigError, match=r"shares of 0.75, 0.25.*to-even"):
            check_shares(other, TwoRanks(), None, folder)
        with (
            pytest.raises(ConfigError, match=r"shares of 0.75, 0.25"),
            shared_state(other, TwoRanks(), None, checkpoint=folder),
        ):
            pytest.fail("the engine must not be built")
        check_shares(other, TwoRanks(), {"checkpoint": {"load_universal": True}}, folder)


def test_an_engine_of_an_earlier_call_must_have_the_shares() -> None:
    even = plan_by_hand((3, 1), accumulation=1, zero_stage=3)
    uneven = even.with_state((0.75, 0.25))
    stock = SimpleNamespace(optimizer=SimpleNamespace())
    shared_engine = SimpleNamespace(optimizer=SimpleNamespace(shares=StateShares(fractions=(0.75, 0.25))))
    require_shares(even, stock)
    require_shares(uneven, shared_engine)
    for plan, engine in ((uneven, stock), (even, shared_engine), (uneven, SimpleNamespace())):
        with pytest.raises(CompatibilityError, match="in a DeepSpeed engine already"):
            require_shares(plan, engine)


def test_even_shares_leave_deepspeed_alone(tmp_path: Path) -> None:
    even = plan_by_hand((3, 1), accumulation=1, zero_stage=2)
    check_shares(even, TwoRanks(), None, tmp_path)
    with shared_state(even, TwoRanks(), {"zero_optimization": {"zero_quantized_weights": True}}):
        pass


def test_a_plan_of_stage_0_has_no_shares() -> None:
    with pytest.raises(PlanError, match="shards no training state"):
        Plan(
            zero_stage=0,
            global_batch_size=4,
            predicted_step_time_s=0.0,
            strategy="manual",
            ranks=tuple(RankPlan(rank=r, micro_batch_sizes=(2,), state_fraction=0.5) for r in (0, 1)),
        )
