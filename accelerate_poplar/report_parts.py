"""What the report is put together from: tables, figures, and figures in words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .run_files import Entry
from .text_table import percent


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture and what it shows."""

    svg: str
    """The `svg` element."""
    caption: str
    """A sentence or two."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table whose cells carry their units in the column's title."""

    header: tuple[str, ...]
    """Titles, units included."""
    rows: tuple[tuple[str, ...], ...]
    """Cells, as many as titles."""
    note: str = ""
    """A sentence below it."""


def settled(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The entries without the first, whose steps hold one-off costs, where there is another."""
    return entries[1:] if len(entries) > 1 else entries


def measured_facts(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Name and value of what was measured while training."""
    last = entries[-1]
    facts = [
        ("optimizer steps", f"{last.step}"),
        ("step time, measured", seconds(statistics.median(e.step_time_s for e in entries)) + " (median)"),
        ("throughput, measured", f"{statistics.median(e.samples_per_s for e in entries):.4g} samples/s"),
    ]
    tokens = statistics.median(e.tokens_per_s for e in entries)
    if tokens:
        facts.append(("tokens, measured", f"{tokens:,.0f} tokens/s"))
    facts.append(("idle, measured", percent(statistics.median(e.idle_fraction for e in entries))))
    known = [e.mfu for e in entries if e.mfu is not None]
    facts.append(
        ("MFU, measured", percent(statistics.median(known)) if known else "unknown (no peak figure for a device)")
    )
    return facts


def between(known: Sequence[tuple[int, int]], size: int) -> float:
    """Memory at a size by straight lines through the measured ones, beyond them with the last slope."""
    if len(known) == 1:
        return float(known[0][1])
    after = next((i for i, (measured, _) in enumerate(known) if measured >= size and i > 0), len(known) - 1)
    (low, low_bytes), (high, high_bytes) = known[after - 1], known[after]
    return low_bytes + (high_bytes - low_bytes) * (size - low) / (high - low)


def seconds(value: float) -> str:
    """A time with its unit."""
    return f"{value:.3g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"


def count(value: int) -> str:
    """A large number in words."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,}"


def cell(value: float | None) -> str:
    """A figure of a table that may be unknown."""
    return "-" if value is None else f"{value:.2f}"


def files(folder: Path) -> Mapping[str, bool]:
    """Name of a run's file -> whether it is there."""
    names = ("poplar_plan.json", "profiles.json", "poplar_history.jsonl", "trainer_state.json")
    return {name: (folder / name).is_file() for name in names}
