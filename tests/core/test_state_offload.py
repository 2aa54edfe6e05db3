"""Optimizers kept on the host by the ranks that need it only, from the settings to the engine's config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from accelerate_poplar import PoplarConfig
from accelerate_poplar.config import EmulationConfig
from accelerate_poplar.device import DeviceFacts
from accelerate_poplar.ds_config import rank_config
from accelerate_poplar.errors import ConfigError, InsufficientMemoryError, PlanError
from accelerate_poplar.plan import Plan, RankPlan
from accelerate_poplar.planning import plan_by_hand, reusable_plan
from accelerate_poplar.replan import judge
from accelerate_poplar.report import plan_table
from accelerate_poplar.run_request import state_conflicts
from accelerate_poplar.state_choice import choose_plan

from .test_state_wiring import measured, shared

TOO_SMALL = (260, 150)
"""Beside one sample there is room for 150 and 40 bytes of a state of 400."""


def offloading(stage: int = 2) -> Plan:
    """Rank 1 of two offloads."""
    plan = plan_by_hand((3, 1), accumulation=2, zero_stage=stage).with_state((0.75, 0.25), [1])
    return replace(plan, strategy="optimal")


# ---- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"state_offload": "on"}, "state_offload is 'on'; it must be one of off, auto"),
        ({"state_offload": "auto", "zero_stage": 0}, "DeepSpeed offloads optimizers at ZeRO stage 1, 2 and 3 only"),
    ],
)
def test_settings_out_of_range(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PoplarConfig.from_dict(setting)


def test_what_it_cannot_be_combined_with() -> None:
    config = PoplarConfig(state_offload="auto")
    everywhere = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert state_conflicts(config, None, (1, 2, 3)) == []
    assert state_conflicts(PoplarConfig(), everywhere, (2,)) == []
    (problem,) = state_conflicts(config, everywhere, (2,))
    assert "state_offload is 'auto', but the DeepSpeed config offloads the optimizer of every rank" in problem
    (problem,) = state_conflicts(
        PoplarConfig(), everywhere, (2,), plan=plan_by_hand((3, 1), accumulation=1, zero_stage=2).with_state(None, [1])
    )
    assert "the plan offloads the optimizer of ranks [1]" in problem
    (problem,) = state_conflicts(config, {"zero_optimization": {"stage": 0}}, (0,))
    assert "asks for ZeRO stage 0" in problem


# ---- plans ------------------------------------------------------------------------------------------------------


def test_a_plan_says_which_ranks_offload() -> None:
    plan = offloading()
    assert plan.offloading_ranks == (1,)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert [rank.get("offloads_optimizer") for rank in plan.to_dict()["ranks"]] == [None, True]
    assert plan.digest != plan.with_state((0.75, 0.25)).digest
    with pytest.raises(
        PlanError, match=r"ranks \[0\] offload their optimizer, which DeepSpeed does not do at ZeRO stage 0"
    ):
        Plan(
            zero_stage=0,
            global_batch_size=1,
            predicted_step_time_s=0.0,
            strategy="manual",
            ranks=(RankPlan(rank=0, micro_batch_sizes=(1,), offloads_optimizer=True),),
        )


def test_only_where_shares_are_not_enough_and_never_silently() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"optimizer offload \(state_offload: auto\)"):
        shared(PoplarConfig(state_shards="auto"), measured(*TOO_SMALL))
    told: list[str] = []
    config = PoplarConfig(state_shards="auto", state_offload="auto")
    plan = shared(config, measured(*TOO_SMALL), say=told.append)
    assert plan.offloading_ranks == (1,)
    assert plan.state_fractions is not None
    (line,) = told
    assert line.startswith("state_offload: the optimizer is kept on the host on rank 1, because")
    assert shared(config, measured(1000, 150)).offloading_ranks == ()


def test_shares_that_are_given_are_kept() -> None:
    even = shared(PoplarConfig(state_offload="auto"), measured(1000, 150))
    assert (even.state_fractions, even.offloading_ranks) == (None, (1,))
    given = shared(PoplarConfig(state_shards=(0.75, 0.25), state_offload="auto"), measured(1000, 150))
    assert (given.state_fractions, given.offloading_ranks) == ((0.75, 0.25), (1,))
    with pytest.raises(InsufficientMemoryError):
        shared(PoplarConfig(state_offload="auto"), measured(1000, 105))


def test_a_stage_without_offload_goes_before_one_with() -> None:
    profile = measured(1000, 150)
    shares = {"fractions": (0.5, 0.5), "stages": (1, 2), "global_batch_size": 8, "strategy": "optimal"}
    for stage, optimizer in ((1, 200), (2, 20)):
        profile.memory[0].states[stage]
        object.__setattr__(profile.memory[1].states[stage], "optimizer", optimizer)
        object.__setattr__(profile.memory[0].states[stage], "optimizer", optimizer)
    chosen = choose_plan(profile, offload=True, **shares)
    assert (chosen.plan.zero_stage, chosen.plan.offloading_ranks) == (2, ())
    assert list(chosen.passed_over) == [1]


def test_another_plan_while_running_moves_no_state() -> None:
    found = judge(measured(1000, 1000), offloading(), [5.0, 1.0])
    assert found.better.offloading_ranks == (1,)
    assert found.better.state_fractions == (0.75, 0.25)


def test_sizes_by_hand_offload_nothing_and_say_so() -> None:
    told: list[str] = []
    plan = shared(PoplarConfig(per_rank_micro_batch_sizes=(3, 1), state_offload="auto"), say=told.append)
    assert plan.offloading_ranks == ()
    assert "no rank keeps its optimizer on the host" in told[0]


@pytest.mark.parametrize(("setting", "again"), [("auto", True), ("off", False)])
def test_a_resumed_run_takes_the_plan_again_where_it_may_offload(setting: str, again: bool) -> None:
    profile, plan = measured(1000, 150), offloading()
    facts = [DeviceFacts(host="h", device=f"d{rank}", memory_bytes=1000, free_bytes=1000) for rank in (0, 1)]
    config = PoplarConfig(state_shards="auto", state_offload=setting, strategy=plan.strategy)
    found = reusable_plan(plan, profile, config=config, emulation=EmulationConfig(), stages=(2,), facts=facts)
    assert (found is plan) == again


# ---- what a rank is given ---------------------------------------------------------------------------------------


def test_the_engine_config_of_the_ranks() -> None:
    plan = offloading(3)
    users = {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True}}}
    first, second = (rank_config(users, rank, world_size=2, zero_stage=3) for rank in plan.ranks)
    assert first["zero_optimization"]["offload_optimizer"]["device"] == "none"
    assert second["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert second["zero_force_ds_cpu_optimizer"] is False
    asked = rank_config({"zero_force_ds_cpu_optimizer": True}, plan.ranks[1], world_size=2, zero_stage=3)
    assert asked["zero_force_ds_cpu_optimizer"] is True


def test_the_table_says_where_the_optimizer_is() -> None:
    table = plan_table(offloading(), None, state_bytes=2**30)
    assert list(table.columns[-1].cells) == ["0.75", "0.25, optimizer on host"]
    even = plan_table(offloading().with_state(None, [1]), None, state_bytes=2**30)
    assert list(even.columns[-1].cells) == ["0.5", "0.5, optimizer on host"]
