"""Shares of the training state and micro-batches decided together.

State is decoupled from compute (the idea of Cephalo, ICS 2025): a rank's share of the state follows the memory it can
spare, its share of the batch follows its speed. Uneven exchanges cost a little more than even ones, so even shares win
wherever memory does not bind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .curve import StepTimeCurve
from .errors import InsufficientMemoryError, PlanError, ProfileError, raise_together
from .plan import LOCK_STEP_STAGES, Plan
from .profiles import ClusterProfile
from .search import check_request, find_plan
from .state_layout import StateShares
from .state_memory import TOLERANCE, StateMemory, fractions_for, smallest_share
from .state_search import FoundCaps, TradeType, local_caps, lockstep_caps
from .step_model import micro_step_cost
from .units import gib

COMMUNICATION_FACTOR = 1.25
"""Time of uneven exchanges over that of even ones, until it is measured."""


@dataclass(frozen=True, kw_only=True)
class StatePlan:
    """A plan and the shares of the training state it needs."""

    plan: Plan
    """Micro-batches and shares; its predicted step time counts what uneven exchanges cost more."""
    max_micro_batch_size: tuple[int, ...]
    """Largest micro-batch each rank has room for beside its share, in samples."""
    held_bytes: tuple[float, ...]
    """Sharded state per rank under the plan, in bytes; what is offloaded not counted."""
    even_bytes: tuple[float, ...]
    """The same under even shares without offload."""
    proven: bool
    """True: no shares and micro-batches have a shorter step under the step-time model."""
    profile: ClusterProfile
    """The profile with the limits and communication times that hold under these shares."""

    @property
    def fractions(self) -> tuple[float, ...] | None:
        """Share of the state per rank; None: even shares."""
        return self.plan.state_fractions


def find_state_plan(
    profile: ClusterProfile,
    memory: Sequence[StateMemory],
    *,
    global_batch_size: int,
    zero_stage: int,
    strategy: str = "optimal",
    max_micro_batch_size: Sequence[int] | None = None,
    communication_factor: float = COMMUNICATION_FACTOR,
    offloaded: Sequence[StateMemory] | None = None,
) -> StatePlan:
    """Choose shares of the state and micro-batches together.

    Shares are even unless uneven ones make the step shorter. With the strategy `optimal` the choice is exact (see
    `state_search`); other strategies divide the batch in their own way among the same ranks.

    Args:
        profile: What was measured; its stage's own limits do not count, they are for even shares.
        memory: One entry per rank.
        global_batch_size: Samples per optimizer step.
        zero_stage: 1, 2 or 3.
        strategy: As `find_plan`.
        max_micro_batch_size: Limits that have nothing to do with shares, one per rank; None: none.
        communication_factor: Time of uneven exchanges over that of even ones; at least 1.
        offloaded: The figures each rank has when its optimizer is on the host. Used for as few ranks as possible, the
            one with the least room first, and only where the state does not fit otherwise. None: not allowed.

    Raises:
        PlanError: A setting is out of range.
        InsufficientMemoryError: The ranks together cannot hold the state beside one sample each; says what they can.
        ProfileError: The stage was not profiled, or a rank's points cannot be a curve.
    """
    check_request(profile, global_batch_size, zero_stage, strategy, max_micro_batch_size)
    _check_memory(profile, memory, zero_stage, communication_factor)
    request = _Request(
        profile, global_batch_size, zero_stage, strategy, max_micro_batch_size, communication_factor, tuple(memory)
    )
    for figures in _ever_more_offloaded(memory, offloaded):
        plans = [plan for plan in (request.even(figures), request.uneven(figures)) if plan is not None]
        if plans:
            return min(plans, key=lambda found: found.plan.predicted_step_time_s)
    raise InsufficientMemoryError(_does_not_fit(profile, memory, zero_stage, offloaded is not None))


def plan_with_fractions(
    profile: ClusterProfile,
    memory: Sequence[StateMemory],
    fractions: Sequence[float],
    *,
    global_batch_size: int,
    zero_stage: int,
    strategy: str = "optimal",
    max_micro_batch_size: Sequence[int] | None = None,
    communication_factor: float = COMMUNICATION_FACTOR,
    offloaded: Sequence[StateMemory] | None = None,
) -> StatePlan:
    """The best plan under given shares of the state; arguments and errors otherwise as `find_state_plan`.

    Args:
        fractions: One share per rank; each above 0, together 1.
    """
    check_request(profile, global_batch_size, zero_stage, strategy, max_micro_batch_size)
    _check_memory(profile, memory, zero_stage, communication_factor)
    shares = StateShares(fractions=tuple(fractions)).fractions
    if len(shares) != profile.world_size:
        raise PlanError(f"there are {len(shares)} state fractions for {profile.world_size} ranks; give one per rank.")
    request = _Request(
        profile, global_batch_size, zero_stage, strategy, max_micro_batch_size, communication_factor, tuple(memory)
    )
    for figures in _ever_more_offloaded(memory, offloaded):
        found = request.under(figures, shares)
        if found is not None:
            return found
    raise InsufficientMemoryError(
        f"beside shares of {[round(share, 4) for share in shares]} of the training state no rank has room for a "
        f"sample at ZeRO stage {zero_stage}. Give the ranks with little memory smaller shares."
    )


@dataclass(frozen=True)
class _Request:
    profile: ClusterProfile
    global_batch_size: int
    zero_stage: int
    strategy: str
    other_limits: Sequence[int] | None
    factor: float
    before_offload: tuple[StateMemory, ...]

    @property
    def limits(self) -> Sequence[int]:
        """Limits that have nothing to do with shares, one per rank."""
        return self.other_limits or [self.global_batch_size] * self.profile.world_size

    def even(self, memory: Sequence[StateMemory]) -> StatePlan | None:
        """The best plan on even shares."""
        world_size = self.profile.world_size
        if any(own.largest_shares()[0] < 1.0 / world_size - TOLERANCE for own in memory):
            return None
        caps = [own.cap(1.0 / world_size) for own in memory]
        return self._plan(memory, caps, None)

    def under(self, memory: Sequence[StateMemory], shares: Sequence[float]) -> StatePlan | None:
        """The best plan on given shares."""
        if any(own.largest_shares()[0] < share - TOLERANCE for own, share in zip(memory, shares, strict=True)):
            return None
        caps = [own.cap(share) for own, share in zip(memory, shares, strict=True)]
        even = max(shares) - min(shares) <= TOLERANCE
        return self._plan(memory, caps, None if even else tuple(shares))

    def uneven(self, memory: Sequence[StateMemory]) -> StatePlan | None:
        """The best plan on shares that are free."""
        found = self._search(memory)
        if found is None:
            return None
        ranks = range(self.profile.world_size)
        caps = [found.caps[rank] for rank in ranks]
        draft = self._micro_batches(caps, self.factor)
        if draft is None:
            return None
        used = [max(draft[1].ranks[rank].micro_batch_sizes) for rank in ranks]
        fractions = fractions_for(memory, used)
        roomy = [own.cap(share) for own, share in zip(memory, fractions, strict=True)]
        final = self._plan(memory, roomy, fractions)
        return None if final is None else replace(final, proven=found.proven and self.strategy == "optimal")

    def _search(self, memory: Sequence[StateMemory]) -> FoundCaps | None:
        types, budget = self._types(memory)
        if budget < -TOLERANCE:
            return None
        if self.zero_stage not in LOCK_STEP_STAGES:
            return local_caps(types, self.global_batch_size, budget)
        stage = _slower(self.profile, self.zero_stage, self.factor).stage(self.zero_stage)
        return lockstep_caps(types, self.global_batch_size, budget, lambda seconds: micro_step_cost(stage, seconds))

    def _types(self, memory: Sequence[StateMemory]) -> tuple[list[TradeType], float]:
        """Ranks sorted into types, and the share of the state that all together may give up."""
        lowest = smallest_share(self.profile.world_size)
        members: dict[tuple[bytes, bytes, float], TradeType] = {}
        room = 0.0
        for rank, own in zip(self.profile.ranks, memory, strict=True):
            shares = np.minimum(own.largest_shares(), 1.0)
            cap = max(0, int(np.count_nonzero(shares >= lowest)) - 1)
            cap = min(cap, self.limits[rank.rank], self.global_batch_size)
            times = _curve(rank.rank, self.profile, cap).times()
            given_up = shares[0] - shares[: cap + 1]
            room += float(shares[0])
            if shares[0] < lowest:
                return [], -1.0
            key = (times.tobytes(), given_up.tobytes(), rank.step_overhead_s)
            alike = members[key].ranks if key in members else ()
            members[key] = TradeType(
                ranks=(*alike, rank.rank), times=times, given_up=given_up, step_overhead_s=rank.step_overhead_s
            )
        return [members[key] for key in sorted(members)], room - 1.0

    def _micro_batches(self, caps: Sequence[int], factor: float) -> tuple[ClusterProfile, Plan] | None:
        """The best plan within caps, and the profile it holds for; None when no rank has room for a sample."""
        caps = [min(cap, limit) for cap, limit in zip(caps, self.limits, strict=True)]
        if not any(caps):
            return None
        profile = _slower(self.profile, self.zero_stage, factor)
        stage = replace(profile.stage(self.zero_stage), max_micro_batch_size=tuple(caps))
        profile = replace(profile, zero_stages={**profile.zero_stages, self.zero_stage: stage})
        plan = find_plan(
            profile, global_batch_size=self.global_batch_size, zero_stage=self.zero_stage, strategy=self.strategy
        )
        return profile, plan

    def _plan(
        self, memory: Sequence[StateMemory], caps: Sequence[int], fractions: tuple[float, ...] | None
    ) -> StatePlan | None:
        found = self._micro_batches(caps, 1.0 if fractions is None else self.factor)
        if found is None:
            return None
        profile, plan = found
        even = (1.0 / profile.world_size,) * profile.world_size
        plan = plan.with_state(fractions, [rank for rank, own in enumerate(memory) if own.offloaded])
        held = zip(memory, fractions or even, strict=True)
        return StatePlan(
            plan=plan,
            max_micro_batch_size=profile.stage(self.zero_stage).max_micro_batch_size,
            held_bytes=tuple(own.held_bytes(share) for own, share in held),
            even_bytes=tuple(own.held_bytes(share) for own, share in zip(self.before_offload, even, strict=True)),
            proven=self.strategy == "optimal",
            profile=profile,
        )


def _curve(rank: int, profile: ClusterProfile, cap: int) -> StepTimeCurve:
    try:
        return StepTimeCurve.fit(profile.ranks[rank].points, max_micro_batch_size=cap)
    except ProfileError as problem:
        raise ProfileError(f"rank {rank}: {problem}") from None


def _slower(profile: ClusterProfile, zero_stage: int, factor: float) -> ClusterProfile:
    """The profile with a stage's communication times multiplied."""
    stage = profile.stage(zero_stage)
    slower = replace(stage, per_micro_step_s=stage.per_micro_step_s * factor, per_step_s=stage.per_step_s * factor)
    return replace(profile, zero_stages={**profile.zero_stages, zero_stage: slower})


