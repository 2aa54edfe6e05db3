"""Judging a running plan, and the clock and history it is judged from, without other ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accelerate_poplar import ClusterProfile, Measurement, PoplarConfig, RankProfile, StageProfile, find_plan
from accelerate_poplar.comm import SingleRank
from accelerate_poplar.emulation import Emulation
from accelerate_poplar.replan import judge, scaled
from accelerate_poplar.step_model import break_down_plan
from accelerate_poplar.watch import ComputeClock, RunWatch, StepRecord, append_history, event_line, first_layer
from tests.core.tiny_models import tiny_llama


def profile(*seconds_per_sample: float) -> ClusterProfile:
    return ClusterProfile(
        model="m",
        num_parameters=1000,
        seq_len=8,
        dtype="fp32",
        ranks=tuple(
            RankProfile(
                rank=rank,
                host="h",
                device=f"d{rank}",
                memory_bytes=1,
                peak_flops=1e9,
                points=tuple(
                    Measurement(micro_batch_size=b, step_time_s=b * each, peak_memory_bytes=0) for b in (1, 2, 32)
                ),
            )
            for rank, each in enumerate(seconds_per_sample)
        ),
        zero_stages={
            stage: StageProfile(max_micro_batch_size=(32,) * len(seconds_per_sample), per_step_s=0.01)
            for stage in range(4)
        },
    )


@pytest.mark.scenario(30)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_rank_that_became_slow_is_named_and_gets_less(zero_stage: int) -> None:
    cluster = profile(0.1, 0.1)
    plan = find_plan(cluster, global_batch_size=32, zero_stage=zero_stage)
    fast, slow = break_down_plan(cluster, plan).compute_time_s
    verdict = judge(cluster, plan, (fast, 3 * slow))
    assert verdict.straggler
    assert verdict.slowest_drift_rank == 1
    assert verdict.drift == pytest.approx((1.0, 3.0))
    assert verdict.better.ranks[1].rank_batch_size == 8
    assert verdict.gain == pytest.approx(0.5, abs=0.03)
    assert "rank 1 takes 3.00x" in verdict.describe()


def test_a_rank_as_profiled_is_left_alone() -> None:
    cluster = profile(0.1, 0.3)
    plan = find_plan(cluster, global_batch_size=32, zero_stage=2)
    verdict = judge(cluster, plan, break_down_plan(cluster, plan).compute_time_s)
    assert not verdict.straggler
    assert verdict.gain == pytest.approx(0.0, abs=1e-9)
    assert "no other plan" in verdict.describe()


@settings(max_examples=60, deadline=None)
@given(factor=st.floats(0.3, 4.0))
def test_all_ranks_slower_alike_changes_no_plan(factor: float) -> None:
    cluster = profile(0.1, 0.2, 0.4)
    plan = find_plan(cluster, global_batch_size=35, zero_stage=1)
    times = [t * factor for t in break_down_plan(cluster, plan).compute_time_s]
    verdict = judge(cluster, plan, times)
    assert verdict.gain <= 0.06
    assert not verdict.straggler
    assert scaled(cluster, [1.0] * 3) == cluster


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(nn.Module):
    """A layer whose forward and backward take a second each."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += 1.0
        y = self.layer(x)
        y.register_hook(self._in_backward)
        return y

    def _in_backward(self, gradient: torch.Tensor) -> None:
        self.clock.now += 1.0


def test_the_clock_stops_before_the_ranks_wait_for_each_other() -> None:
    clock = Clock()
    model = nn.Sequential(nn.Linear(2, 2), Slow(clock))
    watch = ComputeClock(model, torch.device("cpu"), clock=clock)
    model.train()
    model(torch.ones(1, 2)).sum().backward()
    clock.now += 50.0  # the others
    watch.micro_step_done()
    assert watch.take() == pytest.approx(2.0)
    assert watch.take() == 0.0
    model.eval()
    model(torch.ones(1, 2))
    watch.micro_step_done()
    assert watch.take() == 0.0
    watch.remove()


