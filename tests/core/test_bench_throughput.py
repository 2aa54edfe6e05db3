"""The throughput benchmark's judgement and tables; the runs themselves need a quiet machine."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.core.scripts import load_script

JUDGE = load_script("bench_throughput_judge")
CLOCK = load_script("bench_throughput_clock")
BENCH = load_script("bench_throughput")
RANK = load_script("bench_throughput_rank")


def result(*, optimal: float, stage: int = 1, loss_difference: float = 1e-6) -> dict[str, Any]:
    def strategy(speed: float, same_as: str = "") -> dict[str, Any]:
        return {
            "samples_per_s": speed,
            "standard_error": 0.01,
            "shares_of_bound": [speed / 100.0 + noise for noise in (-0.002, 0.001, 0.0, 0.0)],
            "loss_difference": loss_difference,
            "micro_batch_sizes": [[12], [2, 2]],
            "same_as": same_as,
        }

    return {
        "title": "emulated: ranks slowed 1 : 3",
        "model": "tiny llama",
        "zero_stage": stage,
        "bound_samples_per_s": 100.0,
        "strategies": {
            "even (Trainer)": strategy(48.0),
            "proportional": strategy(94.0),
            "optimal": strategy(optimal, "proportional" if optimal == 94.0 else ""),
        },
    }


def test_the_table_has_ratios_the_bound_and_the_word_emulated() -> None:
    text = BENCH.table_of(result(optimal=96.0), markdown=False)
    assert text.startswith("emulated: ranks slowed 1 : 3; tiny llama, ZeRO stage 1")
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "2.00x" in rows["optimal"]
    assert "0.960" in rows["optimal"]
    assert "12 / 2 x 2" in rows["optimal"]
    assert "2.08x" in rows["bound"]


def test_the_markdown_table_is_one() -> None:
    lines = BENCH.table_of(result(optimal=94.0), markdown=True).splitlines()
    assert lines[0].startswith("**emulated")
    assert len({line.count("|") for line in lines[2:]}) == 1
    assert "(as proportional)" in lines[-2]


def test_the_summary_has_one_row_per_stage_and_a_dash_where_a_strategy_has_no_plan() -> None:
    without = result(optimal=91.0, stage=2)
    del without["strategies"]["proportional"]
    text = BENCH.summary_of([result(optimal=96.0), without], markdown=True)
    header, rule, *rows = text.splitlines()[2:]
    assert header == (
        "| model | ZeRO stage | even (Trainer) | proportional | optimal | ± | steps | optimal to even | loss difference |"
    )
    assert rule == "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert rows == [
        "| tiny llama | 1 | 0.480 | 0.940 | 0.960 | 0.010 | 4 | 2.00x | 1.0e-06 |",
        "| tiny llama | 2 | 0.480 | - | 0.910 | 0.009 | 4 | 1.90x | 1.0e-06 |",
    ]


def test_a_model_that_optimal_cannot_train_is_said_to_be_missed() -> None:
    found = result(optimal=96.0)
    del found["strategies"]["optimal"]
    assert (
        BENCH.summary_of([found], markdown=True).splitlines()[-1]
        == "| tiny llama | 1 | 0.480 | 0.940 | - | - | - | 1.0e-06 |"
    )
    assert "ZeRO stage 1: optimal has no plan" in JUDGE.shortfalls(found)[0]


def test_earlier_figures_are_shown_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps([result(optimal=91.0)]))
    monkeypatch.setattr(sys, "argv", ["bench_throughput.py", "--show", str(figures), "--check"])
    monkeypatch.setattr(BENCH, "measure", None)
    assert BENCH.main() == 1
    printed = capsys.readouterr().out
    assert "emulated: ranks slowed 1 : 3; share of the bound" in printed
    assert "missed: emulated: ranks slowed 1 : 3; tiny llama, ZeRO stage 1: 0.910 of the bound" in printed
    figures.write_text("{")
    with pytest.raises(SystemExit, match=r"--show .*figures.json: Expecting"):
        BENCH.main()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (1, "the ranks of 'emulated: ranks slowed 8 : 24' failed with exit code 1"),
        (subprocess.TimeoutExpired("ranks", 5.0), "was not done within --timeout_s 5"),
        (KeyboardInterrupt(), "was interrupted"),
    ],
)
def test_what_was_measured_is_not_lost_when_a_run_breaks_off(
    end: int | BaseException,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        Path(command[-1]).write_text(json.dumps([result(optimal=96.0)]))
        if isinstance(end, BaseException):
            raise end
        return subprocess.CompletedProcess(command, end)

    kept = tmp_path / "kept.json"
    options = ["--imbalance", "emulated", "--timeout_s", "5", "--json", str(kept)]
    monkeypatch.setattr(sys, "argv", ["bench_throughput.py", *options])
    monkeypatch.setattr(BENCH.subprocess, "run", run)
    with pytest.raises(SystemExit, match=reason):
        BENCH.main()
    assert "0.960" in capsys.readouterr().out
    assert json.loads(kept.read_text()) == [result(optimal=96.0)]


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (result(optimal=96.0), []),
        (result(optimal=94.0), ["0.940 of the bound, the goal is 0.95"]),
        (result(optimal=91.0, stage=2), ["proportional is 1.03x as fast as optimal"]),
        (result(optimal=94.0, stage=3), []),
        (result(optimal=96.0, loss_difference=1e-3), ["changes the loss by 1.0e-03"]),
        (result(optimal=96.0, loss_difference=float("nan")), ["changes the loss by nan"]),
    ],
)
def test_what_misses_its_goal_is_named(found: dict[str, Any], missed: list[str]) -> None:
    problems = JUDGE.shortfalls(found)
    assert bool(problems) is bool(missed)
    for words in missed:
        assert any(words in problem for problem in problems)


def test_the_settings_of_this_machine_are_found() -> None:
    args = argparse.Namespace(imbalance=["emulated"], slowdown="1,1.5,4")
    (setting,) = BENCH.settings_of(args)
    assert setting.ranks == 3
    assert setting.slowdown == (1.0, 1.5, 4.0)
    assert len(setting.cores) == 3
    assert "emulated" in setting.title


@pytest.mark.parametrize(("options", "rows"), [([], 64), (["--per_rank_samples", "256"], 256)])
def test_the_rows_of_a_step_are_those_of_the_setting_unless_given(
    options: list[str], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        jobs.append(json.loads(command[-2]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(sys, "argv", ["bench_throughput.py", "--imbalance", "emulated", *options])
    monkeypatch.setattr(BENCH.subprocess, "run", run)
    assert BENCH.main() == 0
    assert [(job["per_rank_samples"], job["slowdown"]) for job in jobs] == [(rows, [8.0, 24.0])]


@pytest.mark.parametrize(
    ("options", "problem"), [(["--per_rank_samples", "0"], "--per_rank_samples"), (["--rounds", "0"], "--rounds")]
)
def test_counts_below_one_are_refused(
    options: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_throughput.py", *options])
    with pytest.raises(SystemExit):
        BENCH.parse_arguments()
    assert f"{problem} must be at least 1" in capsys.readouterr().err


def test_too_few_steps_to_compare_losses_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_throughput.py", "--steps", "1"])
    with pytest.raises(SystemExit):
        BENCH.parse_arguments()
    assert "--steps must be at least 2" in capsys.readouterr().err


def test_a_step_is_set_against_what_the_ranks_did_around_it() -> None:
    step = CLOCK.TimedStep(2.0, before=[10.0, 4.0], after=[10.0, 2.0])
    assert step.own_speeds == pytest.approx([10.0, 3.0])


def test_a_rival_is_ahead_only_by_more_than_what_steps_differ_by() -> None:
    found = result(optimal=91.0, stage=2)
    assert "proportional is 1.03x as fast as optimal" in JUDGE.shortfalls(found)[0]
    found["strategies"]["proportional"]["shares_of_bound"] = [0.86, 0.98, 0.90, 0.98]
    assert JUDGE.shortfalls(found) == []


@pytest.mark.parametrize(
    ("optimal", "rival", "stage", "names"),
    [
        # Far above the goal, and the rival is behind.
        ([0.97, 0.98, 0.99], [0.90, 0.91, 0.92], 3, []),
        # Behind, but not clearly by less than 2%: either may be true.
        ([0.95, 0.97, 0.99], [0.97, 0.96, 1.02], 3, ["poplar", "optimal"]),
        # A rival that is ahead, but not clearly by more than 2%.
        ([0.95, 0.96, 0.97], [0.97, 1.00, 0.99], 3, ["poplar", "optimal"]),
        # Clearly ahead: more steps would not change it.
        ([0.95, 0.95, 0.96], [1.05, 1.05, 1.06], 3, []),
        # Just above the goal, and just below.
        ([0.94, 0.96, 0.98], [0.80, 0.80, 0.80], 0, ["optimal"]),
        ([0.92, 0.94, 0.96], [0.80, 0.80, 0.80], 0, ["optimal"]),
        ([0.80, 0.80, 0.81], [0.70, 0.70, 0.70], 0, []),
    ],
)
def test_more_steps_are_measured_where_they_could_change_the_judgement(
    optimal: list[float], rival: list[float], stage: int, names: list[str]
) -> None:
    assert JUDGE.undecided({"poplar": rival, "optimal": optimal}, "optimal", stage) == names


@pytest.mark.parametrize("rival", [1.04, 0.98])
def test_few_steps_that_agree_are_not_clear_where_they_are_close_to_the_limit(rival: float) -> None:
    for steps, clear in ((6, False), (11, False), (12, True)):
        shares = {"poplar": [rival * 0.98] * steps, "optimal": [0.98] * steps}
        assert JUDGE.undecided(shares, "optimal", 3) == ([] if clear else ["poplar", "optimal"])


def test_a_comparison_that_is_clear_keeps_the_steps_it_had() -> None:
    assert JUDGE.paired_ratios([0.9, 0.8], [1.0, 1.0, 0.5]) == pytest.approx([0.9, 0.8])


def test_plans_that_cannot_be_told_apart_are_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = object.__new__(RANK.Bench)
    bench.job, bench.rank, bench.global_batch_size = {"rounds": 3}, 1, 100
    seconds = {"even": 2.0, "flops": 1.5, "poplar": 1.0, "optimal": 1.0}
    asked = []

    def train(_model: str, _stage: int, _rows: list[Any], _profile: None, plans: list[str]) -> tuple[list[Any], list]:
        asked.append(plans)
        turns = plans or ["even"]
        order = turns * 3
        noise = [1.0] * len(turns) + [0.9] * len(turns) + [1.1] * len(turns)
        steps = [CLOCK.TimedStep(seconds[n] * f, [100.0], [100.0]) for n, f in zip(order, noise, strict=True)]
        return steps, [float(step) for step in range(len(order))]

    monkeypatch.setattr(bench, "train", train)
    plans = {"flops": "flops", "poplar": "poplar", "optimal": "optimal"}
    steps, losses = bench.measure("llama", 2, [], None, plans, "optimal")
    # The rival and `optimal` differ by nothing at all, but these are few steps; `flops` is far behind.
    assert asked == [[], ["flops", "poplar", "optimal"], ["poplar", "optimal"], ["poplar", "optimal"]]
    assert [len(steps[name]) for name in ("even (Trainer)", "flops", "poplar", "optimal")] == [3, 3, 9, 9]
    assert losses["flops"] == [(0.0, 0.0)]
    assert losses["poplar"] == [(1.0, 1.0)] + 2 * [(0.0, 0.0), (2.0, 2.0)]
    assert losses["optimal"] == [(2.0, 2.0)] + 2 * [(1.0, 1.0)]


def test_plans_take_turns_step_by_step() -> None:
    changes = []

    class Sampler:
        def set_plan(self, plan: str, *, from_step: int) -> None:
            changes.append((from_step, plan))

    loader = argparse.Namespace(plan_sampler=Sampler())
    CLOCK.Turns(["flops", "optimal"], 5).on_train_begin(None, None, None, train_dataloader=loader)
    assert changes == [(0, "flops"), (1, "optimal"), (2, "flops"), (3, "optimal"), (4, "flops")]


def test_plans_that_differ_by_single_samples_are_run_once() -> None:
    plan = [[768, 422], [557], [0]]
    assert RANK.as_good_as(plan, plan)
    assert RANK.as_good_as(plan, [[768, 423], [556], [0]])
    assert not RANK.as_good_as(plan, [[768, 430], [549], [0]])
    assert not RANK.as_good_as(plan, [[595, 595], [557], [0]])
    assert not RANK.as_good_as(plan, [[768, 422], [278, 279], [0]])
    assert not RANK.as_good_as([[2, 1]], [[1, 2]])
    assert not RANK.as_good_as([[1, 0]], [[1, 1]])
