"""What every test process is given: no network, one compute thread."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
STARTS_RANKS = ("test_readme.py", "test_launch.py")

# Set before any test imports torch or a hub client; processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("POPLAR_CONFIG", None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in parallel, those that start ranks run one after the other: each of them takes all cores."""
    for item in items:
        path = item.path.relative_to(ROOT)
        alone = path.parts[0] == "distributed" or path.name in STARTS_RANKS
        item.add_marker(pytest.mark.xdist_group("ranks" if alone else str(path)))
