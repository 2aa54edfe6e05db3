"""Memory known before it is tried: against what real passes need, and the formula for the training state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from accelerate_poplar.borrow import on_device, undisturbed
from accelerate_poplar.memory import ActivationMemory, PredictionUnavailableError, predict_activations
from accelerate_poplar.model_state import (
    ModelSize,
    ZeroSettings,
    model_size,
    model_states,
    optimizer_bytes,
    sized_buffers,
)
from accelerate_poplar.probe import MicroStepper
from accelerate_poplar.rank_memory import RankMemory, explain

from .tiny_models import tiny_bert, tiny_llama, token_loss, token_rows

CPU = torch.device("cpu")


def real_activations(model: nn.Module, dtype: torch.dtype, sizes: tuple[int, ...]) -> dict[int, int]:
    with undisturbed(model, CPU), on_device(model, CPU, dtype):
        stepper = MicroStepper(
            model=model, loss_fn=token_loss, make_batch=token_rows, device=CPU, dtype=dtype, clock=lambda: 0.0
        )
        return {size: stepper.activation_bytes(size) for size in sizes}


@pytest.mark.parametrize("make", [tiny_llama, tiny_bert])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_memory_is_what_a_real_pass_needs(
    make: Callable[[], nn.Module], checkpointing: bool, dtype: torch.dtype
) -> None:
    model = make()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with undisturbed(model, CPU):
        predicted = predict_activations(model, token_loss, token_rows, device=CPU, dtype=dtype)
    real = real_activations(model, dtype, (1, 2, 4, 8, 16))
    corrected = predicted.scaled(real[2] / predicted.at(2))
    size = model_size(model)
    held = (size.total + size.trainable) * torch.empty((), dtype=dtype).element_size()
    assert real[2] / predicted.at(2) == pytest.approx(1.0, abs=0.01), "there is next to nothing to correct"
    for micro_batch_size in (2, 4, 8, 16):
        needed = held + real[micro_batch_size]
        assert held + corrected.at(micro_batch_size) == pytest.approx(needed, rel=0.05)


def test_the_prediction_is_that_of_torchs_own_tracker() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1), nn.Linear(256, 8))

    model = make()
    with undisturbed(model, CPU):
        predicted = predict_activations(
            model,
            lambda m, batch: m(batch).pow(2).mean(),
            lambda size: torch.ones(size, 32),
            device=CPU,
            dtype=torch.float32,
            sizes=(200,),
        )
    with FakeTensorMode():
        twin, batch = make(), torch.ones(200, 32)
        for parameter in twin.parameters():
            parameter.grad = torch.zeros_like(parameter)
        tracker = MemTracker()
        tracker.track_external(twin)
        with tracker:
            twin(batch).pow(2).mean().backward()
        peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    size = model_size(model)
    assert predicted.at(200) + 4 * (size.total + size.trainable) == pytest.approx(peak + batch.nbytes, rel=0.01)


def test_a_loss_may_count_its_labels_and_a_model_look_at_its_mask() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        assert bool((batch["attention_mask"] == 1).all())
        return model(**batch, num_items_in_batch=int((batch["labels"] != -100).sum().item())).loss

    model = tiny_llama()
    predicted = predict_activations(model, loss_fn, token_rows, device=CPU, dtype=torch.float32, sizes=(1,))
    assert predicted.at(1) > 0


def test_nothing_is_allocated_for_a_prediction() -> None:
    huge = nn.Sequential(nn.Linear(4, 2**16, device="meta"), nn.Linear(2**16, 2**16, device="meta"))
    predicted = predict_activations(
        huge,
        lambda model, batch: model(batch).sum(),
        lambda size: torch.ones(size, 4),
        device=CPU,
        dtype=torch.bfloat16,
    )
    assert predicted.at(2**20) > 2**37


def test_frozen_parameters_need_no_room_for_gradients() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    size = model_size(model)
    assert (size.trainable, size.frozen) == (64 * 65, 64 * 65)
    states = model_states(size, dtype=torch.float32, zero_stage=0, world_size=2)
    assert states.parameters == 4 * 2 * 64 * 65
    assert states.gradients == 4 * 64 * 65
    assert states.optimizer == 8 * 64 * 65


def test_a_model_that_looks_at_values_cannot_be_predicted() -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y if y.sum().item() > 0 else -y

    with pytest.raises(PredictionUnavailableError):
        predict_activations(
            Choosy(),
            lambda model, batch: model(batch).sum(),
            lambda size: torch.ones(size, 4),
            device=CPU,
            dtype=torch.float32,
        )


# ---- the line ---------------------------------------------------------------------------------------------------


@given(
    intercept=st.floats(-1e6, 1e9),
    slope=st.floats(1.0, 1e8),
    available=st.floats(0.0, 1e11),
    ceiling=st.integers(0, 999),
)
def test_the_largest_size_fits_and_the_next_does_not(
    intercept: float, slope: float, available: float, ceiling: int
) -> None:
    line = ActivationMemory(one_sample=max(0.0, intercept + slope), intercept=intercept, slope=slope)
    largest = line.largest_within(available, ceiling)
    assert 0 <= largest <= ceiling
    if largest:
        assert line.at(largest) <= available
    if largest < ceiling:
        assert line.at(largest + 1) > available


@given(intercept=st.floats(0.0, 1e9), slope=st.floats(1.0, 1e8), one=st.floats(0.0, 1e9))
def test_fits_a_line_through_what_is_one(intercept: float, slope: float, one: float) -> None:
    line = ActivationMemory.fit({1: one, 2: intercept + 2 * slope, 4: intercept + 4 * slope})
    assert line.at(1) == round(one)
    assert line.at(100) == pytest.approx(max(one, intercept + 100 * slope), rel=1e-6, abs=2)


def test_fits_what_little_there_is() -> None:
    assert ActivationMemory.fit({1: 100.0}).at(3) == 300
    assert ActivationMemory.fit({1: 100.0, 2: 180.0}).at(4) == 360
    assert ActivationMemory.fit({2: 200.0, 4: 300.0}).at(1) == 150
    assert ActivationMemory.fit({2: 200.0, 4: 150.0}).at(100) >= 150, "noise does not make more samples cheaper"
    assert ActivationMemory.unknown().largest_within(0.0, 7) == 7


# ---- the training state -----------------------------------------------------------------------------------------


def test_the_published_figures() -> None:
    # ZeRO, figure 1: 7.5 billion parameters, 64 ranks, mixed precision: 120, 31.4, 16.6 and 1.9 GB.
    size = ModelSize(trainable=7_500_000_000, frozen=0)
    none = ZeroSettings(buckets=0, max_live_parameters=0)
    states = [
        model_states(size, dtype=torch.float16, zero_stage=stage, world_size=64, settings=none) for stage in range(4)
    ]
    billions = [(held.parameters + held.gradients + held.optimizer) / 1e9 for held in states]
    assert billions == pytest.approx([120.0, 31.4, 16.6, 1.9], abs=0.05)


def test_buffers_are_no_larger_than_the_model() -> None:
    size = ModelSize(trainable=1_000, frozen=500)
    assert sized_buffers(None, size) == {"reduce_bucket_size": 1_000, "allgather_bucket_size": 1_500}
    given = {"zero_optimization": {"reduce_bucket_size": "auto", "allgather_bucket_size": 7}}
    assert sized_buffers(given, size) == {}
    huge = ModelSize(trainable=10**10, frozen=0)
    assert set(sized_buffers({}, huge).values()) == {500_000_000}


def test_buffers_come_on_top() -> None:
    size = ModelSize(trainable=1_000, frozen=500)
    settings = ZeroSettings.from_config(
        {
            "zero_optimization": {
                "reduce_bucket_size": 2e2,
                "overlap_comm": True,
                "stage3_max_live_parameters": 1_200,
                "allgather_bucket_size": "auto",
            }
        }
    )
    by_stage = [
        model_states(size, dtype=torch.bfloat16, zero_stage=stage, world_size=2, settings=settings)
        for stage in range(4)
    ]
    buckets = (2 + 1) * 2 * 200  # two, and the copy in which one of them is summed
    assert [held.buffers for held in by_stage] == [0, buckets, buckets, buckets + 2 * 1_200]
    assert [held.fresh_gradients for held in by_stage] == [0, 0, 2 * 500, 0]
    assert [held.reduction for held in by_stage] == [2 * 1_000, 0, 0, 0]
    assert ZeroSettings.from_config({"zero_optimization": {"contiguous_gradients": False}}).buckets == 0
    assert ZeroSettings.from_config(None) == ZeroSettings()
    assert ZeroSettings.from_config({"zero_optimization": {"reduce_bucket_size": "auto"}}) == ZeroSettings()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_bucket_that_holds_everything_is_copied_when_activations_are_gone(zero_stage: int) -> None:
    size = ModelSize(trainable=1_000, frozen=500)
    held = model_states(size, dtype=torch.float32, zero_stage=zero_stage, world_size=2)
    assert held.reduction == 4 * 1_000
    memory = RankMemory(
        device_bytes=10**6,
        budget_bytes=10**6,
        activations=ActivationMemory(one_sample=100.0, intercept=0.0, slope=100.0),
        measured_correction=1.0,
        states={zero_stage: held},
    )
    at_step = held.parameters + held.gradients + held.optimizer + held.step
    assert memory.needed_bytes(zero_stage, 1) == max(held.total + 4_000, at_step)
    assert memory.needed_bytes(zero_stage, 90) == max(held.total + 9_000, at_step)
    if zero_stage in (0, 3):  # where the optimizer step needs less
        assert "to sum gradients over ranks" in explain(0, "a card", memory, zero_stage)


@given(
    trainable=st.integers(1, 10**9),
    frozen=st.integers(0, 10**9),
    world_size=st.integers(1, 64),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_stage_holds_less_than_the_one_before(
    trainable: int, frozen: int, world_size: int, dtype: torch.dtype
) -> None:
    size = ModelSize(trainable=trainable, frozen=frozen)
    none = ZeroSettings(buckets=0, max_live_parameters=0)
    states = [
        model_states(size, dtype=dtype, zero_stage=stage, world_size=world_size, settings=none)
        for stage in range(1, 4)
    ]
    totals = [held.parameters + held.gradients + held.optimizer for held in states]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda ps: torch.optim.AdamW(ps), 12.0),
        (lambda ps: torch.optim.SGD(ps), 4.0),
        (lambda ps: torch.optim.SGD(ps, momentum=0.9), 8.0),
        (lambda ps: torch.optim.Adagrad(ps), 8.0),
    ],
)
def test_optimizer_state_is_read_off_the_optimizer(make, expected: float) -> None:
    assert optimizer_bytes(make) == pytest.approx(expected, abs=0.01)


# ---- the message ------------------------------------------------------------------------------------------------


@pytest.mark.scenario(9)
def test_the_message_names_rank_bytes_and_remedies() -> None:
    size = ModelSize(trainable=1_000_000_000, frozen=0)
    memory = RankMemory(
        device_bytes=16 * 2**30,
        budget_bytes=14 * 2**30,
        activations=ActivationMemory(one_sample=2.0**30, intercept=2.0**29, slope=2.0**29),
        measured_correction=1.0,
        states={stage: model_states(size, dtype=torch.bfloat16, zero_stage=stage, world_size=2) for stage in range(4)},
    )
    text = explain(1, "Tesla T4", memory, 0)
    for part in ("rank 1", "Tesla T4", "14.00 GiB of 16.00 GiB", "18.63 GiB", "1.86 GiB parameters", "higher ZeRO"):
        assert part in text
    assert "higher ZeRO stage" not in explain(1, "Tesla T4", memory, 3)
    assert memory.margin == pytest.approx(0.125)
    assert RankMemory.from_dict(memory.to_dict()) == memory
