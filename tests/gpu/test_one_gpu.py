"""Predictions against one real GPU: `pytest tests/gpu` takes about a minute."""

from __future__ import annotations

import statistics

import pytest
import torch

from accelerate_poplar.curve import StepTimeCurve
from accelerate_poplar.device import synchronize
from accelerate_poplar.measure import MeasuredProfile
from accelerate_poplar.memory import DTYPE_NAMES

from ..core.tiny_models import token_loss
from .one_gpu import new_model, profile, rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LARGEST = 48
MEMORY_ERROR, TIME_ERROR = 0.05, 0.10


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=lambda dtype: DTYPE_NAMES[dtype])
def measured(request: pytest.FixtureRequest) -> tuple[torch.dtype, MeasuredProfile]:
    return request.param, profile(request.param, largest_micro_batch=LARGEST)


def run(model: torch.nn.Module, size: int, repeats: int) -> tuple[int, list[float]]:
    """Peak bytes above what is held between passes, and milliseconds of every pass by the device's own clock."""
    device = torch.device("cuda", 0)
    batch = {key: value.to(device) for key, value in rows(size).items()}
    torch.autograd.backward(token_loss(model, batch))
    synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.backward(token_loss(model, batch))
        end.record()
        synchronize(device)
        times.append(start.elapsed_time(end))
    return torch.cuda.max_memory_allocated(device) - held, times


@pytest.mark.parametrize("size", [1, 8, 24, LARGEST])
def test_memory_is_as_predicted(measured: tuple[torch.dtype, MeasuredProfile], size: int) -> None:
    dtype, found = measured
    peak, _ = run(new_model().to(device="cuda", dtype=dtype), size, repeats=3)
    assert found.memory[0].activations.at(size) == pytest.approx(peak, rel=MEMORY_ERROR)


@pytest.mark.parametrize("size", [3, 12, LARGEST])
def test_time_is_as_predicted(measured: tuple[torch.dtype, MeasuredProfile], size: int) -> None:
    dtype, found = measured
    _, times = run(new_model().to(device="cuda", dtype=dtype), size, repeats=20)
    curve = StepTimeCurve.fit(found.ranks[0].points, max_micro_batch_size=LARGEST)
    assert 1e3 * curve.times()[size] == pytest.approx(statistics.median(times[5:]), rel=TIME_ERROR)


def test_the_model_stays_where_it_was() -> None:
    model = new_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    profile(torch.float32, largest_micro_batch=LARGEST, model=model)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
