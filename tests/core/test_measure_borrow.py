"""Profiling leaves no trace: training afterwards is bit for bit what it would have been."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from accelerate_poplar.borrow import on_device, undisturbed
from accelerate_poplar.comm import SingleRank
from accelerate_poplar.emulation import Emulation
from accelerate_poplar.measure import profile_cluster

CPU = torch.device("cpu")


class Convolution(nn.Module):
    """BatchNorm, dropout of several kinds, a counter, a lazily made cache and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.3), nn.Flatten()
        )
        self.first = nn.Linear(8 * 36, 16)
        self.second = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(16, 1)
        self.frozen.weight.requires_grad_(False)
        self.calls = 0
        self.cache: torch.Tensor | None = None
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.steps += 1
        if self.cache is None:
            self.cache = torch.rand(16)
        noise = random.random() + float(np.random.rand())
        x = torch.dropout(self.first(self.layers(x)), 0.2, self.training) + self.cache.to(x.dtype) * noise
        return self.frozen(self.tied(self.second(x).relu()))


class Recurrent(nn.Module):
    """An LSTM keeps a second list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3 * 64, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.flatten(1).unsqueeze(1))[0][:, -1])


def images(size: int) -> torch.Tensor:
    return torch.rand(size, 3, 8, 8)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


def profile(model: nn.Module, *, dtype: torch.dtype = torch.float32, emulation: Emulation | None = None):
    return profile_cluster(
        model=model,
        loss_fn=loss_fn,
        make_batch=images,
        ranks=SingleRank(),
        device=CPU,
        dtype=dtype,
        zero_stages=(0, 3),
        largest_micro_batch=4,
        user_caps=None,
        memory_fraction=0.9,
        budget_s=5.0,
        relative_error=0.5,
        model_name="test",
        seq_len=0,
        emulation=emulation,
    )


def train(make: Callable[[], nn.Module], before: Callable[[nn.Module], object]) -> list[torch.Tensor]:
    """Parameters, buffers and random numbers after a few steps; `before` is called amid them."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        if step in (0, 2):
            before(model)
        loss_fn(model, images(5)).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    rest = [torch.rand(1), torch.tensor(random.random()), torch.tensor(np.random.rand())]
    calls = torch.tensor(getattr(model, "calls", 0))
    return [*(p.detach() for p in model.parameters()), *model.buffers(), *rest, calls]


@pytest.mark.parametrize("make", [Convolution, Recurrent])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_with_and_without_profiling_is_bit_identical(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    plain = train(make, lambda model: None)
    profiled = train(make, lambda model: profile(model, dtype=dtype))
    assert len(plain) == len(profiled)
    for left, right in zip(plain, profiled, strict=True):
        assert torch.equal(left, right)


@pytest.mark.scenario(28)
def test_running_out_of_memory_leaves_no_trace_either() -> None:
    plain = train(Convolution, lambda model: None)
    profiled = train(Convolution, lambda model: profile(model, emulation=Emulation(memory_bytes=60_000)))
    for left, right in zip(plain, profiled, strict=True):
        assert torch.equal(left, right)


def test_everything_comes_back_by_reference() -> None:
    model = Convolution()
    model.layers.eval()
    loss_fn(model, images(2)).backward()
    parameters = [(p, p.data_ptr(), p.grad) for p in model.parameters()]
    buffers = list(model.buffers())
    flags = [module.training for module in model.modules()]
    with undisturbed(model, CPU), on_device(model, CPU, torch.bfloat16):
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        assert all(p.grad is None for p in model.parameters())
        assert all(module.training for module in model.modules())
        assert model.tied.weight is model.second.weight
        loss_fn(model, images(2).bfloat16()).backward()
    assert [(p, p.data_ptr(), p.grad) for p in model.parameters()] == parameters
    assert all(left is right for left, right in zip(buffers, model.buffers(), strict=True))
    assert [module.training for module in model.modules()] == flags
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_comes_back_after_an_error_too() -> None:
    model = Convolution()
    pointers = [p.data_ptr() for p in model.parameters()]
    state = torch.get_rng_state()

    def fail() -> None:
        with undisturbed(model, CPU), on_device(model, CPU, torch.float16):
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert torch.equal(torch.get_rng_state(), state)
