"""The optimizer step that a plain loop is in: which micro-step, with what weight, and what is still owed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .errors import CompatibilityError, ConfigError
from .loader import StepBatch
from .loop_loader import LoopLoader
from .loop_run import LoopRun
from .loop_state import LoopState
from .loss import rows_of
from .weighting import MicroStep, WeightedStep


class LoopStep:
    """Follows the loop from micro-batch to micro-batch.

    Args:
        accelerator: Its gradient state, engine and models are kept in step.
        run: The run.
        model: The model, not wrapped.
    """

    def __init__(self, accelerator: Accelerator, run: LoopRun, model: nn.Module) -> None:
        self.run = run
        self.loop_model = model
        self.device: torch.device = accelerator.device
        self.global_batch_size = run.plan.global_batch_size
        self.loader: LoopLoader | None = None
        self.parallel_models: list[DistributedDataParallel] = []
        self.micro_step: MicroStep | None = None
        self.step: WeightedStep | None = None
        self._accelerator = accelerator
        self._number = 0
        self._in_step = True
        self._backward_done = False
        self._engine_owes = False
        self._loss = torch.zeros((), device=self.device)

    @property
    def last(self) -> bool:
        """True on the last micro-step of an optimizer step."""
        return self.step is None or self._number == len(self.step.micro_steps) - 1

    @property
    def rows(self) -> int:
        """Rows of the running micro-batch that count; 0 for one that only takes part."""
        micro_step = self.micro_step
        return rows_of(micro_step.batch) if micro_step is not None and micro_step.weight else 0

    # ---- what the loader tells ----------------------------------------------------------------------------------

    def weigh(self, step: StepBatch) -> WeightedStep:
        """Weights of one optimizer step; a collective call."""
        return self.run.weigher.weigh(step)

    def begin_micro_step(self, micro_step: MicroStep, step: WeightedStep, *, number: int, in_step: bool) -> None:
        """The loop is about to run a micro-batch."""
        self.micro_step, self.step, self._number, self._in_step = micro_step, step, number, in_step
        self._backward_done = False
        if number == 0:
            self._loss = torch.zeros((), device=self.device)
        self._accelerator.gradient_state._set_sync_gradients(self.last)
        engine = self._engine()
        if engine is not None:
            engine.set_gradient_accumulation_boundary(is_boundary=self.last)
        self._reduce_gradients(self.last)

    def finish_micro_step(self) -> None:
        """The loop asked for the next micro-batch."""
        # A loop that relies on DeepSpeed stepping inside backward has not called optimizer.step().
        self.engine_step()

    def leave_micro_step(self) -> None:
        """The micro-batch is done with, also where the loop was left in the middle of it."""
        self.micro_step = None
        self._reduce_gradients(True)

    def _reduce_gradients(self, active: bool) -> None:
        # What DistributedDataParallel.no_sync does, for loops that do not use accumulate() too.
        for model in self.parallel_models:
            model.require_backward_grad_sync = active

    # ---- what the loop does -------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of the running micro-batch's loss, weighted."""
        weighted = loss * self.micro_step.weight
        self._loss = self._loss + weighted.detach().to(self._loss.dtype)
        engine, scaler = self._engine(), self._accelerator.scaler
        if engine is not None:
            engine.backward(weighted, scale_wrt_gas=False, **kwargs)
            self._engine_owes = self.last
        elif scaler is not None:
            scaler.scale(weighted).backward(**kwargs)
        else:
            weighted.backward(**kwargs)
        self._backward_done = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around one pass through the loop's body; names the rank where memory runs out."""
        with self.run.micro_step(self.loop_model, self.micro_step and self.micro_step.batch):
            yield

    def engine_step(self) -> None:
        """Let DeepSpeed take the step it owes."""
        if self._engine_owes:
            self._engine_owes = False
            self._engine().step()
            self.step_done()

    def clip_engine(self, max_norm: float) -> Any:
        """Let DeepSpeed take the step it owes with its gradients clipped; returns their norm before clipping."""
        engine = self._engine()
        if self._engine_owes:
            engine._config.gradient_clipping = max_norm
            if hasattr(engine.optimizer, "clip_grad"):
                engine.optimizer.clip_grad = max_norm
            self.engine_step()
        return engine.get_global_grad_norm()

    def step_loss(self) -> torch.Tensor:
        """The loss of the running optimizer step over all ranks so far; a collective call."""
        self.check_meeting("step_loss")
        total = self._loss.clone()
        if self.run.ranks.world_size > 1:
            torch.distributed.all_reduce(total)
        return total / self.run.ranks.world_size

    def check_meeting(self, name: str) -> None:
        """Refuse a collective call in a micro-step that other ranks do not have.

        Raises:
            CompatibilityError: They would wait for each other for ever.
        """
        if self.micro_step is None or self._in_step or self.last:
            return
        rank = self.run.ranks.rank
        raise CompatibilityError(
            f"rank {rank}: {name}() was called in micro-step {self._number + 1} of {len(self.step.micro_steps)}, "
            f"but at ZeRO stage {self.run.plan.zero_stage} the ranks run different numbers of micro-steps under this "
            "plan: others may never come here. Call it only where all ranks meet: `if accelerator.sync_gradients: ...`."
        )

    def resume(self, state: LoopState | None) -> None:
        """Let the loader continue where a checkpoint was made.

        Raises:
            ConfigError: The checkpoint was trained with another global batch size.
        """
        if state is None:
            return
        if state.global_batch_size != self.global_batch_size:
            raise ConfigError(
                f"the checkpoint was trained with a global batch of {state.global_batch_size} samples, this run has "
                f"{self.global_batch_size}: the next sample and the learning rate could not be continued. Set "
                f"global_batch_size: {state.global_batch_size} in the Poplar settings, or start a new run."
            )
        self.loader.resume(state)

    # ---- what the optimizers ask --------------------------------------------------------------------------------

    def holds_gradients(self) -> bool:
        """True while gradients of earlier micro-steps of the running optimizer step wait for the next backward."""
        return self.before_backward() and self._number > 0

    def before_backward(self) -> bool:
        """True from a micro-batch's arrival until its backward."""
        return self.micro_step is not None and not self._backward_done

    def step_done(self) -> None:
        """An optimizer step was taken."""
        if self.loader is not None and self.micro_step is not None and self.last:
            self.loader.step_done()

    def _engine(self) -> Any:
        if self._accelerator.distributed_type != DistributedType.DEEPSPEED:
            return None
        wrapped = self._accelerator.deepspeed_engine_wrapped
        return None if wrapped is None else wrapped.engine
