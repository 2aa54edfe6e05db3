"""`poplar_report.html`: one self-contained page about a run, readable on a phone, in the dark and without colour."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from . import plots
from .advice import advise
from .errors import PlanError, PoplarError
from .limits import limited_by
from .plan import Plan
from .profiles import ClusterProfile
from .report import Prediction, predict, state_cells
from .report_parts import Figure, Table, between, cell, count, files, measured_facts, seconds, settled
from .run_files import RunRecord, read_run
from .search import STRATEGIES, find_plan
from .step_model import group_ranks
from .text_table import percent, short_ranks, short_sizes
from .timeline import MOST_RANKS
from .units import GIB

REPORT_FILE_NAME = "poplar_report.html"
SECTIONS = ("summary", "cluster", "curves", "memory", "timeline", "history", "events", "advice", "files")
"""Ids of the page's sections, in order; every report has all of them."""

MOST_ROWS = 64
"""Ranks beyond which the tables stop."""
MOST_CURVES = 12
"""Kinds of rank beyond which no further curve is drawn."""


def write_report(folder: str | Path) -> Path:
    """Write `poplar_report.html` into the output directory of a run.

    A file that is missing or broken leaves its part out, and the page says so.

    Args:
        folder: With any of `poplar_plan.json`, `profiles.json`, `poplar_history.jsonl`, `trainer_state.json`.

    Returns:
        The path of the page.

    Raises:
        ConfigError: There is no such directory.
    """
    record = read_run(folder)
    target = record.folder / REPORT_FILE_NAME
    target.write_text(render(record), encoding="utf-8")
    return target


