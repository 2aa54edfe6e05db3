"""What to change about a cluster: which ranks to leave out, which ZeRO stage, which card to add.

Each answer is a plan for the changed cluster, compared with the plan for the one at hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .errors import PlanError
from .plan import Plan
from .profiles import ClusterProfile
from .resize import resize
from .search import ZeroStage, find_plan
from .step_model import RankType, group_ranks

WORTH_IT = 0.01
"""Relative gain in throughput from which a change is recommended."""

_EXHAUSTIVE = 200
"""Subsets up to which every combination of counts per type is tried."""

Reshape = Callable[[Sequence[int]], ClusterProfile]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One change and what it gives."""

    label: str
    """What is changed, in words."""
    ranks: tuple[int, ...]
    """Ranks left out, or the rank a new one would be like; empty for another stage."""
    zero_stage: int
    """Stage of the plan behind the figures."""
    step_time_s: float
    """Predicted seconds of one optimizer step, the global batch unchanged."""
    samples_per_s: float
    """Predicted throughput."""
    gain: float
    """Throughput over the throughput now; above 1 is faster."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Changes compared with the cluster as it is, everything predicted."""

    now: Option
    """The cluster as it is."""
    stages: tuple[Option, ...]
    """Every profiled ZeRO stage that has a plan, by number."""
    leave_out: Option | None
    """The best set of ranks to leave out, None when all are worth having."""
    one_more: tuple[Option, ...]
    """One more rank of each kind, in the order of their first ranks."""
    unused_ranks: tuple[int, ...]
    """Ranks without samples in the plan for the cluster as it is."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form with the same fields."""
        return asdict(self)

    def sentences(self) -> tuple[str, ...]:
        """The advice in words, most useful first."""
        lines = []
        if self.leave_out is not None:
            lines.append(
                f"Leave out {_named(self.leave_out.ranks)}: {_change(self.now, self.leave_out)}. More is lost by "
                "waiting and communicating than is gained by computing there."
            )
        elif self.unused_ranks:
            get = "gets" if len(self.unused_ranks) == 1 else "get"
            lines.append(
                f"{_named(self.unused_ranks).capitalize()} {get} no samples: at this global batch the others are done "
                "sooner without that help."
            )
        best = min(self.stages, key=lambda option: option.step_time_s, default=self.now)
        if best.zero_stage != self.now.zero_stage and best.gain > 1.0 + WORTH_IT:
            lines.append(f"Use ZeRO stage {best.zero_stage}: {_change(self.now, best)}.")
        lines.extend(f"{option.label}: {_change(self.now, option)}." for option in self.one_more)
        return tuple(lines)


def advise(
    profile: ClusterProfile,
    *,
    global_batch_size: int,
    zero_stage: ZeroStage,
    strategy: str = "optimal",
    max_micro_batch_size: Sequence[int] | None = None,
    reshape: Reshape | None = None,
) -> Advice:
    """Compare the cluster with smaller and larger ones and with other stages.

    Every subset that differs in the number of ranks per kind is tried where there are at most 200 of them; beyond
    that, ranks are left out kind by kind (one, or all of them) as long as it helps.

    Args:
        profile: The cluster as it is.
        global_batch_size: Samples per optimizer step, the same in every comparison.
        zero_stage: Stage asked for, or "auto"; smaller and larger clusters are planned for the same.
        strategy: As in `find_plan`.
        max_micro_batch_size: Further caps, one per rank.
        reshape: Gives the profile of a list of ranks; None: `resize`, which estimates communication and memory.

    Raises:
        PlanError, ProfileError: As `find_plan`, for the cluster as it is.
    """
    make = reshape or (lambda ranks: resize(profile, ranks))

    def plan(ranks: Sequence[int], stage: ZeroStage) -> Plan | None:
        caps = None if max_micro_batch_size is None else [max_micro_batch_size[rank] for rank in ranks]
        try:
            return find_plan(
                make(ranks),
                global_batch_size=global_batch_size,
                zero_stage=stage,
                strategy=strategy,
                max_micro_batch_size=caps,
            )
        except PlanError:
            return None

    everybody = list(range(profile.world_size))
    current = find_plan(
        profile,
        global_batch_size=global_batch_size,
        zero_stage=zero_stage,
        strategy=strategy,
        max_micro_batch_size=max_micro_batch_size,
    )
    types = group_ranks(profile, profile.stage(current.zero_stage).max_micro_batch_size)
    types = tuple(sorted(types, key=lambda kind: kind.ranks[0]))
    stages = [plan(everybody, stage) for stage in sorted(profile.zero_stages)]
    now = _option("as it is", (), current, current)
    more = [(kind, plan([*everybody, kind.ranks[0]], zero_stage)) for kind in types]
    return Advice(
        now=now,
        stages=tuple(_option(f"ZeRO stage {p.zero_stage}", (), p, current) for p in stages if p is not None),
        leave_out=_best_subset(types, everybody, lambda ranks: plan(ranks, zero_stage), current),
        one_more=tuple(
            _option(
                f"One more {profile.ranks[kind.ranks[0]].device or 'rank'} (like rank {kind.ranks[0]})",
                (kind.ranks[0],),
                p,
                current,
            )
            for kind, p in more
            if p is not None
        ),
        unused_ranks=tuple(r.rank for r in current.ranks if r.rank_batch_size == 0),
    )


