"""Whether a run's rows differ in length, and the cutter that then shares out every optimizer step by predicted time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .curve import StepTimeCurve
from .lengths import Cut, IntArray, LengthCutter, token_cost
from .probe_data import ProbeData, sequence_length
from .rng import preserved_rng
from .run import PoplarRun

LEAST_VARIATION = 1.25
"""Longest row over the mean from which on lengths count; below, cutting by rows is as good."""
SCAN_LIMIT_S = 5.0
"""Longest time spent on looking at every row, in seconds."""
TOKENS = "input_ids"


@dataclass(frozen=True)
class IndexCutter:
    """Cuts the samples of a step, given by dataset index."""

    cutter: LengthCutter
    """Knows the ranks' costs."""
    lengths: IntArray
    """Tokens of every row of the dataset."""

    def __call__(self, indices: IntArray) -> Cut:
        """Positions in `indices`, by rank and micro-step."""
        return self.cutter.cut(self.lengths[indices])


def index_cutter(
    run: PoplarRun, *, dataset: Any, collate: Callable[[list[Any]], Any], column: str | None = None
) -> IndexCutter | None:
    """A cutter for a map-style dataset; None where rows are alike or were not profiled. A collective call.

    Args:
        run: With its plan and profile.
        dataset: Map-style.
        collate: The run's collate function.
        column: Column that holds the rows' lengths, if there is one.
    """
    if not _plans_by_time(run):
        return None
    lengths = run.ranks.broadcast(known_lengths(dataset, column=column) if run.ranks.rank == 0 else None)
    if lengths is None:
        return None
    cutter = _cutter(run, lengths, ProbeData(dataset, collate).longest, _shortest(dataset, lengths), collate)
    return None if cutter is None else IndexCutter(cutter, lengths)


@dataclass(frozen=True)
class RowCutter:
    """Cuts the samples of a step, given as rows."""

    cutter: LengthCutter
    """Knows the ranks' costs."""

    def __call__(self, rows: list[Any]) -> Cut:
        """Positions in `rows`, by rank and micro-step."""
        return self.cutter.cut([row_tokens(row) or 1 for row in rows])


def stream_cutter(run: PoplarRun, *, rows: list[Any], collate: Callable[[list[Any]], Any]) -> RowCutter | None:
    """A cutter for a stream whose first rows are given; None where they are alike or were not profiled."""
    if not _plans_by_time(run):
        return None
    lengths = run.ranks.broadcast(_scanned(rows) if run.ranks.rank == 0 else None)
    if lengths is None:
        return None
    cutter = _cutter(run, lengths, ProbeData(rows, collate).longest, _shortest(rows, lengths), collate)
    return None if cutter is None else RowCutter(cutter)


def _plans_by_time(run: PoplarRun) -> bool:
    return run.profile is not None and run.plan is not None and run.plan.strategy == "optimal"


def _shortest(dataset: Any, lengths: IntArray) -> Any:
    return dataset[int(np.argmin(np.where(lengths > 0, lengths, np.iinfo(np.int64).max)))]


def _cutter(
    run: PoplarRun,
    lengths: IntArray,
    longest: Callable[[int], Any],
    shortest: Any,
    collate: Callable[[list[Any]], Any],
) -> LengthCutter | None:
    with preserved_rng():
        most = sequence_length(longest(1))
        least = sequence_length(collate([dict(shortest) if isinstance(shortest, Mapping) else shortest]))
    most, least = run.ranks.broadcast((most, least))
    varied = float(lengths.max()) >= LEAST_VARIATION * float(lengths.mean())
    if not varied or not 0 < least < most:
        # Rows are alike, or the collate function pads them all to one length anyway.
        return None
    run.say(
        f"rows of {int(lengths.min())} to {int(lengths.max())} tokens, {float(lengths.mean()):.0f} on average: every "
        "optimizer step is cut by predicted time and tokens, not by rows"
    )
    return cutter_for(run, reference_length=most)


def cutter_for(run: PoplarRun, *, reference_length: int) -> LengthCutter:
    """A cutter from the run's profile, the same on every rank; a collective call.

    Args:
        run: With its plan and profile.
        reference_length: Tokens of the rows the profile was taken with.
    """
    plan, profile = run.plan, run.profile
    stage = profile.stage(plan.zero_stage)
    shortest = getattr(profile, "shortest", ()) or (None,) * profile.world_size
    costs = [
        token_cost(
            StepTimeCurve.fit(rank.points, max_micro_batch_size=cap).times().tolist(),
            max_micro_batch_size=cap,
            reference_length=reference_length,
            overhead_s=rank.step_overhead_s,
            shortest=None if row is None else (row.tokens, row.step_time_s),
        )
        for rank, cap, row in zip(profile.ranks, stage.max_micro_batch_size, shortest, strict=True)
    ]
    return LengthCutter(
        run.ranks.broadcast(costs),
        zero_stage=plan.zero_stage,
        per_micro_step_ns=round(run.ranks.broadcast(stage.per_micro_step_s) * 1e9),
    )


def known_lengths(dataset: Any, *, column: str | None = None) -> IntArray | None:
    """Tokens of every row, shape (rows,); None where they cannot be known in reasonable time.

    Args:
        dataset: Map-style.
        column: Column that holds them, if the dataset has it.
    """
    import datasets

    if isinstance(dataset, datasets.Dataset):
        if column in dataset.column_names:
            return np.asarray(dataset[column], dtype=np.int64)
        if TOKENS in dataset.column_names:
            import pyarrow.compute as compute

            ids = dataset.select_columns([TOKENS]).with_format("arrow")[:][TOKENS]
            return compute.list_value_length(ids).to_numpy().astype(np.int64)
    return _scanned(dataset)


def _scanned(dataset: Any) -> IntArray | None:
    deadline = time.monotonic() + SCAN_LIMIT_S
    lengths = np.zeros(len(dataset), dtype=np.int64)
    with preserved_rng():
        for index in range(len(dataset)):
            found = row_tokens(dataset[index])
            if found is None or time.monotonic() > deadline:
                return None
            lengths[index] = found
    return lengths


def row_tokens(row: Any) -> int | None:
    """Tokens of a row; None where it has none."""
    ids = row.get(TOKENS) if isinstance(row, Mapping) else None
    return len(ids) if ids is not None and hasattr(ids, "__len__") else None
