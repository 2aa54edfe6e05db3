"""Ghosts, weights and statistics of one step, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate_poplar.loader import StepBatch
from accelerate_poplar.loss import HONOURED, MEAN, LossRule
from accelerate_poplar.weighting import StepWeigher, unchanged_statistics

GHOST = {"labels": torch.tensor([[1, 2]])}


def batch(*rows: list[int]) -> dict[str, torch.Tensor]:
    return {"labels": torch.tensor(rows)}


def weigher(kind: str, zero_stage: int, *, elsewhere: int = 0) -> StepWeigher:
    return StepWeigher(
        rule=LossRule(kind=kind, items="tokens"),
        world_size=2,
        zero_stage=zero_stage,
        ghost=GHOST,
        sum_over_ranks=lambda own: own + elsewhere,
    )


def step(*micro_batches: Any) -> StepBatch:
    sizes = tuple(0 if b is None else len(b["labels"]) for b in micro_batches)
    return StepBatch(0, sum(sizes), sizes, list(micro_batches))


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_empty_micro_steps_are_left_out_where_ranks_do_not_wait(zero_stage: int) -> None:
    found = weigher(MEAN, zero_stage, elsewhere=2).weigh(step(batch([1, 2]), None))
    assert [m.weight for m in found.micro_steps] == [1.0]
    assert found.total_items == 4


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_empty_micro_steps_are_ghosts_where_ranks_wait(zero_stage: int) -> None:
    found = weigher(MEAN, zero_stage).weigh(step(batch([1, 2]), None))
    assert [m.weight for m in found.micro_steps] == [2.0, 0.0]
    assert found.micro_steps[1].batch is GHOST


@pytest.mark.scenario(18)
def test_a_rank_with_nothing_runs_one_ghost() -> None:
    found = weigher(MEAN, 0, elsewhere=3).weigh(step(None, None))
    assert [(m.weight, m.batch is GHOST) for m in found.micro_steps] == [(0.0, True)]


@pytest.mark.scenario(14)
def test_a_mean_over_no_items_is_never_run() -> None:
    empty = batch([-100, -100])
    found = weigher(MEAN, 2, elsewhere=3).weigh(step(empty))
    assert found.micro_steps[0].batch is GHOST
    # A sum over no items divided by the given count is 0 as it stands.
    found = weigher(HONOURED, 2, elsewhere=3).weigh(step(empty))
    assert found.micro_steps[0].batch is empty
    assert found.micro_steps[0].weight == 0.0


@pytest.mark.scenario(14)
def test_no_labels_anywhere_is_a_step_of_ghosts() -> None:
    for kind in (MEAN, HONOURED):
        found = weigher(kind, 2).weigh(step(batch([-100, -100])))
        assert [(m.weight, m.batch is GHOST) for m in found.micro_steps] == [(0.0, True)]


def test_statistics_are_left_alone_by_ghosts() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.named_buffers()}
    with unchanged_statistics(model, active=True):
        model(torch.randn(4, 3))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    with unchanged_statistics(model, active=False):
        model(torch.randn(4, 3))
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
