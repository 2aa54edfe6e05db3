"""One optimizer step as a picture: a row per rank, time to the right, one panel per plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PlanError
from .plan import LOCK_STEP_STAGES, Plan
from .profiles import ClusterProfile
from .step_model import break_down_plan, group_ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 16
"""Rows beyond which only the first ranks of every type are drawn."""

_STYLE: dict[str, dict[str, Any]] = {
    "compute": {"facecolor": "#3b75af", "edgecolor": "white", "label": "forward and backward"},
    "idle": {"facecolor": "#f4f4f4", "edgecolor": "#9a9a9a", "hatch": "////", "label": "waiting"},
    "communication": {"facecolor": "#e0a23b", "edgecolor": "white", "label": "communication not hidden"},
    "overhead": {"facecolor": "#5f8f4e", "edgecolor": "white", "label": "optimizer"},
}


@dataclass(frozen=True, kw_only=True)
class Span:
    """One bar of the picture."""

    rank: int
    """Global rank."""
    kind: str
    """`compute`, `idle`, `communication` or `overhead`."""
    start_s: float
    """Seconds since the start of the step."""
    length_s: float
    """Seconds; greater than 0."""
    samples: int = 0
    """Samples of a compute bar."""


def spans(profile: ClusterProfile, plan: Plan) -> list[Span]:
    """The bars of one optimizer step under the step-time model.

    Communication that no compute hides is drawn after the compute it follows.

    Raises:
        PlanError, ProfileError: As `step_time`.
    """
    parts = break_down_plan(profile, plan)
    stage = profile.stage(plan.zero_stage)
    found: list[Span] = []
    for kind in group_ranks(profile, stage.max_micro_batch_size):
        for rank in kind.ranks:
            sizes = plan.ranks[rank].micro_batch_sizes
            times = [kind.curve(size) for size in sizes]
            clock = 0.0
            if plan.zero_stage in LOCK_STEP_STAGES:
                for size, own, slowest in zip(sizes, times, parts.micro_step_time_s, strict=True):
                    exposed = max(0.0, stage.per_micro_step_s - stage.overlap * slowest)
                    found.append(Span(rank=rank, kind="compute", start_s=clock, length_s=own, samples=size))
                    found.append(Span(rank=rank, kind="idle", start_s=clock + own, length_s=slowest - own))
                    clock += slowest
                    found.append(Span(rank=rank, kind="communication", start_s=clock, length_s=exposed))
                    clock += exposed
                busy_until = clock + parts.overhead_s
            else:
                for size, own in zip(sizes, times, strict=True):
                    found.append(Span(rank=rank, kind="compute", start_s=clock, length_s=own, samples=size))
                    clock += own
                busy_until = parts.step_time_s - stage.per_step_s
            found.append(Span(rank=rank, kind="overhead", start_s=clock, length_s=kind.step_overhead_s))
            clock += kind.step_overhead_s
            found.append(Span(rank=rank, kind="idle", start_s=clock, length_s=busy_until - clock))
            found.append(Span(rank=rank, kind="communication", start_s=busy_until, length_s=stage.per_step_s))
    shortest = parts.step_time_s * 1e-9
    return [span for span in found if span.length_s > shortest]


def draw_timeline(
    profile: ClusterProfile, plans: Mapping[str, Plan], *, title: str = "", path: str | Path | None = None
) -> Figure:
    """Draw plans above each other on one time axis.

    Args:
        profile: The cluster.
        plans: Title of a panel -> its plan; at least one.
        title: Heading of the picture.
        path: Where to save it; the ending decides the format (`.png`, `.svg`). None: not saved.

    Raises:
        PlanError: `plans` is empty, or a plan does not suit the profile; ProfileError as `step_time`.
    """
    from matplotlib.figure import Figure

    if not plans:
        raise PlanError("there is no plan to draw; give at least one.")
    first = next(iter(plans.values()))
    rows = _rows(profile, first.zero_stage)
    figure = Figure(figsize=(11.0, 1.3 + len(plans) * (0.9 + 0.34 * len(rows))), layout="constrained")
    panels = figure.subplots(len(plans), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, plan) in zip(panels, plans.items(), strict=True):
        _draw_panel(axes, profile, plan, rows)
        seconds = break_down_plan(profile, plan).step_time_s
        axes.set_title(f"{name}: {seconds:.3g} s, {plan.global_batch_size / seconds:.4g} samples/s", loc="left")
    panels[-1].set_xlabel("seconds of one optimizer step (predicted)")
    panels[-1].set_xlim(left=0.0)
    labels: dict[str, Any] = {}
    for axes in panels:
        labels.update({text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)})
    figure.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=4, frameon=False)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _rows(profile: ClusterProfile, zero_stage: int) -> list[int]:
    if profile.world_size <= MOST_RANKS:
        return list(range(profile.world_size))
    types = group_ranks(profile, profile.stage(zero_stage).max_micro_batch_size)
    each = max(1, MOST_RANKS // len(types))
    return sorted(rank for kind in types for rank in kind.ranks[:each])[:MOST_RANKS]


def _draw_panel(axes: Axes, profile: ClusterProfile, plan: Plan, rows: Sequence[int]) -> None:
    place = {rank: index for index, rank in enumerate(rows)}
    drawn = [span for span in spans(profile, plan) if span.rank in place]
    for kind, style in _STYLE.items():
        bars = [span for span in drawn if span.kind == kind]
        if bars:
            axes.barh(
                [place[span.rank] for span in bars],
                [span.length_s for span in bars],
                left=[span.start_s for span in bars],
                height=0.78,
                linewidth=0.6,
                **style,
            )
    end = max(span.start_s + span.length_s for span in drawn)
    for span in drawn:
        if span.kind == "compute" and span.length_s > 0.022 * end:
            middle = span.start_s + span.length_s / 2
            axes.text(middle, place[span.rank], str(span.samples), ha="center", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(rows)), [_row_label(profile, rank) for rank in rows], fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _row_label(profile: ClusterProfile, rank: int) -> str:
    device = profile.ranks[rank].device
    return f"rank {rank}  {device}" if device else f"rank {rank}"
