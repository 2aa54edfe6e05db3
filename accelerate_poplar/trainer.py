"""`PoplarTrainer`: the Hugging Face `Trainer` on unequal ranks.

To the stock loop, one optimizer step is one "batch": a `StepBatch` of this rank's micro-batches. So every rank counts the
same steps whatever its number of micro-steps, and the host's step, epoch, schedule and resume logic stays as it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import seed_worker

from .arguments import PoplarTrainingArguments
from .batch_metrics import local_metrics, record_together
from .checks import check_run
from .config import EmulationConfig, PoplarConfig, resolve_config
from .errors import raise_together
from .host import prepare_arguments
from .loader import HostOrder, PoplarDataLoader, StepBatch
from .loss import HONOURED
from .plan import Plan
from .run import PoplarRun, saved_plan
from .run_request import BatchRequest
from .state_engine import check_shares, require_shares, shared_state
from .step_loader import step_loader
from .streaming import StreamHead, StreamLoader, is_stream
from .trainer_deepspeed import original_deepspeed_config, refresh_deepspeed, use_deepspeed, use_plan
from .trainer_evaluation import PoplarEvaluationMixin
from .trainer_host import TrainerHost
from .watch import StepRecord, append_history
from .weighting import MicroStep, WeightedStep, unchanged_statistics
from .wrapped_trainer import as_wanted, init_signature, reference_conflicts, trainer_conflicts, wanted_arguments


class PoplarTrainerMixin(PoplarEvaluationMixin):
    """Puts any `Trainer` subclass on unequal ranks; `PoplarTrainer` is this over the stock `Trainer`.

    Args:
        poplar_config: Settings: a `PoplarConfig`, a mapping, or the path of a YAML or JSON file. None: see
            `resolve_config` for where else they come from.
        poplar_plan: A plan made beforehand, or the path of one (as `accelerate-poplar plan` writes it); nothing is
            profiled then, and its ZeRO stage and global batch size are the run's.

    Every other argument is the wrapped trainer's.

    Raises:
        ConfigError: Settings contradict each other, the training arguments or the number of ranks; all at once, before
            anything is built or measured.
        DataError: The training dataset is empty.
    """

    def __init__(
        self,
        *args: Any,
        poplar_config: PoplarConfig | Mapping[str, Any] | str | Path | None = None,
        poplar_plan: Plan | str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        bound = init_signature(type(self), PoplarTrainerMixin).bind(*args, **kwargs)
        given_args = bound.arguments.get("args")
        raise_together(trainer_conflicts(type(self), given_args))
        training_args = as_wanted(given_args, wanted_arguments(bound.signature))
        bound.arguments["args"] = training_args
        prepare_arguments(training_args)
        deepspeed_config = original_deepspeed_config(training_args)
        flags = given_args.poplar_overrides() if isinstance(given_args, PoplarTrainingArguments) else None
        if poplar_config is None and isinstance(given_args, PoplarTrainingArguments):
            poplar_config = given_args.poplar_config
        config = resolve_config(poplar_config, deepspeed_config=deepspeed_config, overrides=flags)
        plan = poplar_plan if isinstance(poplar_plan, Plan) or poplar_plan is None else Plan.load(poplar_plan)
        batch = BatchRequest(
            per_device_micro_batch_size=training_args.per_device_train_batch_size,
            gradient_accumulation_steps=training_args.gradient_accumulation_steps,
            world_size=training_args.world_size,
        )
        emulation = EmulationConfig.from_environment()
        check_run(
            config=config,
            plan=plan,
            emulation=emulation,
            args=training_args,
            batch=batch,
            deepspeed_config=deepspeed_config,
            train_dataset=bound.arguments.get("train_dataset"),
        )
        use_deepspeed(training_args, config)
        self.poplar = PoplarRun(
            config=config, emulation=emulation, batch=batch, deepspeed_config=deepspeed_config or {}, given_plan=plan
        )
        self._poplar_samples_seen = 0
        self._poplar_step: WeightedStep | None = None
        self._poplar_loader: PoplarDataLoader | StreamLoader | None = None
        self._poplar_head: StreamHead | None = None
        self._poplar_looked_at = 0
        super().__init__(*bound.args, **bound.kwargs)

    # ---- set-up -------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As the wrapped trainer, then put the DeepSpeed config's batch keys into the plan's hands."""
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled:
            refresh_deepspeed(self.accelerator, self.args)

    def poplar_prepare(self, checkpoint: str | Path | None = None) -> Plan:
        """Profile and plan, once; a collective call. Training calls it by itself.

        Args:
            checkpoint: The folder of the checkpoint that training continues from.

        Returns:
            The plan of the run.
        """
        if self.poplar.plan is None:
            raise_together(reference_conflicts(self))
            dataset, collate = self._poplar_data()
            if is_stream(dataset):
                self._poplar_head = StreamHead(dataset, self.poplar.ranks)
                dataset = self._poplar_head.rows
            resumed, profile = saved_plan(checkpoint)
            self.poplar.prepare(
                TrainerHost(self), dataset=dataset, collate=collate, resumed=resumed, resumed_profile=profile
            )
            if self.is_deepspeed_enabled:
                use_plan(self.accelerator, self.poplar)
            if self.is_world_process_zero():
                os.makedirs(self.args.output_dir, exist_ok=True)
                self.poplar.save(self.args.output_dir)
        return self.poplar.plan

    def get_train_dataloader(self) -> PoplarDataLoader | StreamLoader:
        """A loader whose items are this rank's micro-batches of one optimizer step."""
        if self.train_dataset is None:
            raise ValueError("PoplarTrainer: training requires a train_dataset.")
        self.poplar_prepare()
        dataset, collate = self._poplar_data()
        self._poplar_loader = step_loader(
            self.poplar,
            dataset,
            head=self._poplar_head if is_stream(dataset) else None,
            order=lambda: HostOrder(
                self._get_train_sampler(dataset),
                ranks=self.poplar.ranks,
                data_seed=self.args.data_seed,
                seedable=self.args.accelerator_config.use_seedable_sampler,
            ),
            collate_fn=collate,
            drop_last=self.args.dataloader_drop_last,
            length_column=self.args.length_column_name,
            loader_kwargs=self._poplar_loader_settings(),
        )
        return self._poplar_loader

    def _poplar_loader_settings(self) -> dict[str, Any]:
        args, workers = self.args, self.args.dataloader_num_workers
        return {
            "num_workers": workers,
            "pin_memory": args.dataloader_pin_memory and torch.accelerator.is_available(),
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context if workers else None,
            "prefetch_factor": args.dataloader_prefetch_factor if workers else None,
            "worker_init_fn": partial(seed_worker, num_workers=workers, rank=args.process_index),
        }

    def _poplar_data(self) -> tuple[Any, Any]:
        return self._poplar_columns(self.train_dataset, "Training")

    def _poplar_columns(self, dataset: Any, description: str) -> tuple[Any, Any]:
        """A dataset and a collate function between which the columns the model does not take are left out."""
        import datasets

        if isinstance(dataset, datasets.Dataset):
            return self._remove_unused_columns(dataset, description=description), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description=description)

    # ---- the host's training loop -------------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        self.poplar_prepare(resume_from_checkpoint)
        self._poplar_samples_seen = self._poplar_looked_at = 0
        with self._one_batch_per_step():
            return super()._inner_training_loop(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """As the wrapped trainer, with the engine's training state in the plan's shares."""
        if not self.is_deepspeed_enabled:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        plan, ranks = self.poplar.plan, self.poplar.ranks
        engine_config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        if self.model_wrapped is not self.model:
            require_shares(plan, self.model_wrapped)
            if resume_from_checkpoint is not None:
                check_shares(plan, ranks, engine_config, resume_from_checkpoint)
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        with shared_state(plan, ranks, engine_config, checkpoint=resume_from_checkpoint):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    @contextmanager
    def _one_batch_per_step(self) -> Iterator[None]:
        """The loop sees one batch per optimizer step; the accumulation is in the plan."""
        self.args.gradient_accumulation_steps = 1
        try:
            yield
        finally:
            self.args.gradient_accumulation_steps = self.poplar.batch.gradient_accumulation_steps

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The global batch size of the plan."""
        plan = self.poplar.plan
        return super().get_total_train_batch_size(args) if plan is None else plan.global_batch_size

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        loader = kwargs.get("train_dataloader")
        resuming = kwargs.get("resume_from_checkpoint") is not None and kwargs["epoch"] == kwargs["epochs_trained"]
        if isinstance(loader, (PoplarDataLoader, StreamLoader)) and resuming and not self.args.ignore_data_skip:
            loader.set_epoch(kwargs["epoch"])
            loader.plan_sampler.skip_steps(kwargs["steps_trained_in_current_epoch"])
        return super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """This rank's part of one optimizer step, and the number of items in the whole step; a collective call."""
        step = next(epoch_iterator, None)
        if not isinstance(step, StepBatch):
            return ([] if step is None else [step]), None
        self._poplar_step = self.poplar.weigher.weigh(step)
        self._poplar_samples_seen += step.num_samples
        return [step], torch.tensor(self._poplar_step.total_items, device=device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """All micro-steps of one optimizer step; returns this rank's weighted loss.

        The mean of the returned value over the ranks is the loss of the whole global batch.
        """
        if not isinstance(inputs, StepBatch):
            return super().training_step(model, inputs, num_items_in_batch)
        started = time.perf_counter()
        micro_steps = self._poplar_step.micro_steps
        metrics = []
        total = torch.zeros((), device=self.args.device)
        for number, micro_step in enumerate(micro_steps, start=1):
            last = number == len(micro_steps)
            self.accelerator.gradient_state._set_sync_gradients(last)
            run = partial(super().training_step, model, self._poplar_inputs(micro_step), num_items_in_batch)
            with (
                self._weighted(micro_step),
                self.poplar.micro_step(model, micro_step.batch),
                self._deferred_reduction(model, last),
                local_metrics(self, share=micro_step.share) as found,
            ):
                total = total + run().to(total.dtype)
            metrics.append(found)
            self.poplar.clock.micro_step_done()
            if not last:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        record_together(self, "train", metrics, self.poplar.ranks)
        self.poplar.watch.record(
            StepRecord(
                step_time_s=time.perf_counter() - started,
                compute_time_s=self.poplar.clock.take(),
                num_samples=inputs.num_samples,
                num_tokens=self._poplar_tokens(inputs, masked=False),
                full=inputs.num_samples == self.poplar.plan.global_batch_size
                and self._poplar_loader.plan_sampler.cutter is None,
            )
        )
        return total

    def _poplar_inputs(self, micro_step: MicroStep) -> Any:
        # compute_loss may take labels out of the mapping it is given; the ghost batch is used again.
        return dict(micro_step.batch) if isinstance(micro_step.batch, Mapping) else micro_step.batch

    @contextmanager
    def _weighted(self, micro_step: MicroStep) -> Iterator[None]:
        """Let the stock training step multiply its loss by the micro-step's weight."""
        before = (self.loss_is_scaled_for_ga, self.args.average_tokens_across_devices)
        self.loss_is_scaled_for_ga = False
        self.current_gradient_accumulation_steps = 1.0 / micro_step.weight if micro_step.weight else float("inf")
        self.args.average_tokens_across_devices = False
        try:
            with unchanged_statistics(self.model, active=micro_step.weight == 0.0):
                yield
        finally:
            self.loss_is_scaled_for_ga, self.args.average_tokens_across_devices = before

    @contextmanager
    def _deferred_reduction(self, model: nn.Module, last: bool) -> Iterator[None]:
        if last or self.is_deepspeed_enabled:
            yield
        else:
            with self.accelerator.no_sync(model):
                yield

    def floating_point_ops(self, inputs: Any) -> int:
        """Floating-point operations of this rank's micro-batches, as the wrapped trainer counts them."""
        batches = inputs.micro_batches if isinstance(inputs, StepBatch) else [inputs]
        return sum(super(PoplarTrainerMixin, self).floating_point_ops(batch) for batch in batches if batch is not None)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if not isinstance(inputs, StepBatch):
            super()._track_num_input_tokens(inputs)
            return
        if self.args.include_num_input_tokens_seen == "no":
            return
        tokens = self._poplar_tokens(inputs, masked=self.args.include_num_input_tokens_seen == "non_padding")
        self.state.num_input_tokens_seen += self.poplar.sum_over_ranks(tokens)

    def _poplar_tokens(self, step: StepBatch, *, masked: bool) -> int:
        """Tokens of this rank's micro-batches, padding left out where `masked` and a mask is there."""
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = 0
        for batch in step.micro_batches:
            if isinstance(batch, Mapping) and name in batch:
                by_mask = masked and batch.get("attention_mask") is not None
                tokens += int(batch["attention_mask"].sum()) if by_mask else batch[name].numel()
        return tokens

    # ---- metrics ------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        step = self.state.global_step
        logging = self.control.should_log and step > self._globalstep_last_logged
        super()._maybe_log_save_evaluate(*args, **kwargs)
        lines = []
        if logging:
            found = self.poplar.watch.summarise(self.poplar.plan, step=step)
            if found is not None:
                self._report_metrics(found[0])
                lines.append(found[1])
        if step > self._poplar_looked_at and self._poplar_loader is not None:
            self._poplar_looked_at = step
            lines.append(self.poplar.look(self._poplar_loader.plan_sampler, step=step))
        if self.is_world_process_zero():
            for line in lines:
                if line is not None:
                    append_history(self.args.output_dir, line)

    def _report_metrics(self, values: dict[str, float]) -> None:
        """Hand metrics to the reporting integrations; the terminal shows the run's own lines only."""
        for callback in self.callback_handler.callbacks:
            if not isinstance(callback, (PrinterCallback, ProgressCallback)):
                callback.on_log(self.args, self.state, self.control, logs=dict(values), model=self.model)

    # ---- evaluation ---------------------------------------------------------------------------------------------

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped trainer, without multiplying a plain mean by the number of ranks."""
        rule = self.poplar.loss_rule
        if rule is not None and rule.kind == HONOURED:
            return super().prediction_step(*args, **kwargs)
        before, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = before

    # ---- ends ---------------------------------------------------------------------------------------------------

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        # The stock loop adds rank 0's own remainder to a loss that was averaged over the ranks up to there.
        self._tr_loss = self.accelerator.gather(self._tr_loss.detach().reshape(1)).mean()
        steps = self.state.global_step - self._initial_global_step
        if steps > 0:
            # The stock formula takes the share of `steps` in max_steps; this makes the result the samples really run.
            num_train_samples = self._poplar_samples_seen * max(self.state.max_steps, 1) / steps
        output = super()._finalize_training(trial, num_train_samples, start_time)
        if self.is_world_process_zero():
            self.poplar.write_report(self.args.output_dir)
        return output

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        accumulation = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = self.poplar.batch.gradient_accumulation_steps
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.gradient_accumulation_steps = accumulation
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero() and folder.is_dir():
            self.poplar.save(folder)


class PoplarTrainer(PoplarTrainerMixin, Trainer):
    """`Trainer` on unequal ranks. See `PoplarTrainerMixin`."""
