"""Whether another plan would be faster, judged from what the ranks really took."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Plan
from .profiles import ClusterProfile
from .search import STRATEGIES, find_plan
from .step_model import break_down_plan

NOTICEABLE_DRIFT = 0.1
"""A rank whose own time differs by less from its profile counts as unchanged."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a look at the measured times found."""

    drift: tuple[float, ...]
    """Measured over profiled compute time, per rank; 1 = as profiled."""
    slowest_drift_rank: int
    """The rank whose own time grew most against its profile."""
    current_step_time_s: float
    """Step time of the present plan with the drift applied, in seconds."""
    better: Plan
    """The best plan with the drift applied."""

    @property
    def gain(self) -> float:
        """Relative saving of `better` against the present plan, 0 to 1."""
        return max(0.0, 1.0 - self.better.predicted_step_time_s / self.current_step_time_s)

    @property
    def straggler(self) -> bool:
        """True when a rank has become noticeably slower than the others, each against its own profile."""
        typical = statistics.median(self.drift)
        return self.drift[self.slowest_drift_rank] > typical * (1.0 + NOTICEABLE_DRIFT)

    def describe(self) -> str:
        """One sentence with the rank and the figures."""
        rank = self.slowest_drift_rank
        changed = f"rank {rank} takes {self.drift[rank]:.2f}x the time it was profiled at"
        if self.gain <= 0.0:
            return f"{changed}; no other plan would be faster"
        return (
            f"{changed}; another plan would take {self.better.predicted_step_time_s:.3g} s a step instead of "
            f"{self.current_step_time_s:.3g} s ({self.gain:.0%} less)"
        )


def judge(profile: ClusterProfile, plan: Plan, compute_time_s: Sequence[float]) -> Verdict:
    """Compare measured compute times with the profile and plan again at the same ZeRO stage and global batch.

    The ranks' shares of the training state stay as they are: moving it would mean another engine.

    Args:
        profile: What the plan was made from.
        plan: The plan in force.
        compute_time_s: Measured seconds of forward and backward of one full optimizer step, per rank.
    """
    expected = break_down_plan(profile, plan).compute_time_s
    drift = tuple(
        measured / wanted if wanted > 0.0 and measured > 0.0 else 1.0
        for measured, wanted in zip(compute_time_s, expected, strict=True)
    )
    drifted = scaled(profile, drift)
    strategy = plan.strategy if plan.strategy in STRATEGIES else "optimal"
    return Verdict(
        drift=drift,
        slowest_drift_rank=max(range(len(drift)), key=lambda rank: (drift[rank], -rank)),
        current_step_time_s=break_down_plan(drifted, plan).step_time_s,
        better=find_plan(
            drifted, global_batch_size=plan.global_batch_size, zero_stage=plan.zero_stage, strategy=strategy
        ).with_state(plan.state_fractions, plan.offloading_ranks),
    )


def scaled(profile: ClusterProfile, factors: Sequence[float]) -> ClusterProfile:
    """The profile with every rank's times multiplied by its factor."""
    ranks = tuple(
        dataclasses.replace(
            rank, points=tuple(dataclasses.replace(p, step_time_s=p.step_time_s * factor) for p in rank.points)
        )
        for rank, factor in zip(profile.ranks, factors, strict=True)
    )
    return dataclasses.replace(profile, ranks=ranks)
