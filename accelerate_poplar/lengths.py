"""Rows of unequal length: cut the samples of one optimizer step by predicted time and tokens.

A micro-batch of r rows is padded to its longest one, of L tokens, and costs what r * L tokens cost on the rank's curve;
it fits where r * L tokens fit. The samples of the step are given, so the cut decides only who computes what. Sorted by
length, neighbours share a micro-batch, which keeps padding low; the boundaries are where the ranks' predicted times are
equal.

All arithmetic is in whole numbers, so that every rank finds the same cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import PlanError
from .plan import LOCK_STEP_STAGES

IntArray = NDArray[np.int64]
Cut = tuple[tuple[tuple[int, ...], ...], ...]
"""Positions within the step, by rank and micro-step; an empty micro-step has weight 0."""

_BISECTIONS = 12
_CANDIDATES = 16
_TOLERANCE = 200
"""The search for a step time stops when it is known to one part in so many."""


@dataclass(frozen=True)
class TokenCost:
    """What micro-batches cost on one rank."""

    times_ns: tuple[int, ...]
    """Nanoseconds for 0, 1, 2, ... rows of the reference length, not decreasing; the first is the cost of a micro-step
    as such. The last entry is the most the rank can hold."""
    reference_length: int
    """Tokens of the rows that `times_ns` was measured with; at least 1."""
    overhead_ns: int = 0
    """Nanoseconds of the rank's part of the optimizer step."""

    @property
    def max_tokens(self) -> int:
        """Most tokens, padding included, of one micro-batch."""
        return (len(self.times_ns) - 1) * self.reference_length

    def time_ns(self, tokens: IntArray) -> IntArray:
        """Nanoseconds of micro-batches with that many tokens, padding included; linear between measured sizes."""
        table = np.asarray(self.times_ns, dtype=np.int64)
        rows, rest = np.divmod(tokens, self.reference_length)
        rows = np.minimum(rows, len(table) - 1)
        after = table[np.minimum(rows + 1, len(table) - 1)]
        found = table[rows] + (after - table[rows]) * rest // self.reference_length
        return np.where(tokens > 0, found, 0)

    def one_time_ns(self, tokens: int) -> int:
        """`time_ns` of a single micro-batch."""
        if tokens <= 0:
            return 0
        last = len(self.times_ns) - 1
        rows, rest = divmod(tokens, self.reference_length)
        rows = min(rows, last)
        return self.times_ns[rows] + (self.times_ns[min(rows + 1, last)] - self.times_ns[rows]) * rest // (
            self.reference_length
        )

    def most_rows(self, length: int, time_ns: int) -> int:
        """Most rows of a length that fit and take no longer than `time_ns`."""
        fit, too_many = 0, self.max_tokens // length + 1
        while too_many - fit > 1:
            middle = (fit + too_many) // 2
            if self.one_time_ns(middle * length) <= time_ns:
                fit = middle
            else:
                too_many = middle
        return fit


