"""Plain text tables and short forms of numbers for the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """A table with aligned columns.

    Args:
        header: One title per column.
        rows: Cells, as many as titles.
        left: Columns aligned to the left; the others to the right.
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def render(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([render(lines[0]), "  ".join("-" * width for width in widths), *map(render, lines[1:])])


def short_sizes(sizes: Sequence[int]) -> str:
    """Micro-batch sizes with repeats counted: (24, 24, 11) -> `2 x 24, 11`."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)


def short_ranks(ranks: Sequence[int]) -> str:
    """Increasing rank numbers with runs shortened: (0, 1, 2, 5) -> `0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def percent(fraction: float | None) -> str:
    """A fraction as a percentage with one decimal; `-` for None."""
    return "-" if fraction is None else f"{100.0 * fraction:.1f}%"
