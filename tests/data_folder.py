"""Where the data that is not part of the repository lies, if it is there at all."""

from __future__ import annotations

from pathlib import Path


def data_folder() -> Path | None:
    """The folder with `wikitext-2/` and `gpu_latencies.json`: `shared/data` beside the repository or above it."""
    root = Path(__file__).resolve().parent.parent
    for parent in (root, *root.parents):
        candidate = parent / "shared" / "data"
        if candidate.is_dir():
            return candidate
    return None
