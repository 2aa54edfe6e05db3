"""Watching a run: where each rank's time goes, the metrics, and re-planning when a rank has changed."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from . import metrics
from .comm import Ranks, decide
from .config import PoplarConfig
from .emulation import Emulation
from .plan import Plan
from .profiles import ClusterProfile
from .replan import Verdict, judge
from .units import GIB

HISTORY_FILE_NAME = "poplar_history.jsonl"


class ComputeClock:
    """How long this rank computes, without the time it waits for others.

    Forward, and backward up to the gradient of the embedding's output (the last thing backward needs before the gradients
    are reduced), are timed on the device. On a CPU at ZeRO-3, where ranks meet inside both passes, processor time stands
    in; an emulated rank knows what its passes take. On a GPU such waits cannot be told apart and are counted.

    Args:
        model: The model; hooks are added to it.
        device: Where it runs.
        waits_inside: True where the passes contain collectives (ZeRO-3).
        clock: Real time, in seconds.
        thread_clock: Processor time of this thread, in seconds.
        emulation: What the rank pretends to be; its own time of passes replaces the clocks.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        waits_inside: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        thread_clock: Callable[[], float] = time.thread_time,
        emulation: Emulation | None = None,
    ) -> None:
        slowed = emulation is not None and emulation.slowdown != 1.0
        if device.type == "cpu" and (waits_inside or slowed):
            clock = emulation.compute_time if slowed else thread_clock
        self._device = device
        self._clock = clock
        self._spans: list[tuple[Any, Any]] = []
        self._start: Any = None
        self._end: Any = None
        self._hooks: list[RemovableHandle] = [model.register_forward_pre_hook(self._begin)]
        # What an emulated rank's passes have taken is known when they are over.
        first = None if slowed else first_layer(model)
        if first is not None:
            self._hooks.append(first.register_forward_hook(self._watch_gradient))

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def micro_step_done(self) -> None:
        """Close the span of a micro-step; called after backward, before or after the reduction."""
        if self._start is not None:
            self._spans.append((self._start, self._now() if self._end is None else self._end))
        self._start = self._end = None

    def take(self) -> float:
        """Seconds of compute since the last call."""
        spans, self._spans = self._spans, []
        if self._device.type == "cuda" and spans:
            torch.cuda.synchronize(self._device)
            return sum(start.elapsed_time(end) for start, end in spans) / 1e3
        return float(sum(end - start for start, end in spans))

    def _now(self) -> Any:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return self._clock()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._start, self._end = self._now(), None

    def _watch_gradient(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad and self._start is not None:
            output.register_hook(self._reached)

    def _reached(self, gradient: torch.Tensor) -> None:
        self._end = self._now()


def first_layer(model: nn.Module) -> nn.Module | None:
    """The layer whose output's gradient is the last that backward computes.

    The input embedding, or the first leaf that is trained where the embedding is frozen (adapters) or not known.
    """
    get = getattr(model, "get_input_embeddings", None)
    if get is not None:
        try:
            embedding = get()
        except NotImplementedError:
            return None
        if embedding is None or any(p.requires_grad for p in embedding.parameters()):
            return embedding  # type: ignore[no-any-return]
    leaves = (module for module in model.modules() if not list(module.children()))
    return next((leaf for leaf in leaves if any(p.requires_grad for p in leaf.parameters(False))), None)


@dataclass
class StepRecord:
    """One optimizer step on this rank."""

    step_time_s: float
    compute_time_s: float
    num_samples: int
    num_tokens: int
    full: bool


@dataclass
class _Window:
    """What one rank tells the others about the steps since the last look."""

    step_time_s: float
    compute_time_s: float
    tokens: int
    peak_memory_bytes: int


@dataclass
class RunWatch:
    """Collects steps, and at the same steps on every rank turns them into metrics and a judgement of the plan.

    Every method but `record` is a collective call.
    """

    ranks: Ranks
    config: PoplarConfig
    device: torch.device
    profile: ClusterProfile | None
    emulated: bool
    parameters: int
    records: list[StepRecord] = field(default_factory=list)
    judged: list[StepRecord] = field(default_factory=list)
    told: set[tuple[int, float, str]] = field(default_factory=set)

    def record(self, record: StepRecord) -> None:
        """Note one optimizer step of this rank."""
        self.records.append(record)
        if record.full:
            self.judged.append(record)

    def summarise(self, plan: Plan, *, step: int) -> tuple[dict[str, float], dict[str, Any]] | None:
        """Metrics over the steps since the last call, and their history line; None where there was no step.

        Args:
            plan: The plan in force.
            step: Optimizer steps of the run so far.
        """
        records, self.records = self.records, []
        if not records:
            return None
        samples = sum(r.num_samples for r in records)
        own = _Window(
            step_time_s=sum(r.step_time_s for r in records) / len(records),
            compute_time_s=sum(r.compute_time_s for r in records) / len(records),
            tokens=sum(r.num_tokens for r in records),
            peak_memory_bytes=peak_memory_bytes(self.device),
        )
        windows = self.ranks.gather(own)
        line = self._history_line(plan, windows, step=step, samples=samples, steps=len(records))
        return _flat(line), line

    def _history_line(
        self, plan: Plan, windows: list[_Window], *, step: int, samples: int, steps: int
    ) -> dict[str, Any]:
        seconds = max(w.step_time_s for w in windows)
        tokens_per_s = sum(w.tokens for w in windows) / (seconds * steps)
        peaks = [rank.peak_flops for rank in self.profile.ranks] if self.profile is not None else []
        return {
            "version": 1,
            "step": step,
            "samples": samples,
            "step_time_s": seconds,
            "predicted_step_time_s": plan.predicted_step_time_s or None,
            "samples_per_s": metrics.samples_per_s(samples, seconds * steps),
            "tokens_per_s": tokens_per_s,
            "idle_fraction": metrics.idle_fraction([w.compute_time_s for w in windows]),
            "mfu": metrics.mfu(tokens_per_s, metrics.flops_per_token(self.parameters), peaks),
            "emulated": self.emulated,
            "ranks": [
                {
                    "rank": rank,
                    "compute_time_s": w.compute_time_s,
                    "wait_time_s": max(0.0, seconds - w.compute_time_s),
                    "peak_memory_gib": w.peak_memory_bytes / GIB,
                }
                for rank, w in enumerate(windows)
            ],
            "event": None,
        }

    def look(self, plan: Plan) -> Verdict | None:
        """Judge the plan from the full steps since the last look.

        Returns:
            What was found where it is worth a new word (a straggler, or a gain above the threshold), else None; the same
            on every rank.
        """
        records, self.judged = self.judged, []
        own = statistics.median(r.compute_time_s for r in records) if records else 0.0
        measured = self.ranks.gather(own)
        profile = self.profile
        if profile is None or min(measured) <= 0.0:
            return None
        verdict = decide(self.ranks, lambda: judge(profile, plan, measured))
        if verdict.gain < self.config.replan_threshold and not verdict.straggler:
            return None
        word = (verdict.slowest_drift_rank, round(verdict.drift[verdict.slowest_drift_rank], 1), plan.digest)
        if word in self.told:
            return None
        self.told.add(word)
        return verdict


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory in use on this rank: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def append_history(folder: str | Path, line: dict[str, Any]) -> None:
    """Add one line to a run's history file."""
    with (Path(folder) / HISTORY_FILE_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def event_line(*, step: int, kind: str, text: str, rank: int) -> dict[str, Any]:
    """The history line of a warning (`straggler`) or a change of plan (`replan`)."""
    return {"version": 1, "step": step, "event": {"kind": kind, "text": text, "rank": rank}}


def _flat(line: dict[str, Any]) -> dict[str, float]:
    names = ("step_time_s", "predicted_step_time_s", "samples_per_s", "tokens_per_s", "idle_fraction", "mfu")
    flat = {f"poplar/{name}": line[name] for name in names if line[name] is not None}
    for rank in line["ranks"]:
        for name in ("compute_time_s", "wait_time_s", "peak_memory_gib"):
            flat[f"poplar/rank{rank['rank']}/{name}"] = rank[name]
    return flat
