"""What `bench_throughput.py` concludes from its steps, and where it needs more of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_poplar.steady import standard_error

EVEN = "even (Trainer)"
GOALS = {0: 0.95, 1: 0.95, 2: 0.90, 3: 0.90}
"""Share of the bound that `optimal` is to reach, by ZeRO stage."""
NOISE = 0.02
"""A rival that is faster by less is not ahead, nor one that is faster by less than twice the standard error of the comparison."""
CLEAR = 3.0
"""Standard errors between a figure and the limit it is judged by, on either side, beyond which no more steps are needed."""
FEW = 12
"""Fewer steps do not call a figure clear by their own spread where it is close: what falls on one run, such as where its
memory lies, falls on all of its steps."""
CLOSE = 0.05
"""Distance from the limit, on either side, within which a figure of few steps is close."""


def paired_ratios(rival: Sequence[float], best: Sequence[float]) -> list[float]:
    """How many times as fast as `best` a rival is, step by step: plans take turns, so what disturbs one disturbs the other.

    Args:
        rival: Its share of the bound in every step.
        best: The same of `optimal`, which may have gone on after the rival's comparison was clear.
    """
    return [theirs / own for theirs, own in zip(rival, best, strict=False)]


def near(values: Sequence[float], limit: float) -> bool:
    """True where the median of `values` may as well be on the other side of `limit`."""
    margin = CLEAR * standard_error(values)
    if len(values) < FEW:
        margin = max(margin, CLOSE)
    return abs(statistics.median(values) / limit - 1.0) <= margin


def undecided(shares: Mapping[str, Sequence[float]], best: str, zero_stage: int) -> list[str]:
    """The plans that further steps are needed of, in the order of `shares`.

    Args:
        shares: Share of the bound in every step, by the plan's name.
        best: The name `optimal` was run under.
        zero_stage: ZeRO stage, which sets the goal.
    """
    close = {
        name for name, own in shares.items() if name != best and near(paired_ratios(own, shares[best]), 1.0 + NOISE)
    }
    if close or near(shares[best], GOALS[zero_stage]):
        close.add(best)
    return [name for name in shares if name in close]


def shortfalls(result: Mapping[str, Any]) -> list[str]:
    """Where `optimal` is below its share of the bound, behind a rival, or changes the loss; of one model at one stage."""
    strategies = result["strategies"]
    where = f"{result['title']}; {result['model']}, ZeRO stage {result['zero_stage']}"
    best = strategies.get("optimal")
    if best is None:
        return [f"{where}: optimal has no plan"]
    share = best["samples_per_s"] / result["bound_samples_per_s"]
    goal = GOALS[result["zero_stage"]]
    problems = [f"{where}: {share:.3f} of the bound, the goal is {goal}"] if share < goal else []
    for name, found in strategies.items():
        ratios = paired_ratios(found["shares_of_bound"], best["shares_of_bound"])
        ahead = statistics.median(ratios)
        if ahead > 1.0 + max(NOISE, 2.0 * standard_error(ratios)):
            problems.append(f"{where}: {name} is {ahead:.2f}x as fast as optimal")
        if not found["loss_difference"] < 1e-4:
            problems.append(f"{where}: {name} changes the loss by {found['loss_difference']:.1e}")
    return problems
