"""Optimizers of a plain loop: one step per optimizer step, gradients kept from its first micro-step to its last."""

from __future__ import annotations

from typing import Any, Protocol

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DeepSpeedOptimizerWrapper


class StepControl(Protocol):
    """The accelerator as its optimizers see it."""

    def holds_gradients(self) -> bool:
        """True while gradients of earlier micro-steps of the running optimizer step wait for the next backward."""

    def before_backward(self) -> bool:
        """True from a micro-batch's arrival until its backward."""

    def step_done(self) -> None:
        """An optimizer step was taken."""

    def engine_step(self) -> None:
        """Let DeepSpeed take the step it owes."""


class LoopOptimizer(AcceleratedOptimizer):
    """Accelerate's optimizer wrapper for loops that may call `zero_grad` before the forward pass or after the step."""

    def __init__(self, optimizer: Any, *, control: StepControl, **kwargs: Any) -> None:
        super().__init__(optimizer, **kwargs)
        self._control = control

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, except those that earlier micro-steps of this optimizer step have left."""
        if self._control.holds_gradients():
            return
        if self._control.before_backward():
            # What is there belongs to the last optimizer step, also when this micro-step is not the last of its own.
            self.optimizer.zero_grad(**({} if set_to_none is None else {"set_to_none": set_to_none}))
            return
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        """Take the optimizer step on the last micro-step; nothing on the others."""
        super().step(closure)
        if self.gradient_state.sync_gradients:
            self._control.step_done()


class LoopEngineOptimizer(DeepSpeedOptimizerWrapper):
    """The optimizer of a DeepSpeed engine, whose step is taken here and not inside `backward`.

    So a loop can look at the gradients, or clip them, where it always did: between `backward` and `step`.
    """

    def __init__(self, optimizer: Any, *, control: StepControl) -> None:
        super().__init__(optimizer)
        self._control = control
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """Take the optimizer step where the engine owes one."""
        self._control.engine_step()
