"""Unequal shares of the training state change who holds it, and nothing else: real DeepSpeed engines, gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .launch import run_suite
from .state_cases import CHECKPOINT_STEPS, CHECKPOINTS, CHECKS, ONE_PROCESS, StateCase, case_id, cases

Results = Callable[[int], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The launch on three ranks reads checkpoints that the one on two ranks has written."""
    folder = tmp_path_factory.mktemp("state")
    found: dict[int, dict[str, Any]] = {}

    def of(world_size: int) -> dict[str, Any]:
        for count in (2, world_size):
            if count not in found:
                found[count] = run_suite("state_shards", world_size=count, folder=folder, timeout_s=600)
        return found[world_size]

    return of


@pytest.mark.parametrize(
    ("world_size", "case"),
    [pytest.param(n, case, id=f"{n}ranks-{case_id(case)}") for n in (2, 3) for case in cases(n)],
)
def test_equals_even_shares(results: Results, world_size: int, case: StateCase) -> None:
    assert results(world_size)[case_id(case)] == ""


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [pytest.param(n, sizes, id=f"{n}ranks-{sizes}") for n, (_, options) in ONE_PROCESS.items() for sizes in options],
)
def test_equals_one_process(results: Results, world_size: int, sizes: tuple[int, ...], zero_stage: int) -> None:
    assert results(world_size)[f"one-process-zero{zero_stage}-{'_'.join(map(str, sizes))}"] == ""


@pytest.mark.parametrize("name", CHECKS)
def test_further(results: Results, name: str) -> None:
    assert results(2)[name] == ""


@pytest.mark.parametrize("step", CHECKPOINT_STEPS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(results: Results, name: str, step: str) -> None:
    assert results(2)[f"{name}-{step}"] == ""


@pytest.mark.scenario(37)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_three_ranks_continue_what_two_saved(results: Results, name: str) -> None:
    assert results(3)[f"{name}-three_ranks"] == ""
