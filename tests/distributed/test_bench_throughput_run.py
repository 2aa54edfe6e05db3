"""The throughput benchmark from end to end, as small as it goes. Its speeds are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks have to share one of at least two cores")
def test_ranks_that_share_a_core_are_compared_with_the_same_loss(tmp_path: Path) -> None:
    output = tmp_path / "throughput.json"
    result = subprocess.run(
        [
            *(sys.executable, "scripts/bench_throughput.py", "--imbalance", "affinity", "--models", "bert"),
            *("--zero_stages", "2", "--steps", "2", "--rounds", "2", "--per_rank_samples", "2", "--seq_len", "16"),
            *("--own_speed_s", "0.1", "--profile_budget_s", "2", "--json", str(output)),
        ],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert (
        "real imbalance: rank 0 has a core of its own, ranks 1 and 2 share one; tiny bert, ZeRO stage 2"
        in result.stdout
    )
    (found,) = json.loads(output.read_text())
    assert set(found["strategies"]) == {"even (Trainer)", "flops", "proportional", "poplar", "optimal"}
    assert found["emulated"] is False
    assert found["bound_samples_per_s"] == pytest.approx(sum(found["own_samples_per_s"]))
    for strategy in found["strategies"].values():
        assert strategy["loss_difference"] < 1e-4
        assert strategy["samples_per_s"] > 0.0
        assert sum(map(sum, strategy["micro_batch_sizes"])) == 6
