"""The largest micro-batch every rank should have room for, when memory for state and for activations can be traded.

A rank that runs larger micro-batches has less room for state, so others must hold more. With w_i(c) the share of the
state that rank i gives up to run micro-batches of c samples, caps c_i are possible while sum_i w_i(c_i) <= budget.

- ZeRO-1 (ranks do not wait in micro-steps): bisect on the step time; within a time each rank offers (samples, w)
  options, and a knapsack gives the least w for the global batch. Exact.
- ZeRO-2/3 (lock-step): branch and bound over the caps. Larger caps never cost time, so the step with every open rank's
  cap at its largest is a bound. Exact unless the search is cut short, which is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .curve import FloatArray, StepTimeCurve
from .search_local import least_times
from .search_lockstep import candidates, cheapest_cover
from .state_memory import TOLERANCE
from .step_model import RankType

CostFunction = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, kw_only=True)
class TradeType:
    """Ranks that the search cannot tell apart."""

    ranks: tuple[int, ...]
    """Global ranks."""
    times: FloatArray
    """Seconds per micro-batch, index = samples, up to the largest that fits at all."""
    given_up: FloatArray
    """Share of the state that is given up for room for that micro-batch; [0] = 0, not decreasing; as `times`."""
    step_overhead_s: float
    """Seconds a step costs each of these ranks once."""


@dataclass(frozen=True, kw_only=True)
class FoundCaps:
    """What a search found."""

    caps: dict[int, int]
    """Rank -> largest micro-batch, in samples."""
    proven: bool
    """True: no other caps lead to a shorter step."""


# ---- ZeRO-1 -------------------------------------------------------------------------------------------------------


def local_caps(types: Sequence[TradeType], global_batch_size: int, budget: float) -> FoundCaps | None:
    """Caps with the least time of the last rank to finish; None when no rank has room for a sample.

    Args:
        types: All ranks.
        global_batch_size: Samples to give out.
        budget: Most that all ranks together may give up, as a share of the state.
    """
    menus = [_menu(kind, global_batch_size) for kind in types]
    finishes = np.unique(np.concatenate([menu.finish[:, 1:].ravel() for menu in menus]))
    finishes = finishes[np.isfinite(finishes)]
    if not finishes.size or _caps_within(types, menus, finishes[-1], global_batch_size, budget) is None:
        return None
    low, high = 0, finishes.size - 1
    while low < high:
        middle = (low + high) // 2
        found = _caps_within(types, menus, finishes[middle], global_batch_size, budget)
        low, high = (low, middle) if found is not None else (middle + 1, high)
    caps = _caps_within(types, menus, finishes[low], global_batch_size, budget)
    return None if caps is None else FoundCaps(caps=caps, proven=True)


@dataclass(frozen=True, kw_only=True)
class _Menu:
    """What one rank of a type can do with each cap that is worth having."""

    caps: tuple[int, ...]
    """Caps; the first is 0."""
    given_up: FloatArray
    """Share given up for each."""
    finish: FloatArray
    """Row per cap: seconds until 0, 1, ..., n samples are done, the overhead included."""


def _menu(kind: TradeType, global_batch_size: int) -> _Menu:
    largest = min(kind.times.size - 1, global_batch_size)
    nothing = np.full(global_batch_size + 1, np.inf)
    nothing[0] = 0.0
    caps, rows = [0], [nothing]
    for cap in range(1, largest + 1):
        row = least_times(kind.times[: cap + 1], global_batch_size)
        if np.any(row < rows[-1]):
            caps.append(cap)
            rows.append(row)
    return _Menu(caps=tuple(caps), given_up=kind.given_up[caps], finish=np.stack(rows) + kind.step_overhead_s)


def _caps_within(
    types: Sequence[TradeType], menus: Sequence[_Menu], seconds: float, need: int, budget: float
) -> dict[int, int] | None:
    """Caps with which `need` samples are done in time at the least share given up; None when none do."""
    least = np.full(need + 1, np.inf)
    least[0] = 0.0
    chosen: list[tuple[int, _Menu, np.ndarray[tuple[int], np.dtype[np.int64]], list[int]]] = []
    for kind, menu in zip(types, menus, strict=True):
        done = [min(need, int(np.searchsorted(row, seconds, side="right")) - 1) for row in menu.finish]
        samples = [max(0, count) for count in done]
        for rank in kind.ranks:
            least, pick = _add_rank(least, samples, menu.given_up)
            chosen.append((rank, menu, pick, samples))
    if least[need] > budget + TOLERANCE:
        return None
    caps, left = {}, need
    for rank, menu, pick, samples in reversed(chosen):
        option = int(pick[left])
        caps[rank] = menu.caps[option]
        left = max(0, left - samples[option])
    return caps


def _add_rank(
    least: FloatArray, samples: Sequence[int], given_up: FloatArray
) -> tuple[FloatArray, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Least share given up for at least 0, 1, ..., n samples with one rank more, and that rank's option for each."""
    best = least.copy()
    pick = np.zeros(least.size, dtype=np.int64)
    for option, (count, price) in enumerate(zip(samples, given_up, strict=True)):
        if count == 0:
            continue
        shifted = np.full(least.size, least[0])
        shifted[count:] = least[: least.size - count]
        shifted += price
        better = shifted < best
        best[better] = shifted[better]
        pick[better] = option
    return best, pick


# ---- ZeRO-2 and ZeRO-3 --------------------------------------------------------------------------------------------


