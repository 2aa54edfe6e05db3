"""What a finished or running training left in its output directory, read for the report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, PoplarError
from .plan import PLAN_FILE_NAME, Plan
from .profiles import ClusterProfile

HISTORY_FILE = "poplar_history.jsonl"
PROFILE_FILE = "profiles.json"
STATE_FILE = "trainer_state.json"


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """One rank's part of a history entry, per optimizer step."""

    rank: int
    """Global rank."""
    compute_time_s: float
    """Seconds of forward and backward."""
    wait_time_s: float
    """Seconds of the step that were not compute."""
    peak_memory_gib: float
    """Highest memory in use so far, in GiB."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What was measured between two looks at the run."""

    step: int
    """Optimizer steps of the run so far."""
    samples: int
    """Samples since the entry before."""
    step_time_s: float
    """Mean seconds of an optimizer step."""
    predicted_step_time_s: float | None
    """What the plan in force predicted; None for a plan that nothing was measured for."""
    samples_per_s: float
    """Measured throughput."""
    tokens_per_s: float
    """Measured throughput in tokens; 0 where samples are not token rows."""
    idle_fraction: float
    """1 - mean/max of the ranks' compute time, 0 to 1."""
    mfu: float | None
    """Model FLOPs utilisation, 0 to 1; None where a device's peak is unknown."""
    ranks: tuple[RankTimes, ...]
    """One entry per rank, in rank order."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of plan, or a rank that was found slow."""

    step: int
    """Optimizer step it happened after."""
    kind: str
    """`replan` or `straggler`."""
    text: str
    """What happened, in a sentence."""
    rank: int | None
    """The rank it is about, if it is about one."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that is known of a run. Whatever is missing is None or empty, and `remarks` says why."""

    folder: Path
    """The output directory."""
    plan: Plan | None
    """The plan in force at the end."""
    profile: ClusterProfile | None
    """What the plan was made from."""
    state_bytes: float | None
    """Training state that the plan's ZeRO stage divides among the ranks, all together; None where it is unknown."""
    entries: tuple[Entry, ...]
    """The history, by increasing step."""
    events: tuple[Event, ...]
    """What happened on the way, by increasing step."""
    last_loss: tuple[int, float] | None
    """Optimizer step and value of the last logged loss."""
    emulated: bool
    """True when any figure was taken under emulation, or is simulated."""
    remarks: tuple[str, ...]
    """Files that are missing or broken, one sentence each."""

    @property
    def empty(self) -> bool:
        """True when there is nothing to report on."""
        return self.plan is None and self.profile is None and not self.entries


def read_run(folder: str | Path) -> RunRecord:
    """Read an output directory; a missing or broken file becomes a remark, never an error.

    Raises:
        ConfigError: There is no such directory.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such directory. Give the output directory of a run.")
    remarks: list[str] = []
    plan, profile = _plan(folder, remarks), _profile(folder, remarks)
    lines = _history_lines(folder / HISTORY_FILE, remarks)
    entries = tuple(_entry(line) for line in lines if "step_time_s" in line)
    events = tuple(_event(line) for line in lines if isinstance(line.get("event"), Mapping))
    return RunRecord(
        folder=folder,
        plan=plan,
        profile=profile,
        state_bytes=_state_bytes(folder, plan) if plan is not None and profile is not None else None,
        entries=entries,
        events=events,
        last_loss=_last_loss(folder),
        emulated=(profile is not None and profile.emulated) or any(line.get("emulated") for line in lines),
        remarks=tuple(remarks),
    )


def _plan(folder: Path, remarks: list[str]) -> Plan | None:
    if not (folder / PLAN_FILE_NAME).is_file():
        remarks.append(f"{PLAN_FILE_NAME} is missing: it holds every rank's micro-batches.")
        return None
    try:
        return Plan.load(folder)
    except PoplarError as problem:
        remarks.append(f"{PLAN_FILE_NAME} cannot be used: {problem}")
        return None


def _profile(folder: Path, remarks: list[str]) -> ClusterProfile | None:
    path = folder / PROFILE_FILE
    if not path.is_file():
        remarks.append(
            f"{PROFILE_FILE} is missing: it holds what was measured of every rank. A plan given by hand, or made "
            "beforehand, has none; curves, the even split and advice are left out."
        )
        return None
    try:
        return ClusterProfile.load(path)
    except PoplarError as problem:
        remarks.append(f"{PROFILE_FILE} cannot be used: {problem}")
        return None


def _state_bytes(folder: Path, plan: Plan) -> float | None:
    """Read off the profile's `memory` entry, which has what a rank holds under even shares."""
    try:
        held = json.loads((folder / PROFILE_FILE).read_text(encoding="utf-8"))["memory"][0]["states"]
        states = held[str(plan.zero_stage)]
        by_stage = (states["optimizer"], states["gradients"], states["parameters"])
        return float(plan.world_size * sum(by_stage[: plan.zero_stage]))
    except (KeyError, IndexError, TypeError):
        return None


