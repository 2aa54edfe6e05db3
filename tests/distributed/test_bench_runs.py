"""The benchmarks that start ranks run from end to end, on little work; what they find is for quiet machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RUNS = {
    "bench_state.py": ("--only", "exchange", "--mib", "1", "--rounds", "1"),
}
SHOWS = {
    "bench_state.py": ("gather", "reduce", "ratio"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", RUNS)
def test_it_prints_its_table(script: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *RUNS[script]],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert all(word in run.stdout for word in SHOWS[script]), run.stdout