def _best_subset(
    types: Sequence[RankType],
    everybody: Sequence[int],
    plan: Callable[[Sequence[int]], Plan | None],
    current: Plan,
) -> Option | None:
    best, best_time = (0,) * len(types), current.predicted_step_time_s
    best_plan = current
    while True:
        start = best
        for dropped in _smaller(types, start):
            kept = _kept(types, everybody, dropped)
            candidate = plan(kept) if kept else None
            # Equal times: the first wins, and subsets come with fewer ranks left out first.
            if candidate is not None and candidate.predicted_step_time_s < best_time * (1.0 - 1e-9):
                best, best_time, best_plan = dropped, candidate.predicted_step_time_s, candidate
        if best == start or _combinations(types) <= _EXHAUSTIVE:
            break
    gain = current.predicted_step_time_s / best_time
    if gain <= 1.0 + WORTH_IT:
        return None
    kept = _kept(types, everybody, best)
    left_out = tuple(rank for rank in everybody if rank not in set(kept))
    return _option(f"without {_named(left_out)}", left_out, best_plan, current)


def _combinations(types: Sequence[RankType]) -> int:
    return math.prod(kind.count + 1 for kind in types)


def _smaller(types: Sequence[RankType], dropped: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of ranks to leave out per type, starting from `dropped`, which is not included."""
    if _combinations(types) <= _EXHAUSTIVE:
        options = itertools.product(*(range(kind.count + 1) for kind in types))
        yield from sorted((option for option in options if any(option)), key=lambda option: (sum(option), option))
        return
    for index, kind in enumerate(types):
        for count in sorted({dropped[index] + 1, kind.count}):
            if dropped[index] < count <= kind.count:
                yield (*dropped[:index], count, *dropped[index + 1 :])


def _kept(types: Sequence[RankType], everybody: Sequence[int], dropped: Sequence[int]) -> list[int]:
    gone = {rank for kind, count in zip(types, dropped, strict=True) for rank in kind.ranks[kind.count - count :]}
    return [rank for rank in everybody if rank not in gone]


def _option(label: str, ranks: tuple[int, ...], plan: Plan, current: Plan) -> Option:
    return Option(
        label=label,
        ranks=ranks,
        zero_stage=plan.zero_stage,
        step_time_s=plan.predicted_step_time_s,
        samples_per_s=plan.global_batch_size / plan.predicted_step_time_s,
        gain=current.predicted_step_time_s / plan.predicted_step_time_s,
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def _change(now: Option, then: Option) -> str:
    percent = 100.0 * (then.gain - 1.0)
    return (
        f"{then.samples_per_s:.4g} instead of {now.samples_per_s:.4g} samples/s ({percent:+.1f}%), "
        f"{then.step_time_s:.4g} s a step"
    )
