"""What profiling found out about memory, in the terms of the planner of uneven shares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accelerate_poplar.memory import ActivationMemory
from accelerate_poplar.model_state import ModelStates
from accelerate_poplar.rank_memory import RankMemory
from accelerate_poplar.state_budget import state_memory


def rank_memory(budget: int) -> RankMemory:
    states = {
        1: ModelStates(parameters=200, gradients=200, optimizer=300, buffers=50, step=120),
        3: ModelStates(parameters=50, gradients=50, optimizer=300, buffers=90, step=120),
    }
    return RankMemory(
        device_bytes=2 * budget,
        budget_bytes=budget,
        activations=ActivationMemory(one_sample=40.0, intercept=10.0, slope=20.0),
        measured_correction=1.0,
        states=states,
    )


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("budget", [600, 900, 1400])
def test_even_shares_have_the_caps_that_profiling_finds(zero_stage: int, budget: int) -> None:
    memory = rank_memory(budget)
    (own, _) = state_memory((memory, memory), zero_stage, largest_micro_batch=40)
    states = memory.states[zero_stage]
    room = budget - states.total
    expected = memory.activations.largest_within(room, 40) if states.at_step <= budget else 0
    assert own.cap(0.5) == expected


def test_gradients_are_summed_in_a_copy_beside_the_smallest_micro_batches() -> None:
    memory = rank_memory(1000)
    states = {1: replace(memory.states[1], reduction=80)}
    (own, _) = state_memory((replace(memory, states=states), memory), 1, largest_micro_batch=5)
    assert own.activation_bytes == (0.0, 80.0, 80.0, 80.0, 90.0, 110.0)


def test_offload_takes_the_optimizer_off_the_device() -> None:
    memory = rank_memory(1000)
    (own, _) = state_memory((memory, memory), 3, largest_micro_batch=2, offloaded=True)
    assert own.offloaded
    assert own.sharded_bytes == own.step_sharded_bytes == 200.0
    assert own.fixed_bytes == 90.0
