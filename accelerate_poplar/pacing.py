"""Emulated ranks that keep to their profile, as a device of their own would."""

from __future__ import annotations

from typing import Any

from .curve import StepTimeCurve
from .inspection import num_elements
from .loss import rows_of
from .profiles import ClusterProfile


class ProfiledPace:
    """What the profile says of one rank's micro-batches.

    Args:
        profile: The profile.
        zero_stage: Stage of the plan.
        rank: The rank.
        row: A collated batch of one row such as was profiled.
    """

    def __init__(self, profile: ClusterProfile, *, zero_stage: int, rank: int, row: Any) -> None:
        cap = profile.stage(zero_stage).max_micro_batch_size[rank]
        self._times = StepTimeCurve.fit(profile.ranks[rank].points, max_micro_batch_size=cap).times()
        self._row_elements = num_elements(row)

    def seconds(self, batch: Any) -> float | None:
        """Seconds of forward and backward of a micro-batch; None where its rows are not as long as was profiled."""
        rows = rows_of(batch)
        if not 0 < rows < len(self._times) or num_elements(batch) != rows * self._row_elements:
            return None
        return float(self._times[rows])
