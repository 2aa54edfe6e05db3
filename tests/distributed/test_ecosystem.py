"""Evaluation, adapters, precision and other trainers on real uneven ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerate_poplar import Plan, RankPlan
from accelerate_poplar.evaluation import EvaluationSampler, evaluation_shares, gather_rows

from .ecosystem_cases import CASES, cases
from .launch import run_suite

WORLD_SIZES = (2, 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}

    def of(world_size: int) -> dict[str, Any]:
        if world_size not in found:
            folder = tmp_path_factory.mktemp(f"ecosystem{world_size}")
            found[world_size] = run_suite("ecosystem", world_size=world_size, folder=folder, timeout_s=600)
        return found[world_size]

    return of


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        pytest.param(n, name, id=f"{n}ranks-{name}", marks=[pytest.mark.scenario(s) for s in CASES[name]])
        for n in WORLD_SIZES
        for name in cases(n)
    ],
)
def test_on_real_ranks(results: Callable[[int], dict[str, Any]], world_size: int, name: str) -> None:
    assert results(world_size)[name] == ""


def by_hand(*sizes: int) -> Plan:
    return Plan(
        zero_stage=2,
        global_batch_size=sum(sizes),
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=tuple(RankPlan(rank=i, micro_batch_sizes=(size,)) for i, size in enumerate(sizes)),
    )


def test_evaluation_shares_are_those_of_the_plan() -> None:
    assert evaluation_shares(by_hand(3, 1), None, per_device_batch_size=2, world_size=2) == (3, 1)
    assert evaluation_shares(None, None, per_device_batch_size=2, world_size=3) == (2, 2, 2)
    assert evaluation_shares(by_hand(4, 0), None, per_device_batch_size=2, world_size=2) == (4, 0)


def test_evaluation_shares_stay_within_what_a_rank_can_hold() -> None:
    """8 rows per device on (3, 1) would put 12 rows on rank 0, which was only ever said to hold 8."""
    assert evaluation_shares(by_hand(3, 1), None, per_device_batch_size=8, world_size=2) == (8, 2)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    per_device=st.integers(1, 9),
    rows=st.integers(1, 80),
)
def test_every_row_is_evaluated_once_and_in_order(sizes: list[int], per_device: int, rows: int) -> None:
    shares = evaluation_shares(by_hand(*sizes), None, per_device_batch_size=per_device, world_size=len(sizes))
    samplers = [
        EvaluationSampler(shares=shares, rank=rank, num_rows=rows, order=lambda: range(rows))
        for rank in range(len(sizes))
    ]
    by_rank = [list(sampler) for sampler in samplers]
    together = []
    for number in range(len(samplers[0])):
        for rank, count in enumerate(samplers[0].rows(number)):
            assert len(by_rank[rank][number]) == max(1, count)
            together += by_rank[rank][number][:count]
    assert together == list(range(rows))


def test_rows_of_one_rank_are_cut_to_those_that_count() -> None:
    found = gather_rows({"a": torch.arange(4), "b": (torch.ones(4, 2),)}, rows=(4,), rank=0)
    assert found["a"].tolist() == [0, 1, 2, 3]
    assert found["b"][0].shape == (4, 2)
    assert gather_rows(["x", "y"], rows=(2,), rank=0) == ["x", "y"]
