"""A rank that pretends to be slower or smaller than it is, from its settings through profiling to the end of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from .config import EmulationConfig
from .emulation import Emulation
from .model_state import optimizer_tensors
from .pacing import ProfiledPace
from .plan import Plan
from .profiles import ClusterProfile
from .units import GIB


class EmulatedRank:
    """One rank's emulation, and how it keeps to the profile and the plan while training.

    Args:
        emulation: What the rank pretends to be.
        rank: Which one it is.
    """

    def __init__(self, emulation: Emulation, rank: int) -> None:
        self.emulation = emulation
        self._rank = rank
        self._row: Any = None
        self._pace: ProfiledPace | None = None

    @classmethod
    def of(cls, config: EmulationConfig, rank: int) -> EmulatedRank | None:
        """The emulation that settings ask for on a rank; None where nothing is emulated."""
        if not config.active:
            return None
        emulation = Emulation(
            slowdown=config.slowdown[rank] if config.slowdown else 1.0,
            memory_bytes=int(config.memory_gib[rank] * GIB) if config.memory_gib else None,
        )
        return cls(emulation, rank)

    def attach(self, model: nn.Module, *, row: Any) -> None:
        """Slow a model's passes from now on.

        Args:
            model: Not yet wrapped.
            row: A collated batch of one row such as will be profiled.
        """
        self.emulation.attach(model)
        self._row = row

    def pace_by(self, profile: ClusterProfile, *, zero_stage: int) -> None:
        """Take as long as a profile says, from now on."""
        self._pace = ProfiledPace(profile, zero_stage=zero_stage, rank=self._rank, row=self._row)

    @contextmanager
    def micro_step(
        self, model: nn.Module, batch: Any, *, plan: Plan | None, profile: ClusterProfile | None
    ) -> Iterator[None]:
        """Around a forward and backward pass.

        Args:
            model: The model or its engine.
            batch: The micro-batch; None where it is not known.
            plan: The plan in force.
            profile: What it was made from.

        Raises:
            torch.OutOfMemoryError: The pass needs more memory than the rank pretends to have.
        """
        with self._memory_cap(model, plan, profile), self._paced(batch):
            yield

    @contextmanager
    def _paced(self, batch: Any) -> Iterator[None]:
        if self._pace is None or batch is None:
            yield
            return
        self.emulation.expect(self._pace.seconds(batch))
        try:
            yield
        finally:
            self.emulation.expect(None)

    def _memory_cap(
        self, model: nn.Module, plan: Plan | None, profile: ClusterProfile | None
    ) -> AbstractContextManager[None]:
        memory = getattr(profile, "memory", ())
        if not memory or plan is None:
            return self.emulation.memory_cap()
        states = memory[self._rank].states[plan.zero_stage]
        fractions = plan.state_fractions
        share = 1.0 if fractions is None else plan.world_size * fractions[self._rank]
        base_bytes = states.parameters * (share if plan.zero_stage == 3 else 1.0)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if self._rank in plan.offloading_ranks and device.type == "cpu":
            # To the counter the emulated device and its host are one.
            base_bytes -= share * (states.optimizer + states.step)
        # Some optimizers make their state in the first step, some before it.
        return self.emulation.memory_cap(int(base_bytes), known=model.parameters(), held=optimizer_tensors(model))