def lockstep_caps(
    types: Sequence[TradeType],
    global_batch_size: int,
    budget: float,
    cost: CostFunction,
    *,
    most_looks: int = 2000,
) -> FoundCaps | None:
    """Caps with the least total cost of all micro-steps; None when no rank has room for a sample.

    Args:
        types: All ranks.
        global_batch_size: Samples to give out.
        budget: Most that all ranks together may give up, as a share of the state.
        cost: Seconds of micro-steps, given the slowest rank's compute seconds; must not decrease.
        most_looks: Caps whose step time is computed before the search is cut short.
    """
    search = _Branching(types, global_batch_size, budget, cost, most_looks)
    for caps in _likely_caps(types, global_batch_size, budget, cost):
        search.offer(caps)
    search.branch([], 0.0)
    if search.best_caps is None:
        return None
    ranks = [rank for kind in types for rank in kind.ranks]
    return FoundCaps(caps=dict(zip(ranks, search.best_caps, strict=True)), proven=search.looks <= most_looks)


class _Branching:
    """Depth-first over the ranks, type by type; ranks of one type have caps in decreasing order."""

    def __init__(
        self, types: Sequence[TradeType], need: int, budget: float, cost: CostFunction, most_looks: int
    ) -> None:
        self.order = [kind for kind in types for _ in kind.ranks]
        self.types = types
        self.need, self.budget, self.cost, self.most_looks = need, budget, cost, most_looks
        self.looks = 0
        self.best = np.inf
        self.best_caps: list[int] | None = None
        self._known: dict[tuple[int, ...], float] = {}

    def offer(self, caps: list[int]) -> None:
        """Consider caps that are within the budget."""
        seconds = self.seconds(caps)
        if seconds < self.best:
            self.best, self.best_caps = seconds, caps

    def branch(self, caps: list[int], used: float) -> None:
        """Try all caps of the remaining ranks that may lead to a shorter step."""
        if self.looks > self.most_looks:
            return
        rank = len(caps)
        if rank == len(self.order):
            self.offer(list(caps))
            return
        hopeful = caps + [self._largest(kind, used) for kind in self.order[rank:]]
        if self.seconds(hopeful) >= self.best:
            return
        kind = self.order[rank]
        largest = self._largest(kind, used)
        if rank > 0 and self.order[rank - 1] is kind:
            largest = min(largest, caps[-1])
        # The last rank gains nothing by a smaller cap.
        lowest = largest if rank == len(self.order) - 1 else 0
        for cap in range(largest, lowest - 1, -1):
            self.branch([*caps, cap], used + float(kind.given_up[cap]))

    def _largest(self, kind: TradeType, used: float) -> int:
        within = np.searchsorted(kind.given_up, self.budget - used + TOLERANCE, side="right")
        return min(self.need, max(0, int(within) - 1))

    def seconds(self, caps: Sequence[int]) -> float:
        """Cost of all micro-steps with these caps."""
        key = tuple(caps)
        if key not in self._known:
            self.looks += 1
            self._known[key] = _cover_seconds(self.types, caps, self.need, self.cost)
        return self._known[key]


def _cover_seconds(types: Sequence[TradeType], caps: Sequence[int], need: int, cost: CostFunction) -> float:
    capped: dict[tuple[int, int], int] = {}
    position = 0
    for number, kind in enumerate(types):
        for _ in kind.ranks:
            capped[number, caps[position]] = capped.get((number, caps[position]), 0) + 1
            position += 1
    if not any(cap for _, cap in capped):
        return float("inf")
    curves = [
        RankType(
            ranks=tuple(range(count)),
            curve=StepTimeCurve(types[number].times[: cap + 1]),
            step_overhead_s=0.0,
            peak_flops=0.0,
        )
        for (number, cap), count in capped.items()
    ]
    found = candidates(curves, need, cost)
    return float(sum(found.cost[index] for index in cheapest_cover(found.capacity, found.cost, need)))


def _likely_caps(
    types: Sequence[TradeType], need: int, budget: float, cost: CostFunction, *, most: int = 24
) -> Iterator[list[int]]:
    """For the best lengths of a micro-step, the caps with which it holds most samples."""
    lengths = np.unique(np.concatenate([kind.times[1:] for kind in types]))
    found: list[tuple[float, list[int]]] = []
    for seconds, price in zip(lengths, cost(lengths), strict=True):
        caps, samples = _fullest(types, float(seconds), need, budget)
        if samples:
            found.append((float(price) * max(1.0, need / samples), caps))
    for _, caps in sorted(found, key=lambda entry: entry[0])[:most]:
        yield caps


def _fullest(types: Sequence[TradeType], seconds: float, need: int, budget: float) -> tuple[list[int], int]:
    """Caps within the budget with which one micro-step of a length holds most samples, and how many."""
    least = np.full(need + 1, np.inf)
    least[0] = 0.0
    picks: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for kind in types:
        largest = min(need, int(np.searchsorted(kind.times, seconds, side="right")) - 1)
        for _ in kind.ranks:
            least, pick = _add_rank(least, range(largest + 1), kind.given_up[: largest + 1])
            picks.append(pick)
    samples = int(np.flatnonzero(least <= budget + TOLERANCE)[-1])
    caps, left = [], samples
    for pick in reversed(picks):
        caps.append(int(pick[left]))
        left = max(0, left - caps[-1])
    return caps[::-1], samples
