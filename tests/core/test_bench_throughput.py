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
        "| model | ZeRO stage | even (Trainer) | proportional | optimal | ± | optimal to even | loss difference |"
    )
    assert rule == "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert rows == [
        "| tiny llama | 1 | 0.480 | 0.940 | 0.960 | 0.010 | 2.00x | 1.0e-06 |",
        "| tiny llama | 2 | 0.480 | - | 0.910 | 0.009 | 1.90x | 1.0e-06 |",
    ]


def test_a_model_that_optimal_cannot_train_is_said_to_be_missed() -> None:
    found = result(optimal=96.0)
    del found["strategies"]["optimal"]
    assert (
        BENCH.summary_of([found], markdown=True).splitlines()[-1]
        == "| tiny llama | 1 | 0.480 | 0.940 | - | - | 1.0e-06 |"
    )
    assert "ZeRO stage 1: optimal has no plan" in BENCH.shortfalls(found)[0]


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
        (1, "the ranks of 'emulated: ranks slowed 2 : 6' failed with exit code 1"),
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
    problems = BENCH.shortfalls(found)
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


def test_too_few_steps_to_compare_losses_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_throughput.py", "--steps", "1"])
    with pytest.raises(SystemExit):
        BENCH.parse_arguments()
    assert "--steps must be at least 2" in capsys.readouterr().err


def test_a_step_is_set_against_what_the_ranks_did_around_it() -> None:
    step = RANK.TimedStep(2.0, before=[10.0, 4.0], after=[10.0, 2.0])
    assert step.own_speeds == pytest.approx([10.0, 3.0])


def test_a_rival_is_ahead_only_by_more_than_what_steps_differ_by() -> None:
    found = result(optimal=91.0, stage=2)
    assert "proportional is 1.03x as fast as optimal" in BENCH.shortfalls(found)[0]
    found["strategies"]["proportional"]["shares_of_bound"] = [0.86, 0.98, 0.90, 0.98]
    assert BENCH.shortfalls(found) == []


def test_plans_take_turns_step_by_step() -> None:
    changes = []

    class Sampler:
        def set_plan(self, plan: str, *, from_step: int) -> None:
            changes.append((from_step, plan))

    loader = argparse.Namespace(plan_sampler=Sampler())
    RANK.Turns(["flops", "optimal"], 5).on_train_begin(None, None, None, train_dataloader=loader)
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
