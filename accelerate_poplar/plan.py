"""The decision: which micro-batches every rank runs in one optimizer step, with its rules and its JSON form."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config_checks import SHARE_TOLERANCE
from .errors import PlanError, raise_together
from .profiles import read_json

PLAN_VERSION = 1
PLAN_FILE_NAME = "poplar_plan.json"
LOCK_STEP_STAGES = (2, 3)
"""ZeRO stages that communicate in every micro-step, so that all ranks need equally many."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank's share of an optimizer step."""

    rank: int
    """Global rank, counted from 0."""
    micro_batch_sizes: tuple[int, ...]
    """Samples per micro-step; 0 = the rank only takes part in the collectives, with weight 0."""
    state_fraction: float | None = None
    """Share of the sharded training state this rank holds, above 0; None = an even one, on all ranks or none."""
    offloads_optimizer: bool = False
    """True: this rank keeps its part of the optimizer's state on the host."""

    @property
    def rank_batch_size(self) -> int:
        """Samples this rank runs in one optimizer step."""
        return sum(self.micro_batch_sizes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every rank's share of an optimizer step.

    Raises:
        PlanError: The shares do not sum to `global_batch_size`, a size is negative, ranks are missing or
            repeated, ranks have unequal numbers of micro-steps at a ZeRO stage that cannot have them, or the fractions of
            the training state are not shares of a whole.
    """

    zero_stage: int
    """ZeRO stage the plan is for, 0 to 3."""
    global_batch_size: int
    """Samples per optimizer step over all ranks; at least 1."""
    predicted_step_time_s: float
    """Seconds of one optimizer step under the step-time model; 0 when nothing was profiled."""
    strategy: str
    """Name of the search that made it, or `manual`."""
    ranks: tuple[RankPlan, ...]
    """One entry per rank, in rank order."""

    def __post_init__(self) -> None:
        raise_together(_broken_rules(self), PlanError)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def state_fractions(self) -> tuple[float, ...] | None:
        """Share of the sharded training state per rank, indexed by rank; None: even shares."""
        fractions = [rank.state_fraction for rank in self.ranks]
        return None if None in fractions else tuple(f for f in fractions if f is not None)

    @property
    def offloading_ranks(self) -> tuple[int, ...]:
        """Ranks that keep their part of the optimizer's state on the host."""
        return tuple(rank.rank for rank in self.ranks if rank.offloads_optimizer)

    def with_state(self, fractions: Sequence[float] | None, offloading_ranks: Sequence[int] = ()) -> Plan:
        """The same micro-batches on other shares of the training state.

        Args:
            fractions: One share per rank; None: even ones.
            offloading_ranks: Ranks that keep their part of the optimizer's state on the host.
        """
        shares = (None,) * self.world_size if fractions is None else tuple(fractions)
        ranks = tuple(
            dataclasses.replace(rank, state_fraction=share, offloads_optimizer=rank.rank in offloading_ranks)
            for rank, share in zip(self.ranks, shares, strict=True)
        )
        return dataclasses.replace(self, ranks=ranks)

    @property
    def digest(self) -> str:
        """`sha256:` and a hex digest over what the plan decides; equal plans agree on every machine."""
        decided: dict[str, Any] = {
            "version": PLAN_VERSION,
            "zero_stage": self.zero_stage,
            "global_batch_size": self.global_batch_size,
            "ranks": [[r.rank, list(r.micro_batch_sizes)] for r in self.ranks],
        }
        if self.state_fractions is not None:
            decided["state_fractions"] = list(self.state_fractions)
        if self.offloading_ranks:
            decided["offloading_ranks"] = list(self.offloading_ranks)
        text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, version 1."""
        return {
            "version": PLAN_VERSION,
            "zero_stage": self.zero_stage,
            "global_batch_size": self.global_batch_size,
            "predicted_step_time_s": self.predicted_step_time_s,
            "strategy": self.strategy,
            "ranks": [_rank_to_dict(rank) for rank in self.ranks],
            "digest": self.digest,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "plan") -> Plan:
        """Read the JSON form.

        Raises:
            PlanError: A field is missing or impossible, or the digest does not belong to the plan.
        """
        if not isinstance(data, Mapping) or data.get("version") != PLAN_VERSION:
            version = data.get("version") if isinstance(data, Mapping) else None
            raise PlanError(f"{source}: version is {version!r}, this release reads version {PLAN_VERSION}.")
        try:
            plan = cls(
                zero_stage=int(data["zero_stage"]),
                global_batch_size=int(data["global_batch_size"]),
                predicted_step_time_s=float(data.get("predicted_step_time_s", 0.0)),
                strategy=str(data.get("strategy", "manual")),
                ranks=tuple(_read_rank(r) for r in sorted(data["ranks"], key=lambda item: int(item["rank"]))),
            )
        except KeyError as missing:
            raise PlanError(f"{source}: the field {missing} is missing.") from None
        except (TypeError, ValueError) as problem:
            raise PlanError(f"{source}: {problem}") from None
        recorded = data.get("digest")
        if recorded is not None and recorded != plan.digest:
            raise PlanError(
                f"{source}: the digest {recorded} does not belong to this plan ({plan.digest}). "
                "The file was edited or damaged; remove its `digest` field if the edit was meant."
            )
        return plan

    def save(self, path: str | Path) -> None:
        """Write the JSON form to `path`; a directory gets `poplar_plan.json`."""
        target = Path(path)
        if target.is_dir():
            target = target / PLAN_FILE_NAME
        target.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file, or `poplar_plan.json` in a directory.

        Raises:
            PlanError: The file is missing, is not JSON, or holds a plan that breaks a rule.
        """
        target = Path(path)
        if target.is_dir():
            target = target / PLAN_FILE_NAME
        return cls.from_dict(read_json(target, PlanError), source=str(target))


def _rank_to_dict(rank: RankPlan) -> dict[str, Any]:
    data: dict[str, Any] = {"rank": rank.rank, "micro_batch_sizes": list(rank.micro_batch_sizes)}
    if rank.state_fraction is not None:
        data["state_fraction"] = rank.state_fraction
    return {**data, "offloads_optimizer": True} if rank.offloads_optimizer else data


def _read_rank(data: Mapping[str, Any]) -> RankPlan:
    fraction = data.get("state_fraction")
    return RankPlan(
        rank=int(data["rank"]),
        micro_batch_sizes=tuple(int(size) for size in data["micro_batch_sizes"]),
        state_fraction=None if fraction is None else float(fraction),
        offloads_optimizer=bool(data.get("offloads_optimizer", False)),
    )


def _broken_rules(plan: Plan) -> list[str]:
    problems: list[str] = []
    if plan.zero_stage not in (0, 1, 2, 3):
        problems.append(f"zero_stage is {plan.zero_stage}; it must be 0, 1, 2 or 3.")
    if plan.global_batch_size < 1:
        problems.append(f"global_batch_size is {plan.global_batch_size}; it must be at least 1.")
    if not math.isfinite(plan.predicted_step_time_s) or plan.predicted_step_time_s < 0:
        problems.append(f"predicted_step_time_s is {plan.predicted_step_time_s}; it must be finite, at least 0.")
    if [r.rank for r in plan.ranks] != list(range(len(plan.ranks))) or not plan.ranks:
        problems.append(f"ranks are {[r.rank for r in plan.ranks]}; they must be 0, 1, 2, ... in order.")
    for r in plan.ranks:
        if any(size < 0 for size in r.micro_batch_sizes):
            problems.append(f"rank {r.rank}: micro_batch_sizes {list(r.micro_batch_sizes)} has a negative size.")
        if not r.micro_batch_sizes:
            problems.append(f"rank {r.rank}: has no micro-step; give it [0] to let it only take part.")
    total = sum(r.rank_batch_size for r in plan.ranks)
    if total != plan.global_batch_size:
        problems.append(
            f"the ranks' micro-batches sum to {total} samples, but global_batch_size is {plan.global_batch_size}."
        )
    counts = {r.rank: len(r.micro_batch_sizes) for r in plan.ranks}
    if plan.zero_stage in LOCK_STEP_STAGES and len(set(counts.values())) > 1:
        listing = ", ".join(f"rank {rank} has {count}" for rank, count in counts.items())
        problems.append(
            f"ZeRO stage {plan.zero_stage} communicates in every micro-step, so all ranks need equally many "
            f"micro-steps, but {listing}. Pad the shorter lists with 0."
        )
    if plan.zero_stage == 0 and plan.offloading_ranks:
        problems.append(
            f"ranks {list(plan.offloading_ranks)} offload their optimizer, which DeepSpeed does not do at ZeRO stage 0; use "
            "stage 1, 2 or 3."
        )
    return problems + _broken_fractions(plan)


def _broken_fractions(plan: Plan) -> list[str]:
    fractions = [rank.state_fraction for rank in plan.ranks]
    given = [fraction for fraction in fractions if fraction is not None]
    if not given:
        return []
    if len(given) < len(fractions):
        return [f"state_fraction is {fractions}; all ranks have one, or none has (even shares)."]
    problems = []
    if plan.zero_stage == 0:
        problems.append("ZeRO stage 0 shards no training state, so there is no state_fraction; use stage 1, 2 or 3.")
    if not all(math.isfinite(fraction) and fraction > 0.0 for fraction in given):
        problems.append(f"state_fraction is {fractions}; every rank must hold a share above 0.")
    elif abs(math.fsum(given) - 1.0) > SHARE_TOLERANCE:
        problems.append(f"state_fraction is {fractions}, together {math.fsum(given):.6g}; shares must sum to 1.")
    return problems
