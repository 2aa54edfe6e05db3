"""The rows and tables of the benchmark on unequal lengths; the runs themselves need a quiet machine."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.core.scripts import load_script

BENCH = load_script("bench_lengths")
RANK = load_script("bench_lengths_rank")


def test_lengths_are_log_normal_within_the_limits() -> None:
    lengths = np.array(BENCH.row_lengths(4000))
    assert lengths.min() >= 16
    assert lengths.max() <= 512
    assert np.median(lengths) == pytest.approx(96, rel=0.1)
    assert np.log(lengths).std() > 0.6
    assert lengths.tolist() == BENCH.row_lengths(4000)


def test_rows_are_the_text_cut_into_those_lengths() -> None:
    rows, source = BENCH.make_rows(None, 50)
    assert "generated text" in source
    assert [len(row) for row in rows] == BENCH.row_lengths(50)
    assert max(map(max, rows)) < BENCH.VOCABULARY


def way(speed: float) -> dict[str, object]:
    return {"tokens_per_s": speed, "padding_share": 0.25, "idle_share": 0.5, "loss_difference": 1e-6, "rounds": []}


def test_the_table_and_the_last_line_say_emulated_and_compare_with_the_rivals() -> None:
    speeds = (400.0, 500.0, 800.0, 1400.0)
    result = {
        "zero_stage": 1,
        "slowdown": [1.0, 3.0],
        "global_batch_size": 64,
        "mean_length": 120.0,
        "text": "some text",
        "ways": {name: way(speed) for name, speed in zip(BENCH.WAYS, speeds, strict=True)},
    }
    text = BENCH.table_of(result)
    assert text.startswith("emulated: ranks slowed 1 : 3; tiny llama, ZeRO stage 1, 64 rows of 16 to 512 tokens")
    ours = next(line for line in text.splitlines() if line.startswith(BENCH.OURS))
    assert ours.split()[1:] == ["1400", "3.50x", "1.75x", "25.0%", "50.0%", "1.0e-06"]
    summary = json.loads(json.dumps(BENCH.summary_of(result)))
    assert summary["emulated"] is True
    assert summary["ideal"] == pytest.approx(2.0)
    assert summary["speedup_to_batch_rebalance"] == pytest.approx(1.75)


def test_figures_count_real_tokens_once_and_the_idle_rank() -> None:
    bench = RANK.Bench.__new__(RANK.Bench)
    bench.rows = [{"input_ids": [1] * length, "row": number} for number, length in enumerate((10, 20, 30))]
    fast, slow = RANK.Notes(), RANK.Notes()
    for notes, rows, padded, seconds in ((fast, [2, 1], 60, 1.0), (slow, [0, 1], 20, 3.0)):
        for step in range(RANK.WARM_UP + 2):
            notes.begin_step()
            notes.samples[-1] += rows
            notes.padded_tokens[-1] += padded
            notes.compute_s[-1] += seconds
            notes.ends.append(float(2 * step))
    figures = bench.figures([fast, slow])
    assert figures == {
        "tokens_per_s": pytest.approx(120 / 4),
        "padding_share": pytest.approx(1 - 120 / 160),
        "idle_share": pytest.approx(1 - 2 / 3),
    }
