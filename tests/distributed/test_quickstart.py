"""The quick start, shortened: what it prints, and the comparison it makes. Its speeds are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.scripts import load_script
from tests.data_folder import data_folder

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600


QUICKSTART = load_script("quickstart")


@pytest.mark.parametrize(("slowdown", "ideal"), [((1.0, 3.0), 2.0), ((1.0, 1.0), 1.0), ((1.0, 1.5, 4.0), 23 / 9)])
def test_the_ideal_is_all_ranks_at_their_own_speed(slowdown: tuple[float, ...], ideal: float) -> None:
    assert QUICKSTART.ideal_speedup(slowdown) == pytest.approx(ideal)


def a_run(losses: dict[int, float]) -> object:
    return QUICKSTART.Run(losses=losses, samples_per_s=1.0, zero_stage=1, micro_batch_sizes=[[1], [1]])


def test_the_loss_difference_is_the_largest_and_infinite_when_steps_are_missing() -> None:
    run = a_run({5: 3.0, 10: 2.0})
    assert QUICKSTART.loss_difference(run, a_run({5: 3.0, 10: 2.25})) == 0.25
    assert QUICKSTART.loss_difference(run, a_run({5: 3.0})) == float("inf")
    assert QUICKSTART.loss_difference(a_run({}), a_run({})) == float("inf")


@pytest.mark.scenario(44)
def test_the_quick_start_compares_two_runs_of_the_same_training(tmp_path: Path) -> None:
    folder = data_folder()
    environment = {**os.environ, "POPLAR_CONFIG": "not used"}
    if folder is not None:
        environment["POPLAR_DATA_DIR"] = str(folder / "wikitext-2")
    result = subprocess.run(
        [sys.executable, "scripts/quickstart.py", "--steps", "3", "--turns", "1", "--output_dir", str(tmp_path)],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    figures = json.loads(result.stdout.splitlines()[-1])
    assert set(figures) == {
        "even_samples_per_s",
        "poplar_samples_per_s",
        "speedup",
        "ideal_speedup",
        "max_loss_difference",
        "zero_stage",
        "emulated",
    }
    assert figures["emulated"] is True
    assert figures["ideal_speedup"] == 2.0
    assert figures["max_loss_difference"] < 1e-4
    assert figures["speedup"] == pytest.approx(
        figures["poplar_samples_per_s"] / figures["even_samples_per_s"], abs=1e-3
    )
    even, poplar = (json.loads((tmp_path / name / "poplar_plan.json").read_text()) for name in ("even", "poplar"))
    assert [rank["micro_batch_sizes"] for rank in even["ranks"]] == [[16], [16]]
    assert even["global_batch_size"] == poplar["global_batch_size"] == 32
    assert "samples/s (emulated)" in result.stdout


def test_a_folder_without_text_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPLAR_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--output_dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"no valid\.txt and no test\.txt in it"):
        QUICKSTART.main()


def test_a_failed_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(QUICKSTART.subprocess, "run", lambda *args, **kwargs: failing)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--output_dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"the training failed \(exit code 3\)"):
        QUICKSTART.main()
