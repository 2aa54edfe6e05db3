"""What every test process is given: no network, one compute thread."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

STARTS_RANKS = ("test_readme.py", "test_launch.py")

# Set before any test imports torch or a hub client; processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("POPLAR_CONFIG", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in parallel, those that start ranks run one after the other: each of them takes all cores."""
    from xdist.scheduler import LoadFileScheduling

    class RanksOneAfterTheOther(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.split("::", 1)[0])
            return "ranks" if path.parent.name == "distributed" or path.name in STARTS_RANKS else str(path)

    return RanksOneAfterTheOther(config, log)
