"""The table a person sees before training starts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rich.table import Table

from .console import NAME, console
from .errors import PoplarError
from .limits import limited_by
from .plan import Plan
from .profiles import ClusterProfile, RankProfile, StageProfile
from .search import find_plan
from .units import GIB


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the planner expects of a plan."""

    step_time_s: float
    """Seconds of one optimizer step."""
    even_step_time_s: float | None
    """The same under the even split; None where it does not fit."""
    alone_step_time_s: float | None
    """The same on the fastest rank alone, without communication; None where nothing fits."""
    fastest_rank: int
    """The rank that is fastest alone."""


def predict(plan: Plan, profile: ClusterProfile) -> Prediction:
    """Step time of a plan beside the even split and the fastest rank alone, all under the step-time model."""
    alone = {rank.rank: _alone(rank, plan, profile) for rank in profile.ranks}
    fitting = {rank: seconds for rank, seconds in alone.items() if seconds is not None}
    fastest = min(fitting, key=lambda rank: (fitting[rank], rank)) if fitting else 0
    return Prediction(
        step_time_s=plan.predicted_step_time_s,
        even_step_time_s=_step_time(profile, plan, strategy="even"),
        alone_step_time_s=fitting.get(fastest),
        fastest_rank=fastest,
    )


def plan_table(
    plan: Plan, profile: ClusterProfile | None, *, emulated: bool = False, state_bytes: float | None = None
) -> Table:
    """One row per rank: what it is, what it can do, what it gets, and what holds it back.

    Where the ranks' shares of the training state are uneven, or some of it is on a host, two columns have each rank's part
    of it, even and planned.

    Args:
        plan: The plan.
        profile: What it was made from; None where nothing was measured.
        emulated: Ranks are emulated, which the title then says.
        state_bytes: Training state that the plan's ZeRO stage divides among the ranks, all together; None: unknown.
    """
    title = f"Poplar plan: {plan.global_batch_size} samples per optimizer step, ZeRO stage {plan.zero_stage}"
    table = Table(title=title + (" (emulated ranks)" if emulated else ""), title_justify="left")
    table.add_column("rank", justify="right")
    if profile is not None:
        for name in ("host", "device"):
            table.add_column(name)
        for name in ("memory\nGiB", "largest\nmicro-batch", "samples/s"):
            table.add_column(name, justify="right")
    table.add_column("micro-batches")
    table.add_column("share", justify="right")
    states = state_cells(plan, state_bytes)
    for name in ("even", "planned") if states else ():
        table.add_column(f"{name} state\n{'share' if state_bytes is None else 'GiB'}", justify="right")
    if profile is not None:
        table.add_column("limited by")
    limits = limited_by(profile, plan) if profile is not None else ()
    for share in plan.ranks:
        cells = [str(share.rank)]
        if profile is not None:
            cells += _measured_cells(profile.ranks[share.rank], profile.stage(plan.zero_stage))
        cells += [runs(share.micro_batch_sizes), f"{share.rank_batch_size / plan.global_batch_size:.1%}"]
        cells += states[share.rank] if states else ()
        if profile is not None:
            cells.append(limits[share.rank])
        table.add_row(*cells)
    return table


def state_cells(plan: Plan, state_bytes: float | None) -> list[tuple[str, str]]:
    """Every rank's part of the sharded training state, under even shares and as planned.

    Args:
        plan: The plan.
        state_bytes: Training state that its ZeRO stage divides among the ranks, all together; None: unknown.

    Returns:
        Two figures per rank, in GiB, or in percent of the state where its size is unknown, with a word where a part of it
        is on the host; none where shares are even and all of it is on the devices.
    """
    if plan.state_fractions is None and not plan.offloading_ranks:
        return []
    even = 1.0 / plan.world_size

    def figure(share: float) -> str:
        return f"{share:.1%}" if state_bytes is None else f"{share * state_bytes / GIB:.3g}"

    return [
        (figure(even), figure(share) + (", optimizer on host" if rank.offloads_optimizer else ""))
        for rank, share in zip(plan.ranks, plan.state_fractions or (even,) * plan.world_size, strict=True)
    ]


def print_plan(
    plan: Plan, profile: ClusterProfile | None, *, emulated: bool = False, state_bytes: float | None = None
) -> None:
    """Print the table and, below it, the predicted step time and speed-ups; arguments as `plan_table`."""
    out = console()
    out.print(plan_table(plan, profile, emulated=emulated, state_bytes=state_bytes))
    if profile is None:
        return
    figures = predict(plan, profile)
    word = "predicted (emulated)" if emulated else "predicted"
    parts = [f"{word} step time {figures.step_time_s:.3g} s"]
    if figures.even_step_time_s:
        parts.append(f"{figures.even_step_time_s / figures.step_time_s:.2f}x the speed of the even split")
    if figures.alone_step_time_s:
        ratio = figures.alone_step_time_s / figures.step_time_s
        parts.append(f"{ratio:.2f}x the speed of rank {figures.fastest_rank} alone, the fastest")
    out.print(f"{NAME}: " + ", ".join(parts), markup=False, highlight=False)


def runs(sizes: tuple[int, ...]) -> str:
    """Micro-batch sizes with equal neighbours counted: (24, 24, 11) -> "2 x 24, 11"."""
    groups: list[list[int]] = []
    for size in sizes:
        if groups and groups[-1][0] == size:
            groups[-1][1] += 1
        else:
            groups.append([size, 1])
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in groups)


def _measured_cells(rank: RankProfile, stage: StageProfile) -> list[str]:
    return [
        rank.host,
        rank.device,
        f"{rank.memory_bytes / GIB:.1f}" if rank.memory_bytes else "?",
        str(stage.max_micro_batch_size[rank.rank]),
        f"{rank.samples_per_s():.3g}",
    ]


def _alone(rank: RankProfile, plan: Plan, profile: ClusterProfile) -> float | None:
    cap = profile.stage(plan.zero_stage).max_micro_batch_size[rank.rank]
    if cap == 0:
        return None
    single = dataclasses.replace(
        profile,
        ranks=(dataclasses.replace(rank, rank=0),),
        zero_stages={plan.zero_stage: StageProfile(max_micro_batch_size=(cap,))},
    )
    return _step_time(single, plan, strategy="optimal")


def _step_time(profile: ClusterProfile, plan: Plan, *, strategy: str) -> float | None:
    try:
        found = find_plan(
            profile, global_batch_size=plan.global_batch_size, zero_stage=plan.zero_stage, strategy=strategy
        )
    except PoplarError:
        return None
    return found.predicted_step_time_s
