"""Settings: where they come from, what they refuse, and that everything wrong is said at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from accelerate_poplar import ConfigError, PoplarConfig
from accelerate_poplar.config import EmulationConfig, resolve_config
from accelerate_poplar.ds_config import batch_conflicts, rank_config, stage_of
from accelerate_poplar.plan import RankPlan


@pytest.mark.scenario(27)
@pytest.mark.parametrize(
    ("key", "suggestion"),
    [("poplar_enabeld", "enabled"), ("zero_stag", "zero_stage"), ("profil_budget_s", "profile_budget_s")],
)
def test_a_misspelt_key_suggests_the_right_one(key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=f"my.yaml: unknown setting `{key}`.*`{suggestion}`"):
        PoplarConfig.from_dict({key: 1}, source="my.yaml")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enabled", "yes"),
        ("zero_stage", 4),
        ("zero_stage", "fast"),
        ("global_batch_size", 0),
        ("global_batch_size", 2.5),
        ("per_rank_micro_batch_sizes", [1, -1]),
        ("per_rank_micro_batch_sizes", [0, 0]),
        ("per_rank_micro_batch_sizes", 3),
        ("per_rank_micro_batch_sizes", {"a": 3}),
        ("max_micro_batch_size", 0),
        ("memory_fraction", 0),
        ("memory_fraction", [0.5, 1.5]),
        ("memory_fraction", float("nan")),
        ("strategy", "optimum"),
        ("profile_budget_s", -1),
        ("profile_relative_error", 1.0),
        ("replan", "maybe"),
        ("replan_every", 0),
        ("replan_threshold", 0),
        ("timeout_s", 0),
        ("cache_dir", 3),
    ],
)
def test_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        PoplarConfig(**{field: value})


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        PoplarConfig.from_dict({"zero_stage": 9, "memory_fraction": 2, "stratgy": "even"}, source="x")
    assert len(error.value.problems) == 3


def test_sources_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed = {"poplar": {"strategy": "even"}}
    assert resolve_config(deepspeed_config=deepspeed).strategy == "even"
    named = tmp_path / "named.yaml"
    named.write_text("strategy: flops\nreplan: off\n")
    monkeypatch.setenv("POPLAR_CONFIG", str(named))
    found = resolve_config(deepspeed_config=deepspeed)
    assert (found.strategy, found.replan) == ("flops", "off")
    argument = PoplarConfig(strategy="proportional")
    assert resolve_config(argument, deepspeed_config=deepspeed) is argument
    flags = resolve_config(deepspeed_config=deepspeed, overrides={"zero_stage": 3, "report": None})
    assert (flags.strategy, flags.zero_stage, flags.report) == ("flops", 3, True)


def test_a_file_with_a_poplar_section(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("num_processes: 2\npoplar:\n  zero_stage: auto\n")
    assert PoplarConfig.load(path).zero_stage == "auto"
    with pytest.raises(ConfigError, match="no such file"):
        PoplarConfig.load(tmp_path / "none.yaml")
    path.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        PoplarConfig.load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        PoplarConfig.load(path)


def test_settings_survive_their_json_form() -> None:
    config = PoplarConfig(zero_stage="auto", per_rank_micro_batch_sizes=(3, 1), memory_fraction=(0.5, 0.9))
    assert PoplarConfig.from_dict(config.to_dict()) == config
    assert PoplarConfig().to_dict() == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.zero_stage = 1  # type: ignore[misc]


@pytest.mark.scenario(1)
def test_sizes_by_hand_for_the_wrong_number_of_ranks() -> None:
    config = PoplarConfig(per_rank_micro_batch_sizes=(2, 2, 15))
    with pytest.raises(ConfigError, match=r"3 values \[2, 2, 15\].*4 ranks"):
        config.sizes_by_rank(4)
    as_list = PoplarConfig(per_rank_micro_batch_sizes=(2, 2, 2, 15))
    as_mapping = PoplarConfig(per_rank_micro_batch_sizes={3: 15, 0: 2, 1: 2, 2: 2})
    assert as_list.sizes_by_rank(4) == as_mapping.sizes_by_rank(4) == (2, 2, 2, 15)
    with pytest.raises(ConfigError, match="names ranks"):
        as_mapping.sizes_by_rank(3)


def test_what_does_not_fit_the_world_is_listed() -> None:
    config = PoplarConfig(
        per_rank_micro_batch_sizes=(4, 1), max_micro_batch_size=(3, 3), memory_fraction=(0.5, 0.5, 0.5)
    )
    problems = config.check_world(2)
    assert len(problems) == 2
    assert "rank 0" in problems[0]
    assert "memory_fraction has 3 values" in problems[1]


@pytest.mark.parametrize("text", ["a,b", "0.5,1", "1,inf"])
def test_bad_emulation(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("POPLAR_EMULATE_SLOWDOWN", text)
    with pytest.raises(ConfigError, match="POPLAR_EMULATE_SLOWDOWN"):
        EmulationConfig.from_environment()


def test_emulation_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POPLAR_EMULATE_SLOWDOWN", raising=False)
    assert not EmulationConfig.from_environment().active
    monkeypatch.setenv("POPLAR_EMULATE_SLOWDOWN", "1,3")
    found = EmulationConfig.from_environment()
    assert found.slowdown == (1.0, 3.0)
    assert "2 values" in found.check_world(3)[0]


@pytest.mark.scenario(25)
@pytest.mark.parametrize("sizes", [(3,), (1, 1), (0,), (24, 24, 11)])
def test_every_rank_passes_deepspeeds_own_check(sizes: tuple[int, ...]) -> None:
    config = {"train_batch_size": "auto", "poplar": {"enabled": True}, "zero_optimization": {"stage": 1, "x": 2}}
    filled = rank_config(config, RankPlan(rank=0, micro_batch_sizes=sizes), world_size=3, zero_stage=2)
    micro, steps = filled["train_micro_batch_size_per_gpu"], filled["gradient_accumulation_steps"]
    assert filled["train_batch_size"] == micro * steps * 3
    assert micro >= 1
    assert filled["zero_optimization"] == {"stage": 2, "x": 2}
    assert "poplar" not in filled
    assert "poplar" in config


@pytest.mark.scenario(26)
def test_a_fixed_train_batch_size_that_contradicts() -> None:
    assert batch_conflicts({"train_batch_size": "auto"}, global_batch_size=28) == []
    (problem,) = batch_conflicts({"train_batch_size": 32}, global_batch_size=28)
    assert all(word in problem for word in ("32", "28", "auto", "global_batch_size: 32"))
    assert stage_of({"zero_optimization": {"stage": 3}}) == 3
    assert stage_of({"zero_optimization": {"stage": "auto"}}) is None
    assert stage_of(None) is None
