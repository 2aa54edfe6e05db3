"""What every test process is given: no network, one compute thread, no compiler unless it asks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# One half of the tests that start ranks, by the time they take; the other half is all others in distributed/.
ONE_HALF = {
    "test_bench_throughput_run.py",
    "test_examples.py",
    "test_finetuning.py",
    "test_launch.py",
    "test_multi_host.py",
    "test_plain_loop.py",
    "test_profile_command.py",
    "test_quickstart.py",
    "test_readme.py",
    "test_streaming.py",
    "test_verify.py",
}

# Set before any test imports torch or a hub client; processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# DeepSpeed compiles its Muon optimizer when it makes any engine: the import of the compiler alone takes seconds in every
# rank. Tests of compiled models take the switch away.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ.pop("POPLAR_CONFIG", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in parallel, two start ranks at a time at most: each of them takes two cores."""
    from xdist.scheduler import LoadFileScheduling

    class FewRanksAtATime(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.split("::", 1)[0])
            if path.name in ONE_HALF:
                return "one half"
            return "the other" if path.parent.name == "distributed" else str(path)

    return FewRanksAtATime(config, log)
