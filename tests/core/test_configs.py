"""Every shipped launch config is accepted by its launcher; every DeepSpeed JSON leaves the batch sizes to the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config import load_config_from_file

from accelerate_poplar.config import PoplarConfig, resolve_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
YAMLS = sorted(CONFIGS.glob("*.yaml"))
JSONS = sorted(CONFIGS.glob("*.json"))
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def names(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", YAMLS, ids=names)
def test_yaml_is_accepted_by_accelerate_once_our_section_is_out(path: Path, tmp_path: Path) -> None:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    section = data.pop("poplar", None)
    rest = tmp_path / "rest.yaml"
    rest.write_text(yaml.safe_dump(data), encoding="utf-8")
    config = load_config_from_file(str(rest))
    assert config.distributed_type == "DEEPSPEED"
    assert config.num_processes >= 2
    PoplarConfig.from_dict(section or {})
    named = config.deepspeed_config.get("deepspeed_config_file")
    assert named is None or (CONFIGS.parent / named).is_file()


@pytest.mark.parametrize("path", JSONS, ids=names)
def test_deepspeed_json_leaves_the_batch_sizes_open(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert [data[key] for key in BATCH_KEYS] == ["auto"] * 3
    assert data["zero_optimization"]["stage"] == int(path.name.removeprefix("zero")[0])
    resolve_config(deepspeed_config=data)


def test_there_is_a_deepspeed_json_for_every_stage_and_one_with_our_settings() -> None:
    assert {path.name for path in JSONS} == {*(f"zero{stage}.json" for stage in range(4)), "zero2_poplar.json"}
    settings = resolve_config(deepspeed_config=json.loads((CONFIGS / "zero2_poplar.json").read_text()))
    assert settings.memory_fraction == 0.85
    assert settings.replan == "off"
