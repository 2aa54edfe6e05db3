"""Batches of the run's own data, for profiling and for ghost micro-batches, that leave no trace in the data order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .errors import DataError
from .rng import preserved_rng

SCAN_LIMIT_S = 2.0
"""Longest time spent looking for the longest row, in seconds."""
SCAN_LIMIT_ROWS = 20_000
GHOST_TRIES = 64


class ProbeData:
    """Rows of a map-style dataset, collated as in training.

    Args:
        dataset: The training dataset.
        collate: The run's collate function.

    Raises:
        DataError: The dataset is empty.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        if len(dataset) == 0:
            raise DataError("the training dataset is empty: there is nothing to train on.")
        self.dataset = dataset
        self.collate = collate
        self._ends: tuple[Any, Any] | None = None

    def rows(self, count: int, *, start: int = 0) -> Any:
        """A collated batch of `count` rows of the dataset from `start` on, repeating them where there are fewer."""
        with preserved_rng():
            return self.collate([self.dataset[index % len(self.dataset)] for index in range(start, start + count)])

    def longest(self, count: int) -> Any:
        """A collated batch of `count` copies of the longest row found, the most a micro-batch of that size can need."""
        with preserved_rng():
            _, longest = self._shortest_and_longest()
            return self.collate([_copied(longest) for _ in range(count)])

    def shortest(self) -> Any:
        """A collated batch of the shortest row found; None where, once collated, none has fewer tokens than the longest."""
        with preserved_rng():
            shortest, longest = (self.collate([_copied(row)]) for row in self._shortest_and_longest())
        return shortest if 0 < sequence_length(shortest) < sequence_length(longest) else None

    def ghost(self, counts: Callable[[Any], int]) -> Any:
        """A collated batch of one row that has something to learn from, to be run with weight 0.

        Args:
            counts: Items of a collated batch.
        """
        with preserved_rng():
            for index in range(min(GHOST_TRIES, len(self.dataset))):
                batch = self.collate([self.dataset[index]])
                if counts(batch) > 0:
                    return batch
            return self.collate([self.dataset[0]])

    def _shortest_and_longest(self) -> tuple[Any, Any]:
        """Of the rows that can be looked at in reasonable time, empty ones aside; looked for once."""
        if self._ends is None:
            deadline = time.monotonic() + SCAN_LIMIT_S
            shortest = longest = self.dataset[0]
            least, most = math.inf, 0
            for index in range(min(len(self.dataset), SCAN_LIMIT_ROWS)):
                row = self.dataset[index]
                length = row_length(row)
                if length > most:
                    longest, most = row, length
                if 0 < length < least:
                    shortest, least = row, length
                if time.monotonic() > deadline:
                    break
            self._ends = shortest, longest
        return self._ends


def row_length(row: Any) -> int:
    """Length of a row's longest sequence (0 where it has none)."""
    values = row.values() if isinstance(row, Mapping) else row if isinstance(row, (list, tuple)) else [row]
    lengths = [0]
    for value in values:
        if isinstance(value, torch.Tensor):
            lengths.append(value.shape[0] if value.dim() else 0)
        elif hasattr(value, "__len__") and not isinstance(value, str):
            lengths.append(len(value))
    return max(lengths)


def sequence_length(batch: Any) -> int:
    """Tokens per row of a collated batch: the second dimension of its `input_ids`; 0 where there are none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.dim() > 1 else 0


def _copied(row: Any) -> Any:
    # Collate functions may take keys out of the rows they are given.
    return dict(row) if isinstance(row, Mapping) else row
