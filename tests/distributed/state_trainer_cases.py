"""The cases of the suite of trainers on uneven state; importable without torch."""

from __future__ import annotations

CASES = (
    *(f"same_as_even-zero{stage}" for stage in (1, 2, 3)),
    *(f"resume-zero{stage}" for stage in (2, 3)),
    "other_shares_refused",
    "plain_loop",
    "automatic",
    "zero_init",
    *(f"offload-zero{stage}" for stage in (1, 3)),
    "offload_automatic",
)
