"""The words and the JSON of `accelerate-poplar simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .advice import Advice
from .cephalo import CephaloResult
from .search import STRATEGIES
from .simulate import StrategyResult
from .text_table import format_table, percent


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """Everything `accelerate-poplar simulate` has to say."""

    title: str
    """What was simulated."""
    simulated: bool
    """The cluster is described, not measured."""
    emulated: bool
    """The profile was taken under emulation, or is itself simulated."""
    batch: int
    """Samples per optimizer step."""
    stage: int
    """ZeRO stage shown in detail."""
    results: dict[int, tuple[StrategyResult, ...]]
    """Every strategy, by ZeRO stage."""
    own: StrategyResult | None = None
    """The user's plan, where there is one."""
    advice: Advice | None = None
    """Where asked for."""
    cephalo: CephaloResult | None = None
    """Uneven training state, for described clusters it fits on."""

    def rows(self, stage: int) -> tuple[StrategyResult, ...]:
        """Results of a stage, the user's plan first."""
        return (*((self.own,) if self.own is not None and stage == self.stage else ()), *self.results[stage])

    @property
    def marker(self) -> str:
        """The word that goes with every figure."""
        return "simulated" if self.simulated else "emulated or simulated" if self.emulated else "predicted"


def to_text(report: SimulationReport) -> str:
    """Tables and sentences for a terminal."""
    lines = [f"{report.title}, global batch {report.batch}: all figures {report.marker}"]
    if len(report.results) > 1:
        lines += ["", _stage_table(report)]
    lines += ["", f"ZeRO stage {report.stage}", _strategy_table(report)]
    if report.cephalo is not None:
        lines += ["", _cephalo_line(report.cephalo)]
    if report.advice is not None:
        lines += ["", *(f"- {sentence}" for sentence in report.advice.sentences())]
    return "\n".join(lines)


def _stage_table(report: SimulationReport) -> str:
    rows = []
    for stage, found in report.results.items():
        by_name = {result.strategy: result for result in found}
        best = by_name["optimal"]
        step = "does not fit" if best.breakdown is None else f"{best.breakdown.step_time_s:.4g}"
        gains = [_gain(best, by_name[name]) for name in STRATEGIES if name != "optimal"]
        rows.append((str(stage), step, f"{best.samples_per_s:.4g}", percent(best.mfu), *gains))
    header = ("ZeRO", "step s", "samples/s", "MFU", *(f"over {name}" for name in STRATEGIES if name != "optimal"))
    return format_table(header, rows)


def _strategy_table(report: SimulationReport) -> str:
    rows = []
    found = report.rows(report.stage)
    best = next(result for result in found if result.strategy == "optimal")
    for result in found:
        name = "your plan" if result is report.own else result.strategy
        if result.breakdown is None:
            rows.append((name, "no plan", "", "", "", "", ""))
            continue
        rows.append(
            (
                name,
                f"{result.breakdown.step_time_s:.4g}",
                f"{result.samples_per_s:.4g}",
                f"{result.tokens_per_s:.0f}",
                percent(result.idle_fraction),
                percent(result.mfu),
                _gain(best, result),
            )
        )
    return format_table(("strategy", "step s", "samples/s", "tokens/s", "idle", "MFU", "optimal is"), rows)


def _gain(best: StrategyResult, other: StrategyResult) -> str:
    if other.samples_per_s == 0.0 or best.samples_per_s == 0.0:
        return "-"
    return f"{best.samples_per_s / other.samples_per_s:.2f}x"


def _cephalo_line(result: CephaloResult) -> str:
    if result.even_state_step_time_s == float("inf"):
        return (
            f"Uneven training state at ZeRO-3 (simulated): {result.step_time_s:.4g} s a step; even state does not fit."
        )
    return (
        f"Uneven training state at ZeRO-3 (simulated, Cephalo's cost model): {result.step_time_s:.4g} s a step "
        f"against {result.even_state_step_time_s:.4g} s with even state under the same model, {result.gain:.2f}x."
    )


def to_json(report: SimulationReport) -> dict[str, Any]:
    """A JSON-ready form."""
    advice = report.advice
    return {
        "simulated": report.simulated,
        "emulated": report.emulated,
        "title": report.title,
        "global_batch_size": report.batch,
        "zero_stage": report.stage,
        **_headline(report.own),
        "plan": None if report.own is None else _result_to_json(report.own),
        "zero_stages": {
            str(stage): [_result_to_json(result) for result in found] for stage, found in report.results.items()
        },
        "cephalo": None if report.cephalo is None else _cephalo_to_json(report.cephalo),
        "advice": None if advice is None else {**advice.to_dict(), "sentences": list(advice.sentences())},
    }


def _headline(own: StrategyResult | None) -> dict[str, Any]:
    """The figures of the user's own plan where a script looks first: at the top."""
    if own is None:
        return {}
    names = ("step_time_s", "samples_per_s", "tokens_per_s", "idle_fraction", "mfu")
    return {name: _result_to_json(own)[name] for name in names}


def _result_to_json(result: StrategyResult) -> dict[str, Any]:
    parts = result.breakdown
    return {
        "strategy": result.strategy,
        "problem": result.problem,
        "step_time_s": None if parts is None else parts.step_time_s,
        "exposed_communication_s": None if parts is None else parts.exposed_communication_s,
        "samples_per_s": result.samples_per_s,
        "tokens_per_s": result.tokens_per_s,
        "idle_fraction": result.idle_fraction,
        "idle_fraction_by_rank": list(result.idle_fractions),
        "mfu": result.mfu,
        "plan": None if result.plan is None else result.plan.to_dict(),
    }


def _cephalo_to_json(result: CephaloResult) -> dict[str, Any]:
    even = result.even_state_step_time_s
    fits = even != float("inf")
    return {
        "step_time_s": result.step_time_s,
        "even_state_step_time_s": even if fits else None,
        "gain": result.gain if fits else None,
        "max_micro_batch_size": list(result.max_micro_batch_size),
        "state_fraction": list(result.state_fraction),
    }
