"""Adapters, checkpointing, half precision and TRL's trainers under uneven plans equal one process."""

from __future__ import annotations

from typing import Any

import pytest

from .finetuning_cases import CASES
from .launch import run_suite


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    folder = tmp_path_factory.mktemp("finetuning")
    return run_suite("finetuning", world_size=2, folder=folder, timeout_s=600, env=offline)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(results: dict[str, Any], name: str) -> None:
    assert results[name] == ""
