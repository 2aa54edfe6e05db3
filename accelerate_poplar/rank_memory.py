"""Where a rank's largest micro-batch comes from, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .memory import ActivationMemory
from .model_state import ModelStates


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's memory, known and needed."""

    device_bytes: int
    """Memory of the device, in bytes."""
    budget_bytes: int
    """What training may use: `memory_fraction` of the free memory."""
    activations: ActivationMemory
    """What a micro-batch needs on top of the training state."""
    measured_correction: float
    """Measured over predicted activations at the largest size compared; 1 where nothing was compared."""
    states: Mapping[int, ModelStates]
    """Training state by ZeRO stage, under even shares."""
    proven_cap: int | None = None
    """Largest micro-batch left after memory ran out in spite of the prediction; None when it never did."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        data = asdict(self)
        data["states"] = {str(stage): states for stage, states in data["states"].items()}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankMemory:
        """Read the JSON form."""
        states = {int(stage): ModelStates(**entry) for stage, entry in data["states"].items()}
        return cls(**{**data, "states": states, "activations": ActivationMemory(**data["activations"])})

    @property
    def margin(self) -> float:
        """Share of the device's memory that is left alone, 0 to 1."""
        return 1.0 - self.budget_bytes / self.device_bytes if self.device_bytes else 0.0

    def needed_bytes(self, zero_stage: int, micro_batch_size: int = 1) -> int:
        """Bytes of a micro-batch at a stage, or of the sum of gradients or the optimizer step where those need more."""
        states = self.states[zero_stage]
        return max(states.total + self.activations.at(micro_batch_size), states.at_reduction, states.at_step)


def explain(rank: int, device: str, memory: RankMemory, zero_stage: int) -> str:
    """A sentence for a rank that cannot hold one sample: bytes needed, bytes had, what would help."""
    states, one_sample = memory.states[zero_stage], memory.activations.at(1)
    gradients = states.gradients + states.fresh_gradients
    if states.at_step > max(states.total + one_sample, states.at_reduction):
        gradients, last = states.gradients, f"{gib(states.step)} in the optimizer step"
    elif states.reduction > one_sample:
        last = f"{gib(states.buffers)} buffers, {gib(states.reduction)} to sum gradients over ranks"
    else:
        last = f"{gib(states.buffers)} buffers, {gib(one_sample)} activations"
    higher = "a higher ZeRO stage, " if zero_stage < 3 else ""
    return (
        f"rank {rank} ({device}): ZeRO stage {zero_stage} with one sample needs "
        f"{gib(memory.needed_bytes(zero_stage))} ({gib(states.parameters)} parameters, {gib(gradients)} "
        f"gradients, {gib(states.optimizer)} optimizer, {last}), but {gib(memory.budget_bytes)} of "
        f"{gib(memory.device_bytes)} may be used. What helps: {higher}gradient checkpointing, shorter sequences, "
        "optimizer offload (state_offload: auto), a larger memory_fraction, or leaving this rank out."
    )


def gib(count: float) -> str:
    """Bytes as a person reads them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
