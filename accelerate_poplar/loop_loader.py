"""What a plain loop iterates: its micro-batches one by one, and the sampler's order as stock Accelerate draws it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from .comm import Ranks
from .errors import DataError
from .loader import HostOrder, StepBatch
from .loop_state import LoopState
from .sampler import IndexArray
from .streaming import is_stream
from .weighting import MicroStep, WeightedStep, unchanged_statistics


class StepLoader(Protocol):
    """Yields one rank's `StepBatch` per optimizer step."""

    def __iter__(self) -> Iterator[StepBatch]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch the next iteration follows."""

    def begin_at(self, step: int) -> None:
        """Let the next iteration begin with that optimizer step of the epoch."""


class LoopControl(Protocol):
    """The accelerator as its loader sees it."""

    device: torch.device
    global_batch_size: int
    loop_model: torch.nn.Module

    def weigh(self, step: StepBatch) -> WeightedStep:
        """Weights of one optimizer step; a collective call."""

    def begin_micro_step(self, micro_step: MicroStep, step: WeightedStep, *, number: int, in_step: bool) -> None:
        """The loop is about to run a micro-batch."""

    def finish_micro_step(self) -> None:
        """The loop asked for the next micro-batch."""

    def leave_micro_step(self) -> None:
        """The micro-batch is done with, also where the loop was left in the middle of it."""


class LoopLoader:
    """The training loader of a plain loop: one micro-batch of this rank at a time.

    `len()` and `skip_first_batches` count in the batches the stock loader would have had (the loader's batch size on
    each rank): `gradient_accumulation_steps` of them are one optimizer step. So a script's own arithmetic (steps per
    epoch, the length of a schedule, where to resume) stays right, and is the same on all ranks, whatever the plan. How
    many micro-batches an optimizer step really has is the plan's business and may differ between ranks.

    Args:
        steps: The rank's optimizer steps.
        control: The accelerator.
        dataset: The dataset, for scripts that ask.
        batches_per_step: Stock batches per optimizer step, at least 1.
    """

    def __init__(self, steps: StepLoader, *, control: LoopControl, dataset: Any, batches_per_step: int) -> None:
        self.steps = steps
        self.dataset = dataset
        self.batches_per_step = batches_per_step
        self.iteration = 0
        self.samples_done = 0
        self.batches_done = 0
        self.end_of_dataloader = False
        self.remainder = -1
        self.gradient_state = GradientState()
        self._control = control
        self._resumed: LoopState | None = None
        self._samples_begun = 0
        self._is_accelerate_prepared = True

    def __len__(self) -> int:
        return len(self.steps) * self.batches_per_step

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch the next iteration follows; without it, epochs count themselves."""
        if epoch != self.iteration:
            self._resumed = None
        self.iteration = epoch

    def resume(self, state: LoopState) -> None:
        """Let the next iteration begin where a checkpoint was made."""
        self.iteration = state.epoch
        self.samples_done = state.samples_consumed
        self._resumed = state

    def step_done(self) -> None:
        """The optimizer step of the running micro-batch was taken."""
        self.samples_done = self._samples_begun

    def step_for(self, num_batches: int) -> int:
        """The optimizer step that begins after `num_batches` stock batches; after `load_state`, the checkpoint's next.

        Raises:
            DataError: That is in the middle of an optimizer step.
        """
        if self._resumed is not None:
            return self._resumed.steps
        steps, rest = divmod(num_batches, self.batches_per_step)
        if rest:
            raise DataError(
                f"skip_first_batches({num_batches}) would begin inside an optimizer step: {self.batches_per_step} "
                f"batches make one step. Skip a multiple of {self.batches_per_step}."
            )
        return steps

    def __iter__(self) -> Iterator[Any]:
        return self.run(0 if self._resumed is None else self._resumed.steps)

    def run(self, first_step: int) -> Iterator[Any]:
        """One epoch from an optimizer step on."""
        self.steps.set_epoch(self.iteration)
        self.steps.begin_at(first_step)
        self.samples_done = self._samples_begun = first_step * self._control.global_batch_size
        self.batches_done = 0 if self._resumed is None else self._resumed.batches_done
        self._resumed = None
        self.end_of_dataloader = False
        self.gradient_state._add_dataloader(self)
        try:
            for step, last in _with_last(iter(self.steps)):
                self._samples_begun += step.num_samples
                yield from self._micro_batches(step, last=last)
        finally:
            self.gradient_state._remove_dataloader(self)
        self.iteration += 1
        self.samples_done = self.batches_done = 0

    def _micro_batches(self, step: StepBatch, *, last: bool) -> Iterator[Any]:
        control = self._control
        weighted = control.weigh(step)
        for number, micro_step in enumerate(weighted.micro_steps):
            self.end_of_dataloader = last and number == len(weighted.micro_steps) - 1
            batch = send_to_device(micro_step.batch, control.device)
            self.batches_done += 1
            with ExitStack() as stack:
                stack.enter_context(unchanged_statistics(control.loop_model, active=micro_step.weight == 0.0))
                stack.callback(control.leave_micro_step)
                control.begin_micro_step(micro_step, weighted, number=number, in_step=step.in_step)
                yield batch
                control.finish_micro_step()


