"""Timing one size after the other on a scripted device: limits, failures and the budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate_poplar.points import PointPicker
from accelerate_poplar.probe import MicroStepper, is_out_of_memory, time_sizes


class Device:
    """Takes 1 + b seconds for b samples, holds `fits` of them, and counts on a clock of its own."""

    def __init__(self, fits: int = 10**9, broken: dict[int, Exception] | None = None) -> None:
        self.fits = fits
        self.broken = broken or {}
        self.now = 0.0
        self.recovered = 0
        self.seen: list[int] = []

    def time(self, size: int, *, warm: bool = False) -> list[float]:
        self.seen.append(size)
        if size in self.broken:
            raise self.broken[size]
        if size > self.fits:
            raise torch.OutOfMemoryError("scripted")
        self.now += 1.0 + size
        return [1.0 + size] * (1 if warm else 2)

    def run(self, largest: int, budget_s: float = 1e9):
        def recover() -> None:
            self.recovered += 1

        return time_sizes(
            self.time,
            PointPicker(largest=largest, relative_error=0.03),
            relative_error=0.03,
            out_of_time=lambda: self.now > budget_s,
            recover=recover,
            progress=lambda text: None,
        )


def test_times_what_the_picker_asks_for() -> None:
    result = Device().run(8)
    assert result.seconds == {1: 2.0, 2: 3.0, 4: 5.0, 8: 9.0}
    assert result.proven_cap is None


@pytest.mark.scenario(28)
@pytest.mark.parametrize("fits", [1, 3, 5, 11, 12, 13, 31])
def test_running_out_of_memory_becomes_a_smaller_cap(fits: int) -> None:
    device = Device(fits=fits)
    result = device.run(32)
    assert result.proven_cap is not None
    assert fits / 2 < result.proven_cap <= fits
    assert max(result.seconds) == result.proven_cap
    assert device.recovered >= 1


def test_nothing_fits() -> None:
    result = Device(fits=0).run(8)
    assert result.seconds == {}
    assert result.proven_cap == 0


@pytest.mark.scenario(33)
def test_a_size_that_fails_is_skipped() -> None:
    result = Device(broken={4: RuntimeError("no kernel for this shape")}).run(8)
    assert sorted(result.seconds) == [1, 2, 8]
    assert result.skipped == {4: "RuntimeError: no kernel for this shape"}
    assert result.proven_cap is None


def test_a_model_that_refuses_a_single_sample_is_timed_from_two_on() -> None:
    result = Device(broken={1: ValueError("Expected more than 1 value per channel")}).run(8)
    assert sorted(result.seconds) == [2, 4, 8]


def test_a_model_that_fails_at_once_is_an_error() -> None:
    problem = RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Device(broken={1: problem, 2: problem}).run(8)


@pytest.mark.scenario(33)
def test_stops_when_time_is_up_but_always_knows_one_size() -> None:
    assert list(Device().run(1024, budget_s=0.0).seconds) == [1]
    device = Device()
    device.run(1024, budget_s=40.0)
    assert device.now < 100


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_every_form_of_running_out_of_memory(problem: BaseException, expected: bool) -> None:
    assert is_out_of_memory(problem) is expected


def stepper(clock, loss_fn=None) -> MicroStepper:
    return MicroStepper(
        model=nn.Linear(4, 1),
        loss_fn=loss_fn or (lambda model, batch: model(batch).sum()),
        make_batch=lambda size: torch.ones(size, 4),
        device=torch.device("cpu"),
        dtype=torch.float32,
        clock=clock,
    )


class Clock:
    """Advances by the next scripted duration between two readings."""

    def __init__(self, *durations: float) -> None:
        self.durations = list(durations)
        self.now = 0.0
        self.open = False

    def __call__(self) -> float:
        if self.open:
            self.now += self.durations.pop(0)
        self.open = not self.open
        return self.now


def test_a_few_repeats_after_a_warm_up() -> None:
    probe = stepper(Clock(2.0, 3.0, 5.0))
    assert probe.time(2) == [2.0, 3.0]
    assert probe.micro_steps == 3, "one warm-up, two repeats"
    assert probe.time(2, warm=True) == [5.0]
    assert probe.micro_steps == 4


class Unsteady(Device):
    """Answers from a list, per size; the last answer stays."""

    def __init__(self, answers: dict[int, list[float]]) -> None:
        super().__init__()
        self.answers = {size: list(seconds) for size, seconds in answers.items()}

    def time(self, size: int, *, warm: bool = False) -> list[float]:
        self.seen.append(size)
        self.now += 1.0
        left = self.answers[size]
        return [left.pop(0) if len(left) > 1 else left[0] for _ in range(1 if warm else 2)]


def test_sizes_whose_repeats_disagree_are_timed_again() -> None:
    device = Unsteady({1: [1.0], 2: [4.0, 2.0, 6.0, 1.0, 3.0, 2.0, 2.0, 2.0, 2.0], 4: [4.0]})
    result = device.run(4)
    assert result.seconds == {1: 1.0, 2: 2.0, 4: 4.0}
    assert device.seen.count(1) == device.seen.count(4) == 4
    assert device.seen.count(2) > 4


def test_a_spell_of_load_that_met_one_size_does_not_last() -> None:
    device = Unsteady({1: [1.0], 2: [2.0], 4: [1.0, 1.0, 4.0], 8: [8.0]})
    assert device.run(8).seconds[4] == 4.0, "the first repeats agreed with each other, and were wrong"
    assert device.seen[:16] == [1, 2, 4, 8, *[1, 2, 4, 8] * 3]


def test_a_size_that_seems_faster_than_a_smaller_one_is_looked_at_again_with_it() -> None:
    device = Unsteady({1: [1.0], 2: [5.0, 5.0, 5.0, 5.0, 5.0, 2.0], 3: [2.5], 4: [3.0]})
    result = device.run(4)
    assert result.seconds == {1: 1.0, 2: 2.0, 3: 2.5, 4: 3.0}
    assert device.seen[:16] == [1, 2, 4, *[1, 2, 4] * 3, *[3] * 4]
    assert device.seen[16:20] == [2, 3, 2, 3], "in turns"


def test_noise_without_end_is_given_up() -> None:
    device = Unsteady({1: [1.0, 3.0] * 50, 2: [2.0], 3: [3.0], 4: [4.0]})
    device.run(4)
    assert device.seen.count(1) < 20
    hurried = Unsteady({1: [1.0, 3.0] * 50, 2: [2.0], 3: [3.0], 4: [4.0]})
    hurried.run(4, budget_s=3.5)
    assert hurried.seen.count(1) <= 2


def test_an_allocator_without_an_exception_of_its_own_is_understood() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"):
        stepper(Clock(), loss_fn).activation_bytes(1)


def test_activation_bytes_leave_out_parameters_and_gradients() -> None:
    model = nn.Linear(1, 1000, bias=False)
    probe = MicroStepper(
        model=model,
        loss_fn=lambda m, batch: m(batch).pow(2).sum(),
        make_batch=lambda size: torch.ones(size, 1),
        device=torch.device("cpu"),
        dtype=torch.float32,
        clock=lambda: 0.0,
    )
    small, large = probe.activation_bytes(1), probe.activation_bytes(11)
    row = 1000 * 4
    assert 2 * row <= (large - small) / 10 <= 4 * row, "output, square and gradient of 1000 values per sample"
