"""The planner's benchmark runs, and would notice a rival that is faster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench_planner.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=False,
    )


def test_gains_over_every_rival_are_printed_by_stage() -> None:
    result = bench("--only", "quality", "--every", "100")
    assert result.returncode == 0, result.stderr
    assert "the device table (simulated)" in result.stdout
    assert "`optimal` was never slower than a rival." in result.stdout
    for heading in ("ZeRO stage 0", "ZeRO stage 3", "all stages"):
        assert heading in result.stdout
    for rival in ("poplar", "proportional", "flops", "even"):
        assert result.stdout.count(f"\n{rival} ") == 5


def test_the_clusters_table_in_the_guide_is_what_the_benchmark_prints() -> None:
    result = bench("--only", "clusters")
    assert result.returncode == 0, result.stderr
    guide = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
    rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert len(rows) > 40
    assert [row for row in rows if row not in guide] == []


@pytest.mark.parametrize("arguments", [("--every", "0"), ("--only", "everything")])
def test_wrong_arguments_are_explained(arguments: tuple[str, ...]) -> None:
    result = bench(*arguments)
    assert result.returncode == 2
    assert arguments[0] in result.stderr
