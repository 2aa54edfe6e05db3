"""The husk of a model: its shapes without its arithmetic, with as much stand-in compute as it is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate_poplar.husk import Husk, StandInCompute, StandInPauses


class Ticking:
    """A clock that moves by a little whenever it is read."""

    def __init__(self, tick_s: float = 0.001) -> None:
        self.now, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.ModuleList([nn.Linear(8, 2, bias=False)]))


def test_every_parameter_gets_a_gradient_of_its_size() -> None:
    husk = Husk(model())
    husk(torch.zeros(1)).sum().backward()
    assert [p.grad.numel() for p in husk.parameters()] == [32, 8, 16]


def test_compute_is_what_was_asked_for_a_third_of_it_forward() -> None:
    husk, clock = Husk(model()), Ticking()
    husk.compute(6.0, torch.device("cpu"), clock)
    out = husk(torch.zeros(1)).sum()
    assert clock.now == pytest.approx(2.0, abs=0.02)
    out.backward()
    assert clock.now == pytest.approx(6.0, abs=0.02)


def test_a_cpu_is_busy_for_as_long_as_it_is_told() -> None:
    clock = Ticking()
    work = StandInCompute(torch.device("cpu"), 0.5, clock)
    work()
    work(2.0)
    assert clock.now == pytest.approx(1.5, abs=0.01)


class Sleeper:
    """A clock that only sleeping moves, every sleep a little too long; compute is moved by hand."""

    def __init__(self, late_s: float) -> None:
        self.now = self.computed = 0.0
        self.late_s = late_s

    def clock(self) -> float:
        return self.now

    def compute_clock(self) -> float:
        return self.computed

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_s


def test_layers_take_their_set_time_and_compute_is_part_of_it() -> None:
    time = Sleeper(late_s=0.01)
    pauses = StandInPauses(0.5, time.clock, time.compute_clock, time.sleep)
    time.compute(3.0)  # Before the pass.
    pauses.begin()
    start = time.now
    for _ in range(10):
        time.compute(0.2)
        pauses()
    time.compute(0.6)
    pauses(2.0)
    assert time.now - start == pytest.approx(6.0, abs=0.02)


def test_a_layer_that_computes_for_longer_shortens_the_next() -> None:
    time = Sleeper(late_s=0.0)
    pauses = StandInPauses(0.5, time.clock, time.compute_clock, time.sleep)
    time.compute(0.8)
    pauses()
    assert time.now == pytest.approx(0.8)
    pauses()
    assert time.now == pytest.approx(1.0)