class SkippedLoader:
    """A `LoopLoader` that begins later; for one epoch, as `skip_first_batches` gives it."""

    def __init__(self, loader: LoopLoader, first_step: int) -> None:
        self.loader = loader
        self.first_step = first_step
        self._is_accelerate_prepared = True

    def __len__(self) -> int:
        return len(self.loader) - self.first_step * self.loader.batches_per_step

    def __iter__(self) -> Iterator[Any]:
        return self.loader.run(self.first_step)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def _with_last(steps: Iterator[StepBatch]) -> Iterator[tuple[StepBatch, bool]]:
    """Each step with whether it is the last one."""
    held = next(steps, None)
    while held is not None:
        following = next(steps, None)
        yield held, following is None
        held = following


class LoopOrder(HostOrder):
    """The global sample order of a plain loop's epochs, as Accelerate draws it on several ranks.

    Epoch e gets the e-th permutation that the sampler's generator draws, so that a run that begins in a later epoch
    sees what an uninterrupted one does. A `RandomSampler` without a generator is given one, seeded by one draw from
    torch's.
    """

    def __init__(self, sampler: Any, *, ranks: Ranks, data_seed: int | None, seedable: bool) -> None:
        if isinstance(sampler, RandomSampler) and not seedable and sampler.generator is None:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        super().__init__(sampler, ranks=ranks, data_seed=data_seed, seedable=seedable)
        self._drawn = 0

    def __call__(self, epoch: int) -> IndexArray:
        """All dataset indices of one epoch, shape (samples,)."""
        progressive = not self._same_everywhere and not hasattr(self.sampler, "set_epoch")
        while progressive and self.ranks.rank == 0 and self._drawn < epoch:
            self._draw()
            self._drawn += 1
        self._drawn += 1
        return super().__call__(epoch)


def loader_problems(loader: DataLoader) -> list[str]:
    """Why a training loader cannot be shared out between unequal ranks, one sentence each."""
    sampler = loader.batch_sampler
    if is_stream(loader.dataset):
        if loader.batch_size is None:
            return [_NO_BATCH_SIZE]
        return []
    if sampler is None:
        return [_NO_BATCH_SIZE]
    if type(sampler) is not BatchSampler:
        return [
            f"the training loader was built with its own batch_sampler ({type(sampler).__name__}), which decides the "
            "batches itself, and so does a plan. Give the loader a sampler of single indices and a batch_size instead."
        ]
    if hasattr(sampler.sampler, "num_replicas"):
        return [
            f"the training loader's sampler ({type(sampler.sampler).__name__}) hands each rank a part of the data, "
            "and so does a plan: most samples would never be seen. Give it an ordinary sampler, or shuffle=True."
        ]
    return []


_NO_BATCH_SIZE = (
    "the training loader has batch_size None, so it yields single samples (or batches that the dataset made) and "
    "there is nothing to share out. Give it the batch_size that each rank would have without Poplar."
)


def stock_batch_size(loader: DataLoader) -> int:
    """The loader's batch size, also where it was given as torch's own `BatchSampler`."""
    return loader.batch_size if loader.batch_size is not None else loader.batch_sampler.batch_size


def inherited_settings(loader: DataLoader) -> dict[str, Any]:
    """What a loader that replaces another one keeps of it."""
    workers = loader.num_workers
    return {
        "num_workers": workers,
        "pin_memory": loader.pin_memory and torch.accelerator.is_available(),
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context if workers else None,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor if workers else None,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": loader.pin_memory_device,
    }
