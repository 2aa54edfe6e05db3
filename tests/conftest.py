"""What every test process is given: no network, one compute thread."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# Tests that start a script on ranks of its own; those that run a suite on ranks are all others in distributed/.
LAUNCHES = {
    "test_bench_throughput_run.py",
    "test_examples.py",
    "test_launch.py",
    "test_multi_host.py",
    "test_profile_command.py",
    "test_quickstart.py",
    "test_readme.py",
    "test_verify.py",
}

# Set before any test imports torch or a hub client; processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("POPLAR_CONFIG", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in parallel, two start ranks at a time at most: each of them takes two cores."""
    from xdist.scheduler import LoadFileScheduling

    class FewRanksAtATime(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.split("::", 1)[0])
            if path.name in LAUNCHES:
                return "launches"
            return "suites" if path.parent.name == "distributed" else str(path)

    return FewRanksAtATime(config, log)
