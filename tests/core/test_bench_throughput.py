"""The throughput benchmark's judgement and tables; the runs themselves need a quiet machine."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tests.core.scripts import load_script

BENCH = load_script("bench_throughput")
RANK = load_script("bench_throughput_rank")


def result(*, optimal: float, stage: int = 1, loss_difference: float = 1e-6) -> dict[str, Any]:
    def strategy(speed: float, same_as: str = "") -> dict[str, Any]:
        return {
            "samples_per_s": speed,
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


def test_steps_count_by_how_quiet_the_machine_was_around_them() -> None:
    speeds = RANK.OwnSpeeds()
    steps = []
    for number, (before, after) in enumerate([(1.0, 1.0), (1.0, 0.6), (0.98, 0.97), (0.7, 1.0), (0.96, 1.0)]):
        # The time of a step says nothing about whether it counts.
        steps.append(RANK.TimedStep(float(number), [10.0 * before, 4.0], [10.0, 4.0 * after]))
        speeds.add(steps[-1].before)
        speeds.add(steps[-1].after)
    assert speeds.usual_best() == [10.0, 4.0]
    assert [step.quietness(speeds.usual_best()) for step in steps] == pytest.approx([1.0, 0.6, 0.97, 0.7, 0.96])
    assert speeds.quietest(steps, 3) == [steps[0], steps[2], steps[4]]
    assert speeds.quietest(steps, 9) == steps
    assert steps[1].own_speeds == pytest.approx([10.0, 3.2])
