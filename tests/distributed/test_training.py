"""PoplarTrainer as a drop-in for Trainer, on two and four gloo ranks with real DeepSpeed engines."""

from __future__ import annotations

from typing import Any

import pytest

from .launch import run_suite
from .training_cases import TWO_RANKS


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_suite("training", world_size=2, folder=tmp_path_factory.mktemp("training2"), timeout_s=600)


def _tagged(name: str, scenarios: tuple[int, ...]) -> Any:
    return pytest.param(name, marks=[pytest.mark.scenario(number) for number in scenarios])


@pytest.mark.parametrize("name", [_tagged(*item) for item in TWO_RANKS.items()])
def test_two_ranks(two_ranks: dict[str, Any], name: str) -> None:
    assert two_ranks[name] == ""


@pytest.mark.scenario(1)
@pytest.mark.scenario(2)
def test_four_sizes_by_hand(tmp_path: Any) -> None:
    results = run_suite("training", world_size=4, folder=tmp_path, timeout_s=300)
    assert results["four_sizes_by_hand"] == ""
