"""What every test process is given: no network, one compute thread."""

from __future__ import annotations

import os

# Set before any test imports torch or a hub client; processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("POPLAR_CONFIG", None)
