"""The pictures of the report, as SVG that follows the page: its text and lines take the page's colours.

Nothing is told by colour alone: series differ by marker and line, bars by hatching, and numbers stand beside them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .plan import Plan
from .profiles import ClusterProfile
from .run_files import Entry, Event
from .step_model import RankType, break_down_plan, group_ranks
from .text_table import short_ranks
from .timeline import MOST_RANKS, spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, PAPER, LINE, MARK = "#101112", "#707172", "#fbfcfd", "#2f6fb0", "#c2570c"
_ON_PAGE = {INK: "var(--ink)", MUTED: "var(--muted)", PAPER: "var(--paper)", LINE: "var(--line)", MARK: "var(--mark)"}
"""Colours that stand for the page's own, so that one picture serves the light and the dark page."""

_WIDTH_IN = 4.7
"""Width of a picture: on a phone its letters are then as large as the page's small print."""

_BARS: dict[str, dict[str, Any]] = {
    "compute": {"facecolor": LINE, "edgecolor": PAPER, "label": "forward and backward"},
    "idle": {"facecolor": "none", "edgecolor": MUTED, "hatch": "////", "label": "waiting"},
    "communication": {"facecolor": "none", "edgecolor": MARK, "hatch": "..", "label": "communication not hidden"},
    "overhead": {"facecolor": "none", "edgecolor": INK, "hatch": "xxxx", "label": "optimizer"},
}


def curve_svg(profile: ClusterProfile, kind: RankType, chosen: Sequence[int], *, name: str) -> str:
    """A rank's measured points, the curve through them, and the micro-batches the plan runs.

    Args:
        profile: The cluster.
        kind: Ranks with one curve.
        chosen: Micro-batch sizes of the plan on these ranks, without 0.
        name: Prefix of the picture's ids, unique on the page.
    """
    points = profile.ranks[kind.ranks[0]].points
    figure, axes = _figure(2.9)
    last = max([points[-1].micro_batch_size, *chosen])
    sizes = range(1, min(kind.curve.max_micro_batch_size, last) + 1)
    longest = max([p.step_time_s for p in points] + [kind.curve(size) for size in sizes])
    scale, unit = _time_unit(longest)
    if sizes:
        axes.plot(sizes, [kind.curve(s) * scale for s in sizes], color=LINE, linewidth=1.6, label="curve")
    axes.plot(
        [p.micro_batch_size for p in points],
        [p.step_time_s * scale for p in points],
        linestyle="none",
        marker="o",
        markerfacecolor=PAPER,
        markeredgecolor=LINE,
        label="measured",
    )
    _mark_chosen(axes, kind, chosen, scale)
    axes.set_xlim(0, last * 1.08 + 0.2)
    axes.set_ylim(0, longest * scale * 1.18)
    axes.set_xlabel("micro-batch size (samples)")
    axes.set_ylabel(f"forward and backward ({unit})")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _svg(figure, name, f"step-time curve of rank {short_ranks(kind.ranks)}")


def _mark_chosen(axes: Axes, kind: RankType, chosen: Sequence[int], scale: float) -> None:
    marked = [size for size in chosen if size <= kind.curve.max_micro_batch_size]
    if marked:
        times = [kind.curve(size) * scale for size in marked]
        axes.plot(marked, times, linestyle="none", marker="D", markersize=8, color=MARK, label="in the plan")
        axes.vlines(marked, 0, times, color=MARK, linewidth=0.9, linestyle=":")
    axes.legend(loc="upper left", frameon=False, fontsize=8.5, labelcolor=INK)


