"""PoplarTrainer with `state_shards`: the run of even shares, with the state held as asked for, on two gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest

from .launch import run_suite
from .state_trainer_cases import CASES


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_suite("state_trainer", world_size=2, folder=tmp_path_factory.mktemp("state_trainer"), timeout_s=600)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(results: dict[str, Any], name: str) -> None:
    assert results[name] == ""