def token_cost(
    times_s: Sequence[float],
    *,
    max_micro_batch_size: int,
    reference_length: int,
    overhead_s: float = 0.0,
    shortest: tuple[int, float] | None = None,
) -> TokenCost:
    """From a step-time curve to the cost of tokens.

    Args:
        times_s: Seconds for 0, 1, 2, ... rows of the reference length.
        max_micro_batch_size: Most such rows the rank can hold.
        reference_length: Tokens of those rows.
        overhead_s: Seconds of the rank's part of the optimizer step.
        shortest: Tokens of one of the shortest rows, and seconds of a micro-batch of it; None = not measured. What a micro-step
            costs however little is in it is where the line through it and one row of the reference length meets zero tokens.
            Otherwise the line through one and two rows must do, whose small difference noise may hide.
    """
    table = [round(seconds * 1e9) for seconds in times_s[: max_micro_batch_size + 1]]
    if len(table) > 1 and shortest is not None and 0 < shortest[0] < reference_length:
        tokens, nanoseconds = shortest[0], round(shortest[1] * 1e9)
        rest = reference_length - tokens
        table[0] = min(table[1], max(0, (nanoseconds * reference_length - table[1] * tokens) // rest))
    elif len(table) > 2:
        table[0] = max(0, 2 * table[1] - table[2])
    for index in range(1, len(table)):
        table[index] = max(table[index], table[index - 1])
    return TokenCost(tuple(table), reference_length, round(overhead_s * 1e9))


class LengthCutter:
    """Cuts optimizer steps by predicted time.

    Args:
        costs: One per rank.
        zero_stage: At 2 and 3 all ranks run equally many micro-steps.
        per_micro_step_ns: Nanoseconds of communication in every micro-step.

    Raises:
        PlanError: No rank can hold anything.
    """

    def __init__(self, costs: Sequence[TokenCost], *, zero_stage: int, per_micro_step_ns: int = 0) -> None:
        if not any(cost.max_tokens for cost in costs):
            raise PlanError("no rank can hold a single sample.")
        self.costs = tuple(costs)
        self.zero_stage = zero_stage
        self.per_micro_step_ns = per_micro_step_ns
        # Ranks that hold most come first: they get the longest rows, which others may not hold at all.
        self._order = sorted(range(len(costs)), key=lambda rank: (-costs[rank].max_tokens, rank))

    def cut(self, lengths: Sequence[int] | IntArray) -> Cut:
        """Share out the samples of one step.

        Args:
            lengths: Tokens of each sample, at least 1 sample.

        Returns:
            Positions in `lengths`, each exactly once.

        Raises:
            PlanError: A sample is longer than any rank can hold.
        """
        given = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
        longest_first = np.argsort(-given, kind="stable")
        ordered = given[longest_first]
        room = max(cost.max_tokens for cost in self.costs)
        if ordered[0] > room:
            raise PlanError(
                f"a sample of {int(ordered[0])} tokens fits no rank: the most that any can hold is {room} tokens, as "
                "measured with the longest row found before training. Shorten the rows, or lower their number that is "
                "known to fit by raising memory_fraction."
            )
        local = self.zero_stage not in LOCK_STEP_STAGES
        pieces = self._cut_local(ordered) if local else self._cut_in_step(ordered)
        return tuple(
            tuple(tuple(int(longest_first[i]) for i in range(start, stop)) for start, stop in own) for own in pieces
        )

    # ---- ZeRO-0/1: every rank its own micro-steps ---------------------------------------------------------------

    def _cut_local(self, ordered: IntArray) -> list[list[tuple[int, int]]]:
        low, high = 0, self._hopeful_ns(ordered)
        best = self._fill(ordered, high)
        while best is None:
            low, high = high, 2 * high
            best = self._fill(ordered, high)
        for _ in range(_BISECTIONS):
            if high - low <= max(1, high // _TOLERANCE):
                break
            middle = (low + high) // 2
            found = self._fill(ordered, middle)
            low, high, best = (middle, high, best) if found is None else (low, middle, found)
        return [own or [(0, 0)] for own in best]

    def _hopeful_ns(self, ordered: IntArray) -> int:
        """A step time that is likely enough: the tokens at every rank's best rate, and a third more."""
        rate = sum(cost.max_tokens / max(1, cost.times_ns[-1]) for cost in self.costs if cost.max_tokens)
        overhead = max(cost.overhead_ns for cost in self.costs)
        return int(4 * int(ordered.sum()) / (3 * rate)) + overhead + 1

    def _fill(self, ordered: IntArray, time_ns: int) -> list[list[tuple[int, int]]] | None:
        """Give every rank as many samples as it can run in `time_ns`; None where some are left over."""
        pieces: list[list[tuple[int, int]]] = [[] for _ in self.costs]
        start = 0
        for rank in self._order:
            if start == len(ordered):
                break
            pieces[rank] = self._most(self.costs[rank], ordered, start, time_ns - self.costs[rank].overhead_ns)
            start = pieces[rank][-1][1] if pieces[rank] else start
        return pieces if start == len(ordered) else None

    @staticmethod
    def _most(cost: TokenCost, ordered: IntArray, start: int, time_ns: int) -> list[tuple[int, int]]:
        """Most samples from `start` on that one rank can run in `time_ns`, as micro-batches of neighbours.

        A shortest path: the least time for the first n samples is that for some m of them plus one micro-batch.
        """
        count = len(ordered) - start
        least = np.full(count + 1, np.iinfo(np.int64).max, dtype=np.int64)
        before = np.zeros(count + 1, dtype=np.int64)
        least[0] = 0
        reached = 0
        for first in range(count):
            if first > reached or least[first] > time_ns:
                break
            length = int(ordered[start + first])
            rows = np.arange(1, min(cost.max_tokens // length, count - first) + 1, dtype=np.int64)
            total = least[first] + cost.time_ns(rows * length)
            total = total[: int(np.searchsorted(total, time_ns, side="right"))]
            if not len(total):
                continue
            window = slice(first + 1, first + 1 + len(total))
            better = total < least[window]
            least[window] = np.where(better, total, least[window])
            before[window] = np.where(better, first, before[window])
            reached = max(reached, first + len(total))
        pieces: list[tuple[int, int]] = []
        stop = reached
        while stop > 0:
            pieces.append((start + int(before[stop]), start + stop))
            stop = int(before[stop])
        return pieces[::-1]

    # ---- ZeRO-2/3: micro-steps that all ranks run together ------------------------------------------------------

    def _cut_in_step(self, ordered: IntArray) -> list[list[tuple[int, int]]]:
        longest = int(ordered[0])
        low = min(cost.one_time_ns(longest) for cost in self.costs if cost.max_tokens >= longest)
        high = max(low, *(cost.times_ns[-1] for cost in self.costs))
        ratio = (high / low) ** (1.0 / _CANDIDATES) if low else 2.0
        candidates = sorted({low, high, *(int(low * ratio**k) for k in range(1, _CANDIDATES))})
        found = [(time_ns, self._columns(ordered, time_ns)) for time_ns in candidates]
        best_time, best = min(found, key=lambda pair: (self._cost_ns(ordered, pair[1]), pair[0]))
        # As many micro-steps, but as short as they can be: the last one is rarely full.
        below = [time_ns for time_ns, columns in found if time_ns < best_time and len(columns) > len(best)]
        low, high = max(below, default=0), best_time
        for _ in range(_BISECTIONS):
            if high - low <= max(1, high // _TOLERANCE):
                break
            middle = (low + high) // 2
            columns = self._columns(ordered, middle) if middle >= candidates[0] else []
            if columns and len(columns) <= len(best):
                high = middle
                if self._cost_ns(ordered, columns) <= self._cost_ns(ordered, best):
                    best = columns
            else:
                low = middle
        return [[column[rank] for column in best] for rank in range(len(self.costs))]

    def _columns(self, ordered: IntArray, time_ns: int) -> list[list[tuple[int, int]]]:
        """Micro-steps in which every rank takes what it can run in `time_ns`, the longest samples first."""
        columns: list[list[tuple[int, int]]] = []
        start = 0
        while start < len(ordered):
            column = [(0, 0)] * len(self.costs)
            first = start
            for rank in self._order:
                if start == len(ordered):
                    break
                rows = self.costs[rank].most_rows(int(ordered[start]), time_ns)
                stop = min(len(ordered), start + rows)
                column[rank], start = (start, stop), stop
            if start == first:
                rank = self._order[0]
                column[rank], start = (start, start + 1), start + 1
            columns.append(column)
        return columns

    def _cost_ns(self, ordered: IntArray, columns: list[list[tuple[int, int]]]) -> int:
        """Predicted time of all micro-steps."""
        total = 0
        for column in columns:
            tokens = [(stop - start) * int(ordered[start]) if stop > start else 0 for start, stop in column]
            times = [cost.one_time_ns(count) for cost, count in zip(self.costs, tokens, strict=True)]
            total += max(times) + self.per_micro_step_ns
        return total


def predicted_ns(cutter: LengthCutter, lengths: Sequence[int] | IntArray, cut: Cut) -> tuple[int, ...]:
    """Predicted compute time of each rank in one step, in nanoseconds.

    Args:
        cutter: Knows the costs.
        lengths: Tokens of each sample of the step.
        cut: Positions by rank and micro-step.
    """
    given = np.asarray(lengths, dtype=np.int64)
    found = []
    for cost, own in zip(cutter.costs, cut, strict=True):
        tokens = np.asarray([len(rows) * int(given[list(rows)].max()) for rows in own if rows], dtype=np.int64)
        found.append(int(cost.time_ns(tokens).sum()) + cost.overhead_ns if len(tokens) else 0)
    return tuple(found)