def _ever_more_offloaded(
    memory: Sequence[StateMemory], offloaded: Sequence[StateMemory] | None
) -> list[list[StateMemory]]:
    figures = [list(memory)]
    if offloaded is None:
        return figures
    for rank in sorted(range(len(memory)), key=lambda r: float(memory[r].largest_shares()[0])):
        more = list(figures[-1])
        more[rank] = replace(offloaded[rank], offloaded=True)
        figures.append(more)
    return figures


def _check_memory(
    profile: ClusterProfile, memory: Sequence[StateMemory], zero_stage: int, communication_factor: float
) -> None:
    problems = []
    if zero_stage not in (1, 2, 3):
        problems.append(f"zero_stage is {zero_stage!r}; shares of the training state exist at ZeRO stage 1, 2 and 3.")
    if len(memory) != profile.world_size:
        problems.append(f"memory has {len(memory)} entries for {profile.world_size} ranks; give one per rank.")
    if not communication_factor >= 1.0:
        problems.append(f"communication_factor is {communication_factor}; it must be at least 1.")
    for rank, own in enumerate(memory):
        if not own.sharded_bytes > 0.0 or not own.activation_bytes or own.activation_bytes[0] != 0.0:
            problems.append(f"rank {rank}: sharded_bytes must be above 0 and activation_bytes begin with 0.")
    raise_together(problems, PlanError)


def _does_not_fit(profile: ClusterProfile, memory: Sequence[StateMemory], zero_stage: int, with_offload: bool) -> str:
    lines = []
    for rank, own in zip(profile.ranks, memory, strict=True):
        left = max(0.0, float(own.largest_shares()[0]) * own.sharded_bytes)
        lines.append(f"rank {rank.rank} ({rank.device or 'device unknown'}) has room for {gib(left, digits=2)} of it")
    more = "" if with_offload else "optimizer offload (state_offload: auto), "
    return (
        f"the training state that ZeRO stage {zero_stage} shards takes {gib(max(m.sharded_bytes for m in memory), digits=2)} over "
        f"all ranks, but beside one sample {'; '.join(lines)}. What helps: "
        f"{more}a higher ZeRO stage, gradient checkpointing, shorter sequences, or more memory."
    )