def _history_lines(path: Path, remarks: list[str]) -> list[dict[str, Any]]:
    """The usable lines by increasing step; a resumed run's lines take the place of those it ran again."""
    if not path.is_file():
        remarks.append(f"{HISTORY_FILE} is missing: nothing was measured while training.")
        return []
    kept: list[dict[str, Any]] = []
    broken = 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        line = _parsed(text)
        if line is None:
            broken += bool(text.strip())
            continue
        if kept and line["step"] < kept[-1]["step"]:
            kept = [earlier for earlier in kept if earlier["step"] < line["step"]]
        kept.append(line)
    if broken:
        remarks.append(f"{HISTORY_FILE}: {broken} line{'s' if broken > 1 else ''} could not be read.")
    return kept


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    seconds = line.get("step_time_s", 1.0)
    usable = isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds > 0.0
    return line if usable else None


def _entry(line: Mapping[str, Any]) -> Entry:
    return Entry(
        step=line["step"],
        samples=int(_number(line.get("samples")) or 0),
        step_time_s=float(line["step_time_s"]),
        predicted_step_time_s=_number(line.get("predicted_step_time_s")) or None,
        samples_per_s=_number(line.get("samples_per_s")) or 0.0,
        tokens_per_s=_number(line.get("tokens_per_s")) or 0.0,
        idle_fraction=_number(line.get("idle_fraction")) or 0.0,
        mfu=_number(line.get("mfu")),
        ranks=tuple(_rank_times(item) for item in _mappings(line.get("ranks"))),
    )


def _rank_times(item: Mapping[str, Any]) -> RankTimes:
    return RankTimes(
        rank=int(_number(item.get("rank")) or 0),
        compute_time_s=_number(item.get("compute_time_s")) or 0.0,
        wait_time_s=_number(item.get("wait_time_s")) or 0.0,
        peak_memory_gib=_number(item.get("peak_memory_gib")) or 0.0,
    )


def _event(line: Mapping[str, Any]) -> Event:
    event = line["event"]
    rank = event.get("rank")
    return Event(
        step=line["step"],
        kind=str(event.get("kind", "")),
        text=str(event.get("text", "")),
        rank=rank if isinstance(rank, int) else None,
    )


def _last_loss(folder: Path) -> tuple[int, float] | None:
    checkpoints = sorted(folder.glob(f"checkpoint-*/{STATE_FILE}"), key=lambda path: path.stat().st_mtime)
    for path in (folder / STATE_FILE, *reversed(checkpoints)):
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError):
            continue
        history = _mappings(state.get("log_history") if isinstance(state, Mapping) else None)
        losses = [(entry["step"], entry["loss"]) for entry in history if {"step", "loss"} <= entry.keys()]
        if losses:
            return int(losses[-1][0]), float(losses[-1][1])
    return None


def _mappings(value: Any) -> Iterable[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None