def render(record: RunRecord) -> str:
    """The page as text: no script, nothing loaded from elsewhere."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("accelerate_poplar"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(_Page(record).content())


class _Page:
    """Collects what the template shows."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.plan = record.plan
        self.remarks = list(record.remarks)
        self.profile = self._usable_profile()
        self.prediction = self._prediction()

    def content(self) -> dict[str, Any]:
        record = self.record
        return {
            "title": record.profile.model if record.profile is not None and record.profile.model else "training run",
            "folder": record.folder.name,
            "emulated": record.emulated,
            "word": self.word,
            "facts": self._facts(),
            "verdict": self._verdict(),
            "cluster": self._cluster(),
            "curves": self._curves(),
            "memory": self._memory(),
            "memory_table": self._memory_table(),
            "timeline": self._timeline(),
            "history": self._history(),
            "rank_times": self._rank_times(),
            "events": record.events,
            "advice": self._advice(),
            "remarks": self.remarks,
            "file_names": files(record.folder),
            "has_profile": self.profile is not None,
            "has_entries": bool(record.entries),
        }

    @property
    def word(self) -> str:
        """What goes with every prediction."""
        return "predicted (emulated)" if self.record.emulated else "predicted"

    def _usable_profile(self) -> ClusterProfile | None:
        profile, plan = self.record.profile, self.plan
        if profile is None or plan is None:
            return profile
        try:
            profile.stage(plan.zero_stage)
            if plan.world_size != profile.world_size:
                raise PlanError(f"it is for {profile.world_size} ranks, the plan for {plan.world_size}.")
        except PoplarError as problem:
            self.remarks.append(f"profiles.json does not belong to this plan: {problem}")
            return None
        return profile

    def _prediction(self) -> Prediction | None:
        if self.plan is None or self.profile is None or not self.plan.predicted_step_time_s:
            return None
        return predict(self.plan, self.profile)

    # ---- summary ------------------------------------------------------------------------------------------------

    def _facts(self) -> list[tuple[str, str]]:
        """Name and value of what a person looks for first."""
        facts = []
        plan, profile = self.plan, self.profile
        if plan is not None:
            ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
            facts += [
                ("plan", f"ZeRO stage {plan.zero_stage}, {ranks}, strategy {plan.strategy}"),
                ("global batch", f"{plan.global_batch_size} samples an optimizer step"),
            ]
        if profile is not None and profile.num_parameters:
            length = f", {profile.seq_len} tokens a sample" if profile.seq_len else ""
            facts.append(("model", f"{count(profile.num_parameters)} parameters, {profile.dtype}{length}"))
        entries = settled(self.record.entries)
        if entries:
            facts += measured_facts(entries)
        if self.record.last_loss is not None:
            step, loss = self.record.last_loss
            facts.append(("last logged loss", f"{loss:.4g} at step {step}"))
        return facts

    def _verdict(self) -> list[str]:
        """What the plan brings, in sentences."""
        figures, sentences = self.prediction, []
        if figures is None:
            return ["Nothing was measured before this run, so there is no prediction to compare with."]
        sentences.append(f"An optimizer step is {self.word} to take {seconds(figures.step_time_s)}.")
        if figures.even_step_time_s:
            sentences.append(
                f"The even split would take {seconds(figures.even_step_time_s)}: this plan is "
                f"{self.word} to be {figures.even_step_time_s / figures.step_time_s:.2f} times as fast."
            )
        else:
            sentences.append("The even split does not fit into every rank's memory.")
        if figures.alone_step_time_s:
            sentences.append(
                f"Rank {figures.fastest_rank}, the fastest, would take {seconds(figures.alone_step_time_s)} alone."
            )
        entries = settled(self.record.entries)
        if entries and entries[-1].predicted_step_time_s:
            ratios = [e.step_time_s / e.predicted_step_time_s for e in entries if e.predicted_step_time_s]
            sentences.append(
                f"Measured step time was {statistics.median(ratios):.2f} times the prediction "
                f"(median of {len(ratios)} {'entry' if len(ratios) == 1 else 'entries'})."
            )
        return sentences

    # ---- cluster, curves, memory --------------------------------------------------------------------------------

    def _cluster(self) -> Table | None:
        plan, profile = self.plan, self.profile
        if plan is None and profile is None:
            return None
        limits = limited_by(profile, plan) if profile is not None and plan is not None else ()
        caps = profile.stage(plan.zero_stage).max_micro_batch_size if profile is not None and plan is not None else ()
        header = ["rank"]
        if profile is not None:
            header += ["host", "device", "memory (GiB)", "peak (TFLOP/s)", "best speed (samples/s)"]
        if plan is not None:
            header += ["micro-batches of a step (samples)", "share of the batch"]
        states = state_cells(plan, self.record.state_bytes) if plan is not None else []
        unit = "share" if self.record.state_bytes is None else "GiB"
        header += [f"training state, even ({unit})", f"training state, planned ({unit})"] if states else []
        header += ["largest that fits (samples)", "limited by"] if limits else []
        rows = []
        world_size = plan.world_size if plan is not None else profile.world_size if profile is not None else 0
        for number in range(min(world_size, MOST_ROWS)):
            cells = [str(number)]
            if profile is not None:
                rank = profile.ranks[number]
                peak = f"{rank.peak_flops / 1e12:.3g}" if rank.peak_flops else "unknown"
                memory = f"{rank.memory_bytes / GIB:.1f}" if rank.memory_bytes else "unknown"
                cells += [rank.host, rank.device, memory, peak, f"{rank.samples_per_s():.3g}"]
            if plan is not None:
                own = plan.ranks[number]
                cells += [short_sizes(own.micro_batch_sizes), percent(own.rank_batch_size / plan.global_batch_size)]
            cells += states[number] if states else ()
            cells += [str(caps[number]), limits[number]] if limits else []
            rows.append(tuple(cells))
        note = f"Ranks from {MOST_ROWS} on are left out here." if world_size > MOST_ROWS else ""
        return Table(header=tuple(header), rows=tuple(rows), note=note)

    def _curves(self) -> list[Figure]:
        plan, profile = self.plan, self.profile
        if profile is None or not profile.zero_stages:
            return []
        stage = plan.zero_stage if plan is not None else min(profile.zero_stages)
        kinds = sorted(group_ranks(profile, profile.stage(stage).max_micro_batch_size), key=lambda kind: kind.ranks)
        figures = []
        for index, kind in enumerate(kinds[:MOST_CURVES]):
            chosen = sorted({s for r in kind.ranks for s in plan.ranks[r].micro_batch_sizes if s} if plan else set())
            cap = kind.curve.max_micro_batch_size
            device = profile.ranks[kind.ranks[0]].device
            fits = f"Up to {cap} samples fit at ZeRO stage {stage}." if cap else f"Nothing fits at ZeRO stage {stage}."
            title = f"Rank{'s' if kind.count > 1 else ''} {short_ranks(kind.ranks)}, {device or 'device unknown'}."
            svg = plots.curve_svg(profile, kind, chosen, name=f"curve{index}")
            figures.append(Figure(svg=svg, caption=f"{title} {fits}"))
        return figures

    def _memory(self) -> Figure | None:
        profile = self.profile
        if profile is None or not (any(self._planned_gib()) or self._measured_gib()):
            return None
        return Figure(
            svg=plots.memory_svg(profile, self._planned_gib(), self._measured_gib(), name="memory"),
            caption="In use against what the device has. On a rank without an accelerator, use while training is that "
            "of the whole process.",
        )

    def _planned_gib(self) -> dict[int, float]:
        """Rank -> GiB at its largest planned micro-batch, from the measured points."""
        if self.plan is None or self.profile is None:
            return {}
        found = {}
        for own, rank in zip(self.plan.ranks, self.profile.ranks, strict=True):
            known = [(p.micro_batch_size, p.peak_memory_bytes) for p in rank.points if p.peak_memory_bytes]
            if known:
                found[own.rank] = between(known, max(own.micro_batch_sizes)) / GIB
        return found

    def _measured_gib(self) -> dict[int, float]:
        peaks: dict[int, float] = {}
        for entry in self.record.entries:
            for rank in entry.ranks:
                peaks[rank.rank] = max(peaks.get(rank.rank, 0.0), rank.peak_memory_gib)
        return {rank: peak for rank, peak in peaks.items() if peak > 0.0}

    def _memory_table(self) -> Table | None:
        profile, planned, measured = self.profile, self._planned_gib(), self._measured_gib()
        if profile is None or not (planned or measured):
            return None
        rows = tuple(
            (
                str(rank.rank),
                f"{rank.memory_bytes / GIB:.2f}" if rank.memory_bytes else "unknown",
                cell(planned.get(rank.rank)),
                cell(measured.get(rank.rank)),
            )
            for rank in profile.ranks[:MOST_ROWS]
        )
        return Table(
            header=("rank", "device has (GiB)", "one planned micro-batch (GiB)", "highest while training (GiB)"),
            rows=rows,
            note="One planned micro-batch: parameters, gradients and activations at the largest micro-batch of the "
            "plan, optimizer state not counted.",
        )

    # ---- timeline, history, advice ------------------------------------------------------------------------------

    def _timeline(self) -> Figure | None:
        plan, profile = self.plan, self.profile
        if plan is None or profile is None:
            return None
        plans: dict[str, Plan] = {}
        try:
            plans["even split"] = find_plan(
                profile, global_batch_size=plan.global_batch_size, zero_stage=plan.zero_stage, strategy="even"
            )
        except PlanError:
            left_out = " The even split does not fit and is not drawn."
        else:
            left_out = ""
        plans["this plan"] = plan
        try:
            svg = plots.timeline_svg(profile, plans, name="timeline")
        except PoplarError as problem:
            self.remarks.append(f"the step could not be drawn: {problem}")
            return None
        shown = "" if profile.world_size <= MOST_RANKS else " Only the first ranks of every kind are drawn."
        return Figure(
            svg=svg,
            caption=f"One optimizer step, {self.word}: the even split above, this plan below. Numbers are samples of "
            f"a micro-batch; hatched slanting: the rank waits.{left_out}{shown}",
        )

    def _history(self) -> Figure | None:
        if not self.record.entries:
            return None
        events = " Numbered lines are the events below." if self.record.events else ""
        measured = "measured on emulated ranks" if self.record.emulated else "measured"
        return Figure(
            svg=plots.history_svg(self.record.entries, self.record.events, name="history"),
            caption=f"Step time, {measured} (solid, mean since the entry before) against predicted (dashed).{events}",
        )

    def _rank_times(self) -> Table | None:
        entries = settled(self.record.entries)
        ranks = sorted({rank.rank for entry in entries for rank in entry.ranks})
        if not ranks:
            return None
        rows = []
        for number in ranks[:MOST_ROWS]:
            own = [rank for entry in entries for rank in entry.ranks if rank.rank == number]
            compute = statistics.median(rank.compute_time_s for rank in own)
            wait = statistics.median(rank.wait_time_s for rank in own)
            rows.append((str(number), f"{compute:.3g}", f"{wait:.3g}", percent(wait / (compute + wait or 1.0))))
        return Table(
            header=("rank", "compute a step (s)", "rest of the step (s)", "rest, share of the step"),
            rows=tuple(rows),
            note="Medians over the run, the first entry left out where there are more. The rest is waiting, "
            "communication and the optimizer.",
        )

    def _advice(self) -> list[str]:
        plan, profile = self.plan, self.profile
        if plan is None or profile is None or profile.world_size > MOST_ROWS:
            return []
        strategy = plan.strategy if plan.strategy in STRATEGIES else "optimal"
        try:
            found = advise(
                profile, global_batch_size=plan.global_batch_size, zero_stage=plan.zero_stage, strategy=strategy
            )
        except PoplarError as problem:
            return [f"No advice: {problem}"]
        return list(found.sentences())
