"""The step-time model over given curves and clusters."""

from __future__ import annotations

from .step_model import StepBreakdown, break_down_plan, step_time

__all__ = ["StepBreakdown", "break_down_plan", "step_time"]
