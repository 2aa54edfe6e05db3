from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_poplar.errors import PlanError
from accelerate_poplar.search import find_plan
from accelerate_poplar.timeline import MOST_RANKS, draw_timeline, spans
from tests.core.planner_cases import Case, random_case

SVG_START = b"<?xml"
PNG_START = b"\x89PNG"


def small_case(zero_stage: int) -> Case:
    return Case(
        times=((1.0, 1.5, 2.0), (2.0, 3.0, 4.0)),
        caps=(3, 2),
        global_batch_size=8,
        zero_stage=zero_stage,
        overheads=(0.2, 0.1),
        per_micro_step_s=1.0,
        per_step_s=0.5,
        overlap=0.25,
    )


@given(st.integers(0, 2**32), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_bars_of_a_rank_follow_each_other_without_gaps_to_the_end_of_the_step(seed: int, zero_stage: int) -> None:
    import random

    case = random_case(random.Random(seed), zero_stage)
    profile = case.profile()
    plan = find_plan(profile, global_batch_size=case.global_batch_size, zero_stage=zero_stage)
    for rank in range(len(case.times)):
        own = sorted((s for s in spans(profile, plan) if s.rank == rank), key=lambda span: span.start_s)
        end = 0.0
        for span in own:
            assert span.start_s == pytest.approx(end, abs=1e-6 * plan.predicted_step_time_s)
            end = span.start_s + span.length_s
        assert end == pytest.approx(plan.predicted_step_time_s)
        assert sum(span.samples for span in own) == plan.ranks[rank].rank_batch_size


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize(("ending", "start"), [("svg", SVG_START), ("png", PNG_START)])
def test_even_above_and_optimal_below_in_one_picture(
    tmp_path: Path, zero_stage: int, ending: str, start: bytes
) -> None:
    case = small_case(zero_stage)
    profile = case.profile()
    plans = {
        name: find_plan(profile, global_batch_size=8, zero_stage=zero_stage, strategy=name)
        for name in ("even", "optimal")
    }
    path = tmp_path / f"step.{ending}"
    figure = draw_timeline(profile, plans, title="two ranks", path=path)
    assert path.read_bytes().startswith(start)
    upper, lower = figure.axes
    assert upper.get_title(loc="left").startswith("even: ")
    assert lower.get_title(loc="left").startswith("optimal: ")
    assert [label.get_text() for label in lower.get_yticklabels()] == ["rank 0  d", "rank 1  d"]
    assert {text.get_text() for text in figure.legends[0].get_texts()} <= {
        "forward and backward",
        "waiting",
        "communication not hidden",
        "optimizer",
    }


def test_of_many_ranks_some_of_every_kind_are_drawn() -> None:
    case = Case(times=((1.0,),) * 40 + ((2.0,),) * 40, caps=(1,) * 80, global_batch_size=80, zero_stage=0)
    profile = case.profile()
    figure = draw_timeline(profile, {"optimal": find_plan(profile, global_batch_size=80, zero_stage=0)})
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == MOST_RANKS
    assert {"rank 0  d", "rank 40  d"} <= set(labels)


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(PlanError, match="no plan to draw"):
        draw_timeline(small_case(0).profile(), {})
