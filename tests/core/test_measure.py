"""Profiling a cluster of scripted ranks: what they agree on, what they catch, what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_poplar.comm import SingleRank
from accelerate_poplar.emulation import Emulation
from accelerate_poplar.errors import RankError
from accelerate_poplar.measure import MeasuredProfile, explain_memory, profile_cluster
from accelerate_poplar.probe import ShortestRow
from accelerate_poplar.profiles import ClusterProfile
from accelerate_poplar.state_choice import choose_plan

from .ranks_in_threads import run_ranks

WIDTH = 256


class Scripted(nn.Module):
    """A layer that takes `fixed + b x per_sample` seconds on a clock of its own."""

    def __init__(self, fixed_s: float = 1.0, per_sample_s: float = 0.5) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.second = nn.Linear(WIDTH, 1)
        self.fixed_s, self.per_sample_s = fixed_s, per_sample_s
        self.now = [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.now[0] += self.fixed_s + self.per_sample_s * x.shape[0]
        return self.second(torch.tanh(self.first(x)))


class Plain(nn.Module):
    """A model without side effects, so that it compiles whole; its clock moves a second with every reading."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.now = [0.0]

    def read(self) -> float:
        self.now[0] += 1.0
        return self.now[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


def profile(model: Scripted, **changes: Any) -> MeasuredProfile:
    values: dict[str, Any] = {
        "model": model,
        "loss_fn": mean_square,
        "make_batch": lambda size: torch.ones(size, 4),
        "ranks": SingleRank(),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "zero_stages": (0, 1, 2, 3),
        "largest_micro_batch": 16,
        "user_caps": None,
        "memory_fraction": 1.0,
        "budget_s": 1e9,
        "relative_error": 0.03,
        "model_name": "scripted",
        "seq_len": 0,
        "clock": lambda: model.now[0],
    }
    return profile_cluster(**{**values, **changes})


def test_the_curve_is_the_scripted_one() -> None:
    measured = profile(Scripted())
    (rank,) = measured.ranks
    assert [p.micro_batch_size for p in rank.points] == [1, 2, 4, 8, 16]
    assert all(p.step_time_s == pytest.approx(1.0 + 0.5 * p.micro_batch_size) for p in rank.points)
    assert measured.num_parameters == 4 * WIDTH + WIDTH + WIDTH + 1
    assert (measured.model, measured.dtype, measured.emulated) == ("scripted", "fp32", False)
    for stage in range(4):
        assert measured.stage(stage).max_micro_batch_size == (16,)


class Tokens(Scripted):
    """A layer that takes a second and half a second for every four tokens."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.now[0] += self.fixed_s + self.per_sample_s * input_ids.numel() / 4
        return self.second(torch.tanh(self.first(input_ids.mean(1, keepdim=True).expand(-1, 4))))


def loss_of_tokens(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return mean_square(model, batch["input_ids"])


def profile_of_tokens(**changes: Any) -> MeasuredProfile:
    values = {
        "loss_fn": loss_of_tokens,
        "make_batch": lambda size: {"input_ids": torch.ones(size, 4)},
        "shortest": {"input_ids": torch.ones(1, 2)},
    }
    return profile(Tokens(), **{**values, **changes})


def test_a_short_row_is_timed_where_rows_differ_in_length() -> None:
    measured = profile_of_tokens()
    assert measured.shortest == (ShortestRow(tokens=2, step_time_s=pytest.approx(1.25)),)
    assert [p.step_time_s for p in measured.ranks[0].points[:2]] == pytest.approx([1.5, 2.0])
    data = json.loads(json.dumps(measured.to_dict()))
    assert ClusterProfile.from_dict(data).ranks == measured.ranks, "readers of the plain form pass over it"
    assert MeasuredProfile.from_dict(data).shortest == measured.shortest
    (slowed,) = profile_of_tokens(emulation=Emulation(slowdown=4.0, sleep=lambda _: None)).shortest
    assert slowed.step_time_s == pytest.approx(5.0)


def test_a_short_row_is_not_needed() -> None:
    def refuse_two(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if batch["input_ids"].shape[1] == 2:
            raise ValueError("needs four tokens")
        return loss_of_tokens(model, batch)

    for measured in (profile_of_tokens(shortest=None), profile_of_tokens(loss_fn=refuse_two)):
        assert measured.shortest == (None,)
        assert "shortest" not in measured.to_dict()
        assert MeasuredProfile.from_dict(measured.to_dict()).ranks == measured.ranks


@pytest.mark.parametrize("by_accelerate", [False, True])
def test_compiling_for_a_new_size_is_not_counted_as_its_time(
    by_accelerate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    model = Plain()
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compilations.append(len(inputs))
        model.now[0] += 100.0
        return graph.forward

    options = {"backend": backend, "dynamic": False}
    weights = [p.detach().clone() for p in model.parameters()]
    if by_accelerate:
        measured = profile(model, largest_micro_batch=4, clock=model.read, compile_options=options)
    else:
        measured = profile(torch.compile(model, **options), largest_micro_batch=4, clock=model.read)
    assert len(compilations) >= 3
    assert {p.micro_batch_size for p in measured.ranks[0].points} >= {1, 2, 4}
    assert all(p.step_time_s < 50.0 for p in measured.ranks[0].points)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_the_profile_survives_its_json_form() -> None:
    measured = profile(Scripted())
    data = json.loads(json.dumps(measured.to_dict()))
    plain = ClusterProfile.from_dict(data)
    assert plain.ranks == measured.ranks
    assert plain.zero_stages == measured.zero_stages
    again = MeasuredProfile.from_dict(data)
    assert again == replace(measured, timed_micro_steps=(), seconds=0.0)


def test_every_rank_gets_the_same_profile() -> None:
    first, second = run_ranks(
        2, lambda ranks: profile(Scripted(per_sample_s=0.5 + ranks.rank), ranks=ranks, largest_micro_batch=4)
    )
    assert first.to_dict() == second.to_dict()
    assert [p.step_time_s for p in first.ranks[0].points] == pytest.approx([1.5, 2.0, 3.0])
    assert [p.step_time_s for p in first.ranks[1].points] == pytest.approx([2.5, 4.0, 7.0])
    assert [s.rank for s in first.stragglers] == [1]


def test_what_was_left_out_or_timed_in_a_hurry_is_said() -> None:
    def refuse_four(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 4:
            raise RuntimeError("no kernel for this shape")
        return mean_square(model, batch)

    assert profile(Scripted()).remarks == ()
    (left_out,) = profile(Scripted(), loss_fn=refuse_four).remarks
    assert left_out == (
        "rank 0: a micro-batch of 4 could not be run and was not timed: RuntimeError: no kernel for this shape"
    )
    (hurried,) = profile(Scripted(), budget_s=30.0).remarks
    assert hurried.startswith("the profiling budget of 30 s ended before micro-batches of ")
    assert hurried.endswith(" could be timed again on rank 0, so their times may be off; raise profile_budget_s")


def test_ranks_that_ask_for_different_things_are_told() -> None:
    def work(ranks):
        return profile(Scripted(), ranks=ranks, largest_micro_batch=4 + ranks.rank)

    for problem in run_ranks(2, work, errors=True):
        assert isinstance(problem, RankError)
        assert "do not agree on what to profile" in str(problem)


def test_caps_by_hand_hold() -> None:
    first, _ = run_ranks(2, lambda ranks: profile(Scripted(), ranks=ranks, user_caps=(3, 9)))
    assert first.stage(0).max_micro_batch_size == (3, 9)
    assert max(p.micro_batch_size for p in first.ranks[0].points) == 9, "equal ranks share what was measured"


def test_the_budget_ends_profiling() -> None:
    model = Scripted(per_sample_s=1.0)
    measured = profile(model, budget_s=30.0)
    assert len(measured.ranks[0].points) < 5
    assert measured.stage(0).max_micro_batch_size == (16,), "what is not timed may still be planned"


def test_progress_says_what_is_measured() -> None:
    told: list[str] = []
    profile(Scripted(), largest_micro_batch=4, progress=told.append)
    assert told[0] == "rank 0/1: memory"
    assert "rank 0/1: micro-batch 4" in told


# ---- memory -----------------------------------------------------------------------------------------------------


def needed(model: nn.Module, stage: int, world_size: int = 1) -> int:
    measured = profile(model, zero_stages=(stage,))
    return measured.memory[0].needed_bytes(stage)


@pytest.mark.scenario(5)
def test_equal_speed_and_memory_one_to_two() -> None:
    one = needed(Scripted(), 0)

    def work(ranks):
        emulation = Emulation(memory_bytes=one * (2 if ranks.rank == 0 else 1) + 40_000)
        return profile(Scripted(), ranks=ranks, emulation=emulation, largest_micro_batch=64)

    measured, _ = run_ranks(2, work)
    large, small = measured.stage(0).max_micro_batch_size
    assert 1 <= small < large
    assert measured.ranks[0].memory_bytes > measured.ranks[1].memory_bytes
    assert measured.emulated


@pytest.mark.scenario(6)
@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_memory_fractions_hold_while_profiling(fraction: float) -> None:
    memory_bytes = 4 * needed(Scripted(), 0)
    emulation = Emulation(memory_bytes=memory_bytes)
    measured = profile(Scripted(), emulation=emulation, memory_fraction=fraction, largest_micro_batch=10_000)
    cap = measured.stage(0).max_micro_batch_size[0]
    memory = measured.memory[0]
    assert memory.budget_bytes == int(fraction * memory_bytes)
    assert 1 <= cap < 10_000
    assert memory.needed_bytes(0, cap) <= memory.budget_bytes
    assert memory.needed_bytes(0, cap + 1) > memory.budget_bytes, "and the fraction is made use of"
    assert max(p.peak_memory_bytes for p in measured.ranks[0].points) <= memory.budget_bytes


@pytest.mark.scenario(9)
def test_a_rank_that_is_too_small_is_explained_and_nothing_is_timed() -> None:
    def work(ranks):
        model = Scripted()
        memory_bytes = 2**30 if ranks.rank == 0 else 2_000
        measured = profile(model, ranks=ranks, emulation=Emulation(memory_bytes=memory_bytes))
        return measured, model.now[0]

    for measured, spent_s in run_ranks(2, work):
        assert measured.stage(3).max_micro_batch_size[1] == 0
        assert measured.stage(3).max_micro_batch_size[0] == 16
        text = explain_memory(measured, 3)
        assert text.startswith("rank 1 ")
        assert "0.0 MiB of 0.0 MiB may be used" in text
        assert "leaving this rank out" in text
        assert spent_s < 60.0, "memory was looked at, the curve was not"
        assert all(rank.points == () for rank in measured.ranks)
    assert explain_memory(profile(Scripted()), 0) == ""


@pytest.mark.parametrize("uneven", [True, False])
def test_a_rank_too_small_for_an_even_share_is_timed_where_shares_may_be_uneven(uneven: bool) -> None:
    size = sum(p.numel() for p in Scripted().parameters())

    def work(ranks):
        # Under ZeRO-3 an even share takes 14 bytes a parameter in the optimizer step; a whole pass takes 8.
        memory_bytes = 2**30 if ranks.rank == 0 else 11 * size + 4_000
        return profile(
            Scripted(),
            ranks=ranks,
            emulation=Emulation(memory_bytes=memory_bytes),
            deepspeed_config={"zero_optimization": {"reduce_bucket_size": 10, "stage3_max_live_parameters": 10}},
            zero_stages=(1, 2, 3),
            uneven_state=uneven,
        )

    for measured in run_ranks(2, work):
        assert [measured.stage(stage).max_micro_batch_size[1] for stage in (1, 2, 3)] == [0, 0, 0]
        assert all(bool(rank.points) is uneven for rank in measured.ranks)
        if uneven:
            chosen = choose_plan(measured, global_batch_size=8, stages=(1, 2, 3), strategy="optimal")
            assert chosen.plan.state_fractions is not None
            assert chosen.plan.state_fractions[1] < 0.5


def test_uneven_shares_do_not_help_a_rank_without_room_for_a_sample() -> None:
    def work(ranks):
        memory_bytes = 2**30 if ranks.rank == 0 else 2_000
        return profile(Scripted(), ranks=ranks, emulation=Emulation(memory_bytes=memory_bytes), uneven_state=True)

    for measured in run_ranks(2, work):
        assert all(rank.points == () for rank in measured.ranks)


def test_stages_escalate() -> None:
    model = Scripted()
    size = sum(p.numel() for p in model.parameters())
    # Between what stage 0 and stage 1 hold, for two ranks.
    states = {
        stage: replaceable.total
        for stage, replaceable in profile(model, zero_stages=(0, 1, 2, 3)).memory[0].states.items()
    }
    assert states[0] == 16 * size

    def work(ranks):
        emulation = Emulation(memory_bytes=15 * size + 20_000)
        config = {"zero_optimization": {"reduce_bucket_size": 10, "stage3_max_live_parameters": 10}}
        return profile(Scripted(), ranks=ranks, emulation=emulation, deepspeed_config=config, largest_micro_batch=2)

    first, _ = run_ranks(2, work)
    caps = {stage: first.stage(stage).max_micro_batch_size for stage in range(4)}
    assert all(caps[3])
    assert caps[0] <= caps[1] <= caps[2] <= caps[3]


# ---- failures ---------------------------------------------------------------------------------------------------


def failing_loss(when: str, from_size: int, problem: Exception):
    """Raises on real batches of `from_size` and more, in forward or in backward."""

    def fail(_: torch.Tensor) -> None:
        raise problem

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        real = type(batch) is torch.Tensor
        if real and batch.shape[0] >= from_size and when == "forward":
            raise problem
        output = model(batch)
        if real and batch.shape[0] >= from_size:
            output.register_hook(fail)
        return output.pow(2).mean()

    return loss_fn


@pytest.mark.scenario(28)
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("from_size", [1, 2, 7])
def test_out_of_memory_on_one_rank_becomes_a_smaller_cap(when: str, from_size: int) -> None:
    def work(ranks):
        model = Scripted()
        before = [p.detach().clone() for p in model.parameters()]
        loss_fn = mean_square if ranks.rank == 0 else failing_loss(when, from_size, torch.OutOfMemoryError("scripted"))
        measured = profile(model, ranks=ranks, loss_fn=loss_fn)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(p.grad is None for p in model.parameters())
        return measured

    first, second = run_ranks(2, work)
    assert first.to_dict() == second.to_dict()
    for stage in range(4):
        healthy, short = first.stage(stage).max_micro_batch_size
        assert healthy == 16
        assert (from_size - 1) / 2 <= short <= from_size - 1


def test_a_crash_on_one_rank_ends_all_and_names_it() -> None:
    def work(ranks):
        loss_fn = mean_square if ranks.rank == 0 else failing_loss("forward", 1, RuntimeError("no such kernel"))
        return profile(Scripted(), ranks=ranks, loss_fn=loss_fn)

    healthy, broken = run_ranks(2, work, errors=True)
    assert isinstance(healthy, RankError)
    assert "rank 1 failed: RuntimeError: no such kernel" in str(healthy)
    assert str(broken) == "no such kernel"


def test_batch_normalisation_refuses_one_sample_and_is_profiled_all_the_same() -> None:
    class Normalised(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(super().forward(x))

    measured = profile(Normalised(), largest_micro_batch=8)
    assert [p.micro_batch_size for p in measured.ranks[0].points] == [2, 4, 8]
    assert measured.memory[0].measured_correction == pytest.approx(1.0, abs=0.05)


@pytest.mark.scenario(34)
def test_every_probe_runs_the_batches_it_is_given() -> None:
    lengths: list[int] = []

    def longest(size: int) -> torch.Tensor:
        return torch.ones(size, 100, 4)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        lengths.append(batch.shape[1])
        return model(batch).mean()

    measured = profile(Scripted(), make_batch=longest, loss_fn=loss_fn)
    assert set(lengths) == {100}
    short = profile(Scripted())
    assert measured.memory[0].activations.at(1) > 5 * short.memory[0].activations.at(1)


def test_memory_that_cannot_be_predicted_is_measured() -> None:
    class Choosy(Scripted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y if y.sum().item() >= 0 else -y

    predictable = profile(Scripted(), largest_micro_batch=8)
    measured = profile(Choosy(), largest_micro_batch=8)
    assert measured.stage(0).max_micro_batch_size == (8,)
    one, expected = measured.memory[0].activations.at(1), predictable.memory[0].activations.at(1)
    assert one == pytest.approx(expected, rel=0.3)


def test_half_precision_states() -> None:
    measured = profile(Scripted(), dtype=torch.bfloat16)
    size = measured.num_parameters
    assert measured.dtype == "bf16"
    assert measured.memory[0].states[0].parameters == 2 * size
    assert measured.memory[0].states[0].optimizer == 12 * size
