"""A plain Accelerate loop with two changed lines computes what one process computes, at every ZeRO stage and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .launch import run_suite
from .plain_loop_cases import SCENARIOS, Case, behaviours, cases

WORLD_SIZES = (2, 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}

    def of(world_size: int) -> dict[str, Any]:
        if world_size not in found:
            folder = tmp_path_factory.mktemp(f"plain_loop{world_size}")
            found[world_size] = run_suite("plain_loop", world_size=world_size, folder=folder, timeout_s=600)
        return found[world_size]

    return of


@pytest.mark.scenario(4)
@pytest.mark.scenario(15)
@pytest.mark.scenario(17)
@pytest.mark.parametrize(
    ("world_size", "case"),
    [pytest.param(n, case, id=f"{n}ranks-{case.name}") for n in WORLD_SIZES for case in cases(n)],
)
def test_equals_one_process(results: Callable[[int], dict[str, Any]], world_size: int, case: Case) -> None:
    assert results(world_size)[case.name] == ""


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        pytest.param(n, name, id=f"{n}ranks-{name}", marks=[pytest.mark.scenario(s) for s in SCENARIOS[name]])
        for n in WORLD_SIZES
        for name in behaviours(n)
    ],
)
def test_behaves(results: Callable[[int], dict[str, Any]], world_size: int, name: str) -> None:
    assert results(world_size)[name] == ""
