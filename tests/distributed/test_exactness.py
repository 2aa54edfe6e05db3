"""Every plan computes what one process computes: real DeepSpeed engines, two and three gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .exactness_cases import Case, cases
from .launch import run_suite


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}

    def of(world_size: int) -> dict[str, Any]:
        if world_size not in found:
            folder = tmp_path_factory.mktemp(f"exactness{world_size}")
            found[world_size] = run_suite("exactness", world_size=world_size, folder=folder, timeout_s=600)
        return found[world_size]

    return of


@pytest.mark.scenario(4)
@pytest.mark.scenario(11)
@pytest.mark.scenario(12)
@pytest.mark.scenario(14)
@pytest.mark.parametrize(
    ("world_size", "case"),
    [pytest.param(n, case, id=f"{n}ranks-{case.name}") for n in (2, 3) for case in cases(n)],
)
def test_equals_one_process(results: Callable[[int], dict[str, Any]], world_size: int, case: Case) -> None:
    assert results(world_size)[case.name] == ""
