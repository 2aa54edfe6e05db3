"""Profiling on real gloo ranks with real DeepSpeed engines: what it finds, and that nobody notices."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .launch import HERE, run_suite, start_ranks
from .profiling_cases import TWO_RANKS


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_suite("profiling", world_size=2, folder=tmp_path_factory.mktemp("profiling"), timeout_s=600)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.scenario(i) for i in lines]) for n, lines in TWO_RANKS.items()]
)
def test_two_ranks(two_ranks: dict[str, Any], name: str) -> None:
    assert two_ranks[name] == ""


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_crash_while_profiling_ends_every_rank_and_names_the_one(tmp_path: Path, how: str) -> None:
    command = [sys.executable, str(HERE / "suites" / "profiling.py"), str(tmp_path / "result.json")]
    start = time.monotonic()
    outputs = start_ranks(
        command,
        world_size=2,
        timeout_s=120.0,
        folder=tmp_path,
        env={"POPLAR_TEST_CRASH": how, "POPLAR_TEST_ONLY": "crash"},
    )
    assert time.monotonic() - start < 120.0
    assert all(output.code not in (0, None) for output in outputs)
    if how == "raises":
        assert "rank 1 failed: RuntimeError: scripted crash" in outputs[0].text
    else:
        assert "another rank is gone" in outputs[0].text