def test_where_ranks_meet_inside_a_pass_processor_time_stands_in() -> None:
    own, wall = Clock(), Clock()
    model = nn.Sequential(nn.Linear(2, 2), Slow(own))
    watch = ComputeClock(model, torch.device("cpu"), waits_inside=True, clock=wall, thread_clock=own)
    model.train()
    model(torch.ones(1, 2)).sum().backward()
    wall.now += 100.0
    watch.micro_step_done()
    assert watch.take() == pytest.approx(2.0)


def test_an_emulated_rank_counts_pauses_that_are_still_to_come() -> None:
    own = Clock()
    model = nn.Sequential(nn.Linear(2, 2), Slow(own))
    emulation = Emulation(slowdown=3.0, compute_clock=own, clock=own, sleep=lambda seconds: None)
    emulation.attach(model)
    watch = ComputeClock(model, torch.device("cpu"), clock=own, emulation=emulation)
    model.train()
    model(torch.ones(1, 2)).sum().backward()
    own.now += 50.0  # the optimizer
    watch.micro_step_done()
    assert watch.take() == pytest.approx(6.0)


def test_the_last_layer_that_backward_reaches() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    assert first_layer(model) is model[0]
    assert first_layer(nn.ReLU()) is None
    model[0].requires_grad_(False)
    assert first_layer(model) is model[2]


def test_with_a_frozen_embedding_the_clock_watches_the_first_layer_that_is_trained() -> None:
    model = tiny_llama()
    model.requires_grad_(False)
    assert first_layer(model) is None
    query = model.model.layers[0].self_attn.q_proj
    query.requires_grad_(True)
    assert first_layer(model) is query


def watching(cluster: ClusterProfile | None, config: PoplarConfig | None = None) -> RunWatch:
    return RunWatch(
        ranks=SingleRank(),
        config=config or PoplarConfig(),
        device=torch.device("cpu"),
        profile=cluster,
        emulated=True,
        parameters=1000,
    )


def record(seconds: float, compute: float) -> StepRecord:
    return StepRecord(step_time_s=seconds, compute_time_s=compute, num_samples=4, num_tokens=32, full=True)


@pytest.mark.scenario(40)
@pytest.mark.scenario(41)
def test_metrics_count_real_samples_and_name_every_rank() -> None:
    cluster = profile(0.1)
    plan = find_plan(cluster, global_batch_size=4, zero_stage=0)
    watch = watching(cluster)
    assert watch.summarise(plan, step=1) is None
    watch.record(record(2.0, 1.5))
    watch.record(record(4.0, 2.5))
    values, line = watch.summarise(plan, step=2)  # type: ignore[misc]
    assert values["poplar/samples_per_s"] == pytest.approx(8 / 6.0)
    assert values["poplar/tokens_per_s"] == pytest.approx(64 / 6.0)
    assert values["poplar/step_time_s"] == pytest.approx(3.0)
    assert values["poplar/rank0/compute_time_s"] == pytest.approx(2.0)
    assert values["poplar/rank0/wait_time_s"] == pytest.approx(1.0)
    assert values["poplar/mfu"] == pytest.approx(64 / 6.0 * 6000 / 1e9)
    assert line["emulated"] is True
    assert line["ranks"][0]["rank"] == 0


def test_one_warning_per_change() -> None:
    cluster = profile(0.1)
    plan = find_plan(cluster, global_batch_size=4, zero_stage=0)
    watch = watching(cluster, PoplarConfig(replan_threshold=0.9))
    assert watch.look(plan) is None
    watch.record(record(1.0, 0.4))
    assert watch.look(plan) is None
    assert watching(None).look(plan) is None


def test_history_lines(tmp_path: Path) -> None:
    append_history(tmp_path, {"version": 1, "step": 1})
    append_history(tmp_path, event_line(step=2, kind="replan", text="t", rank=1))
    lines = [json.loads(line) for line in (tmp_path / "poplar_history.jsonl").read_text().splitlines()]
    assert lines[1] == {"version": 1, "step": 2, "event": {"kind": "replan", "text": "t", "rank": 1}}
