"""The benchmark of uneven training state starts its ranks and prints its table; its speeds are not judged here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_exchanges_of_the_state_are_timed_even_and_uneven() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "scripts/bench_state.py", "--only", "exchange", "--mib", "1", "--rounds", "1"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert all(word in run.stdout for word in ("gather", "reduce", "ratio")), run.stdout