def memory_svg(
    profile: ClusterProfile, planned_gib: Mapping[int, float], measured_gib: Mapping[int, float], *, name: str
) -> str:
    """Each rank's memory in use against what its device has.

    Args:
        profile: The cluster; ranks whose device memory is unknown get no frame.
        planned_gib: Rank -> GiB of parameters, gradients and activations at its largest planned micro-batch.
        measured_gib: Rank -> highest GiB in use while training.
        name: Prefix of the picture's ids.
    """
    ranks = [rank for rank in profile.ranks if rank.rank in planned_gib or rank.rank in measured_gib][:MOST_RANKS]
    figure, axes = _figure(1.5 + 0.5 * len(ranks))
    rows = range(len(ranks))
    cards = [rank.memory_bytes / 2**30 for rank in ranks]
    axes.barh(rows, cards, height=0.8, facecolor="none", edgecolor=INK, linewidth=1.2, label="the device has")
    shown = (
        (measured_gib, -0.19, {"facecolor": LINE, "edgecolor": PAPER, "label": "highest while training"}),
        (
            planned_gib,
            0.19,
            {"facecolor": "none", "edgecolor": MARK, "hatch": "////", "label": "one planned micro-batch"},
        ),
    )
    for values, offset, style in shown:
        if values:
            lengths = [values.get(rank.rank, 0.0) for rank in ranks]
            axes.barh([row + offset for row in rows], lengths, height=0.34, **style)
            for row, length in zip(rows, lengths, strict=True):
                if length:
                    axes.annotate(
                        _gib(length),
                        (length, row + offset),
                        xytext=(4, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=8,
                        color=INK,
                    )
    widest = max([*cards, *planned_gib.values(), *measured_gib.values()], default=1.0) or 1.0
    axes.set_xlim(0, widest * 1.16)
    _rank_rows(axes, [rank.rank for rank in ranks])
    axes.set_xlabel("memory (GiB)")
    _legend_below(figure, [axes])
    return _svg(figure, name, "memory of every rank")


def timeline_svg(profile: ClusterProfile, plans: Mapping[str, Plan], *, name: str) -> str:
    """One optimizer step of each plan under the step-time model, above each other on one time axis.

    Args:
        profile: The cluster.
        plans: Title of a panel -> its plan.
        name: Prefix of the picture's ids.

    Raises:
        PlanError, ProfileError: A plan does not suit the profile.
    """
    first = next(iter(plans.values()))
    rows = _rows(profile, first)
    figure, panels = _figure(0.9 + len(plans) * (0.62 + 0.34 * len(rows)), panels=len(plans))
    times = {title: break_down_plan(profile, plan).step_time_s for title, plan in plans.items()}
    scale, unit = _time_unit(max(times.values()))
    for axes, (title, plan) in zip(panels, plans.items(), strict=True):
        _draw_step(axes, profile, plan, rows, scale, scale * max(times.values()))
        seconds = times[title]
        speed = plan.global_batch_size / seconds
        axes.set_title(
            f"{title}: {_short(seconds * scale)} {unit}, {_short(speed)} samples/s", loc="left", fontsize=9, color=INK
        )
        _rank_rows(axes, rows)
    panels[-1].set_xlabel(f"time in one optimizer step ({unit}, predicted)")
    panels[-1].set_xlim(0, scale * max(times.values()) * 1.005)
    _legend_below(figure, panels)
    return _svg(figure, name, "one optimizer step as a timeline")


def _draw_step(
    axes: Axes, profile: ClusterProfile, plan: Plan, rows: Sequence[int], scale: float, longest: float
) -> None:
    place = {rank: row for row, rank in enumerate(rows)}
    drawn = [span for span in spans(profile, plan) if span.rank in place]
    for kind, style in _BARS.items():
        bars = [span for span in drawn if span.kind == kind]
        axes.barh(
            [place[span.rank] for span in bars],
            [span.length_s * scale for span in bars],
            left=[span.start_s * scale for span in bars],
            height=0.76,
            linewidth=0.7,
            **style,
        )
    for span in drawn:
        if span.kind == "compute" and span.length_s * scale > 0.02 * longest * len(str(span.samples)):
            middle = (span.start_s + span.length_s / 2) * scale
            row = place[span.rank]
            axes.annotate(str(span.samples), (middle, row), ha="center", va="center", color=PAPER, fontsize=8)


def _rows(profile: ClusterProfile, plan: Plan) -> list[int]:
    """All ranks, or the first of every type where there are too many to draw."""
    if profile.world_size <= MOST_RANKS:
        return list(range(profile.world_size))
    types = group_ranks(profile, profile.stage(plan.zero_stage).max_micro_batch_size)
    return sorted(rank for kind in types for rank in kind.ranks[: max(1, MOST_RANKS // len(types))])[:MOST_RANKS]


def history_svg(entries: Sequence[Entry], events: Sequence[Event], *, name: str) -> str:
    """Measured and predicted step time over the run, with a numbered line for every event.

    Args:
        entries: At least one.
        events: Numbered from 1 in the order given.
        name: Prefix of the picture's ids.
    """
    figure, axes = _figure(2.9)
    steps = [entry.step for entry in entries]
    predicted = [entry.predicted_step_time_s for entry in entries]
    longest = max([entry.step_time_s for entry in entries] + [seconds for seconds in predicted if seconds])
    scale, unit = _time_unit(longest)
    marker = "o" if len(entries) <= 60 else None
    measured = [entry.step_time_s * scale for entry in entries]
    axes.plot(steps, measured, color=LINE, marker=marker, markersize=4, linewidth=1.6, label="measured")
    if any(predicted):
        values = [float("nan") if seconds is None else seconds * scale for seconds in predicted]
        single = len(entries) == 1
        axes.plot(
            steps, values, color=MARK, linestyle="--", marker="D" if single else None, linewidth=1.6, label="predicted"
        )
    for number, event in enumerate(events, start=1):
        axes.axvline(event.step, color=MUTED, linestyle=":", linewidth=1.2)
        axes.annotate(
            str(number),
            (event.step, 0.985),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="top",
            fontsize=8,
            color=INK,
            bbox={"boxstyle": "circle,pad=0.2", "facecolor": PAPER, "edgecolor": MUTED},
        )
    axes.set_ylim(0, longest * scale * 1.25)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"step time ({unit})")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend_below(figure, [axes])
    return _svg(figure, name, "step time over the run, measured and predicted")


# What all pictures share


def _figure(height_in: float, *, panels: int | None = None) -> tuple[Figure, Any]:
    """An empty picture with one plot, or with `panels` of them above each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    figure.patch.set_visible(False)
    grid = figure.subplots(panels or 1, 1, sharex=True, squeeze=False)[:, 0]
    for axes in grid:
        axes.patch.set_visible(False)
        axes.spines[["top", "right"]].set_visible(False)
        for spine in axes.spines.values():
            spine.set_color(MUTED)
        axes.tick_params(colors=INK, labelsize=8.5)
        axes.xaxis.label.set(color=INK, size=9)
        axes.yaxis.label.set(color=INK, size=9)
    return figure, grid if panels else grid[0]


def _rank_rows(axes: Axes, ranks: Sequence[int]) -> None:
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _legend_below(figure: Figure, panels: Sequence[Axes]) -> None:
    found: dict[str, Any] = {}
    for axes in panels:
        found.update({text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)})
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside lower left",
        ncols=2,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
    )


def _time_unit(longest_s: float) -> tuple[float, str]:
    return (1.0, "s") if longest_s >= 1.0 else (1e3, "ms")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _gib(value: float) -> str:
    return f"{value:.1f}" if value >= 1.0 else f"{value:.2g}"


def _svg(figure: Figure, name: str, label: str) -> str:
    """The picture as an `svg` element that can stand in a page: own ids, the page's colours, any width."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # The picture's own style sheet would hold for the whole page, which has these rules itself.
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head) + f' role="img" aria-label="{label}"'
    return _recoloured(f"{head}>{rest}")


def _recoloured(text: str) -> str:
    for placeholder, variable in _ON_PAGE.items():
        text = text.replace(placeholder, variable)
    return text
