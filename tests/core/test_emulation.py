"""Ranks that look slower or smaller than they are: exact on scripted clocks, on real modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate_poplar.emulation import _PASSES_IN_ONE_GO, Emulation
from accelerate_poplar.errors import ConfigError


class World:
    """A thread whose compute is what its layers say, on clocks that only they and sleeping move.

    Args:
        oversleep_s: How much too long every sleep is.
        cold_s: How much longer compute takes once after every sleep.
    """

    def __init__(self, oversleep_s: float = 0.0, cold_s: float = 0.0) -> None:
        self.cold_s = cold_s
        self.compute_s = 0.0
        self.slept_s = 0.0
        self.sleeps = 0
        self.oversleep_s = oversleep_s

    @property
    def elapsed_s(self) -> float:
        return self.compute_s + self.slept_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept_s += seconds + self.oversleep_s
        self.compute_s += self.cold_s
        self.sleeps += 1

    def emulation(self, slowdown: float, **kwargs) -> Emulation:
        return Emulation(
            slowdown=slowdown,
            compute_clock=lambda: self.compute_s,
            clock=lambda: self.elapsed_s,
            sleep=self.sleep,
            **kwargs,
        )


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, world, forward_s, backward_s):
        ctx.world, ctx.backward_s = world, backward_s
        ctx.save_for_backward(weight)
        world.compute_s += forward_s
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        ctx.world.compute_s += ctx.backward_s
        (weight,) = ctx.saved_tensors
        return gradient * weight, gradient.sum().reshape(1), None, None, None


class Layer(nn.Module):
    """Computes for a stated time forward and backward."""

    def __init__(self, world: World, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.world, self.forward_s, self.backward_s = world, forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Work.apply(x, self.weight, self.world, self.forward_s, self.backward_s)


class Deep(nn.Module):
    """Some layers, by choice with checkpointing; output as a model of the hub gives it."""

    def __init__(self, world: World, layers: int = 6, *, checkpointing: str | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(world, 0.010, 0.020) for _ in range(layers))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        return {"loss": x.sum(), "logits": x}


def step(model: nn.Module, x: torch.Tensor | None = None) -> None:
    model(torch.ones(2, requires_grad=True) if x is None else x)["loss"].backward()


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("slowdown", [1.5, 3.0, 8.0])
def test_a_step_takes_as_many_times_longer(slowdown: float, checkpointing: str | None) -> None:
    world = World()
    model = Deep(world, checkpointing=checkpointing)
    world.emulation(slowdown).attach(model)
    for _ in range(3):
        step(model)
    expected_s = 3 * 6 * (0.030 if checkpointing is None else 0.040)
    assert world.compute_s == pytest.approx(expected_s)
    assert world.elapsed_s == pytest.approx(slowdown * world.compute_s, rel=1e-6)


def run_in(model: nn.Module) -> None:
    """The passes of a size that run in one go."""
    for _ in range(_PASSES_IN_ONE_GO):
        step(model, torch.ones(2))


def test_backward_is_over_only_when_its_share_is_slept() -> None:
    world = World()
    model = Deep(world)
    world.emulation(3.0).attach(model)
    run_in(model)
    start = world.elapsed_s
    loss = model(torch.ones(2))["loss"]
    assert world.elapsed_s - start == pytest.approx(3 * 0.060), "forward is slowed inside forward"
    loss.backward()
    assert world.elapsed_s - start == pytest.approx(3 * 0.180), "and backward inside backward"


def test_pauses_are_spread_over_the_pass_but_not_countless() -> None:
    world = World()
    model = Deep(world, layers=40)
    world.emulation(3.0).attach(model)
    run_in(model)
    world.sleeps = 0
    step(model)
    assert 4 <= world.sleeps <= 20


def test_caches_that_pauses_left_cold_do_not_count_as_compute() -> None:
    world = World(cold_s=0.005)
    model = Deep(world, layers=40)
    world.emulation(3.0).attach(model)
    run_in(model)
    for _ in range(4):
        step(model, torch.ones(2))
    start = world.elapsed_s
    for _ in range(20):
        step(model, torch.ones(2))
    assert world.elapsed_s - start == pytest.approx(20 * 3 * 40 * 0.030, rel=0.03)


@pytest.mark.parametrize("factor", [0.7, 1.3, 2.0])
def test_what_else_slows_or_frees_the_machine_does_not_change_the_pretended_device(factor: float) -> None:
    world = World()
    model = Deep(world)
    emulation = world.emulation(3.0)
    emulation.attach(model)
    run_in(model)
    for layer in model.layers:
        layer.forward_s, layer.backward_s = 0.010 * factor, 0.020 * factor
    start, paced = world.elapsed_s, emulation.compute_time()
    for _ in range(20):
        step(model, torch.ones(2))
    assert world.elapsed_s - start == pytest.approx(20 * 3 * 6 * 0.030, rel=0.03)
    assert emulation.compute_time() - paced == pytest.approx(20 * 3 * 6 * 0.030, rel=0.03)


def test_a_machine_slower_than_the_pretended_device_owes_nothing_later() -> None:
    world = World()
    model = Deep(world)
    world.emulation(1.5).attach(model)
    run_in(model)
    for layer in model.layers:
        layer.forward_s, layer.backward_s = 0.030, 0.060
    for _ in range(20):
        step(model, torch.ones(2))
    for layer in model.layers:
        layer.forward_s, layer.backward_s = 0.010, 0.020
    for _ in range(4):
        step(model, torch.ones(2))
    start = world.elapsed_s
    step(model, torch.ones(2))
    assert world.elapsed_s - start == pytest.approx(1.5 * 6 * 0.030)


def test_two_forward_passes_before_backward_are_slowed_both() -> None:
    world = World()
    model = Deep(world)
    world.emulation(3.0).attach(model)
    x = torch.ones(2, requires_grad=True)
    (model(x)["loss"] + model(x)["loss"]).backward()
    assert world.elapsed_s == pytest.approx(3 * 2 * 6 * 0.030)


def test_sleeping_too_long_is_made_up_for() -> None:
    world = World(oversleep_s=0.003)
    model = Deep(world)
    world.emulation(3.0).attach(model)
    for _ in range(20):
        step(model)
    assert world.elapsed_s == pytest.approx(3 * world.compute_s, rel=0.01)


def test_computing_outside_the_model_is_not_slowed() -> None:
    world = World()
    model = Deep(world)
    world.emulation(3.0).attach(model)
    step(model)
    before = world.slept_s
    world.compute_s += 10.0
    step(model)
    assert world.slept_s == pytest.approx(2 * before)


def test_evaluation_is_slowed_too() -> None:
    world = World()
    model = Deep(world)
    world.emulation(3.0).attach(model)
    with torch.no_grad():
        model(torch.ones(2))
    assert world.elapsed_s == pytest.approx(3 * 0.060)


def test_a_backward_that_failed_does_not_spoil_the_next() -> None:
    world = World()
    model = Deep(world)
    world.emulation(2.0).attach(model)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("scripted")

    output = model(torch.ones(2, requires_grad=True))
    hook = model.layers[3].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="scripted"):
        output["loss"].backward()
    hook.remove()
    step(model)
    start, computed = world.elapsed_s, world.compute_s
    for _ in range(2):
        step(model)
    assert world.elapsed_s - start == pytest.approx(2 * (world.compute_s - computed))


def test_attaching_twice_slows_once_and_removing_ends_it() -> None:
    world = World()
    model = Deep(world)
    emulation = world.emulation(3.0)
    first = emulation.attach(model)
    with emulation.attach(model):
        step(model)
    assert world.elapsed_s == pytest.approx(3 * world.compute_s)
    first.remove()
    first.remove()
    slept = world.slept_s
    step(model)
    assert world.slept_s == slept
    assert not model._forward_hooks
    assert not model.layers[0]._forward_hooks


def test_hooks_do_not_mind_in_place_operations() -> None:
    world = World()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    world.emulation(2.0).attach(model)
    model(torch.randn(8, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_results_are_those_of_the_model_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(16, 8)
    model(x).mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with Emulation(slowdown=2.0, sleep=lambda seconds: None).attach(model):
        model(x).mean().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


@pytest.mark.parametrize("slowdown", [0.5, 0.0, float("nan")])
def test_a_factor_below_one_is_refused(slowdown: float) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Emulation(slowdown=slowdown)


def test_no_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory is 0 bytes"):
        Emulation(memory_bytes=0)


def test_full_speed_installs_nothing() -> None:
    model = nn.Linear(2, 2)
    Emulation().attach(model)
    assert not model._forward_hooks
    assert not Emulation().active
    assert Emulation(slowdown=2.0).active
    assert Emulation(memory_bytes=1).active


def test_memory_runs_out_like_a_device() -> None:
    emulation = Emulation(memory_bytes=10_000)
    with emulation.memory_cap(4_000):
        kept = torch.zeros(1_000)
        with pytest.raises(torch.OutOfMemoryError, match="emulated device out of memory"):
            torch.zeros(1_000)
    del kept


def test_what_one_micro_step_keeps_counts_in_the_next() -> None:
    emulation = Emulation(memory_bytes=10_000)
    with emulation.memory_cap():
        kept = torch.zeros(2_000)
    with emulation.memory_cap(), pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1_000)
    emulation.forget_memory()
    with emulation.memory_cap():
        torch.zeros(2_000)
    del kept


def test_without_emulated_memory_nothing_is_counted() -> None:
    with Emulation(slowdown=2.0).memory_cap(10**15):
        torch.zeros(10)


@pytest.mark.scenario(28)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_runs_out_in_forward_and_in_backward(where: str) -> None:
    model = nn.Linear(8, 1_000, bias=False)
    weight = 8 * 1_000 * 4
    x = torch.ones(4, 8)
    # The output and its square fit; the gradient of the weights comes on top in backward.
    limit = weight + 4 * 1_000 * 4 * (1 if where == "forward" else 4)
    emulation = Emulation(memory_bytes=limit)
    parameters = list(model.parameters())
    with emulation.memory_cap(weight, known=parameters):
        if where == "forward":
            with pytest.raises(torch.OutOfMemoryError):
                model(x).pow(2)
        else:
            loss = model(x).pow(2).sum()
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward()


def test_passes_as_fast_as_they_can_never_pause_also_of_a_size_not_met_before() -> None:
    world = World()
    model = Deep(world)
    emulation = world.emulation(6.0)
    emulation.attach(model)
    emulation.expect(0.0)
    for size in (2, 2, 2, 64, 64, 5):
        step(model, torch.ones(size))
    assert world.slept_s == 0.0
    assert world.compute_s == pytest.approx(6 * 6 * 0.030)


def test_a_pass_takes_what_was_said_it_takes() -> None:
    world = World()
    model = Deep(world)
    emulation = world.emulation(3.0)
    emulation.attach(model)
    for wanted in (0.5, 0.4, None):
        emulation.expect(wanted)
        start, paced = world.elapsed_s, emulation.compute_time()
        for _ in range(8):
            step(model, torch.ones(2))
        expected = 8 * (3 * 6 * 0.030 if wanted is None else wanted)
        assert world.elapsed_s - start == pytest.approx(expected, rel=1e-6)
        assert emulation.compute_time() - paced == pytest.approx(expected, rel=1e-6)
