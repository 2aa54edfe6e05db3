"""`PoplarAccelerator`: plain Accelerate loops on unequal ranks.

The loop stays as it is. `prepare` profiles the model on the loader's own data, plans, and replaces the loader by one
that yields this rank's micro-batches; `backward` weights each loss so that the average over the ranks is the gradient
of the whole global batch; optimizer and scheduler take one step per optimizer step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from .config import EmulationConfig, LaunchEnvironment, PoplarConfig, resolve_config
from .errors import CompatibilityError, ConfigError, DataError, raise_together
from .evaluation import EvaluationLoader, EvaluationSampler, evaluation_shares, gather_rows
from .loader import HostOrder
from .loop_checks import batch_problems, setting_problems
from .loop_loader import LoopLoader, LoopOrder, SkippedLoader, inherited_settings, loader_problems, stock_batch_size
from .loop_optimizer import LoopEngineOptimizer, LoopOptimizer
from .loop_run import AUTO, LoopHost, LoopRun, LossFunction
from .loop_settings import (
    accumulation_of,
    chosen_plugin,
    data_parallel_settings,
    plugin_for,
    start_state,
    undivided,
    written_config,
)
from .loop_state import LoopState, newest_checkpoint
from .loop_step import LoopStep
from .plan import Plan
from .run_request import BatchRequest
from .state_engine import check_shares, shared_state
from .step_loader import step_loader
from .streaming import StreamHead, is_stream
from .trainer_deepspeed import use_plan


class PoplarAccelerator(Accelerator):
    """`Accelerator` for ranks of unequal speed and memory.

    Model, optimizer and training loader go to one `prepare` call, the training loader before any evaluation loader.
    With DeepSpeed (`deepspeed_plugin=PoplarPlugin(...)`, or as the launcher says) ZeRO stages 0 to 3 are planned for;
    without it, the same plan runs under plain data parallelism. Differences from the stock class:

    - The global batch stays what it was (loader's batch size x accumulation steps x ranks); the ranks' shares of it
      differ, and so may the number of micro-batches that an optimizer step has on each.
    - A scheduler takes one step per optimizer step. Stock Accelerate lets it take one per rank.
    - `load_state` continues at the next sample by itself, under whatever plan.

    Args:
        poplar_config: Settings: a `PoplarConfig`, a mapping, or the path of a YAML or JSON file.
        poplar_plan: A plan made beforehand, or the path of one (a checkpoint folder works); nothing is profiled then.
        loss_fn: (model, collated batch) -> the loss that the loop computes. Needed only where that is not what the
            model returns as `loss`, to profile the right thing and to find out what the loss is a mean over.
        loss_reduction: What the loop's loss is: `"auto"` (found out by watching it on a few rows), a mean over
            `"rows"`, over the labels that are not -100 (`"tokens"`; `"shifted_tokens"` leaves out each row's first),
            or a `"sum"`.
        count_items: Items of a collated batch that its mean loss is taken over, where they are none of these.

    Every other argument is the stock `Accelerator`'s.

    Raises:
        ConfigError: Settings contradict each other or the number of ranks; all at once, before anything is measured.
    """

    def __init__(
        self,
        *args: Any,
        poplar_config: PoplarConfig | Mapping[str, Any] | str | Path | None = None,
        poplar_plan: Plan | str | Path | None = None,
        loss_fn: LossFunction | None = None,
        loss_reduction: str = AUTO,
        count_items: Callable[[Any], int] | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        environment = LaunchEnvironment.from_environment()
        plan = poplar_plan if isinstance(poplar_plan, Plan) or poplar_plan is None else Plan.load(poplar_plan)
        plugin = chosen_plugin(arguments, environment)
        config = resolve_config(
            getattr(plugin, "poplar", None) if poplar_config is None else poplar_config,
            deepspeed_config=written_config(plugin),
        )
        if plugin is None and environment.world_size > 1:
            plugin = plugin_for(config, plan)
        written = written_config(plugin)
        emulation = EmulationConfig.from_environment()
        problems = setting_problems(
            config=config,
            emulation=emulation,
            plan=plan,
            deepspeed_config=written,
            world_size=environment.world_size,
            loss_reduction=loss_reduction,
            arguments=arguments,
        )
        raise_together(problems, ConfigError)
        arguments.pop("deepspeed_plugins", None)
        if plugin is not None:
            arguments["deepspeed_plugin"] = plugin
        start_state(arguments, plugin, environment)
        super().__init__(**arguments)
        self._poplar_settings = (config, emulation, plan, written)
        self._poplar_loss = {"loss_fn": loss_fn, "loss_reduction": loss_reduction, "count_items": count_items}
        self.poplar: LoopRun | None = None
        self._loop: LoopStep | None = None

    # ---- set-up -------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As the stock method; profiles and plans where it is given a model with its optimizer and loader.

        Raises:
            ConfigError: Model and optimizer come without a training loader, or batch figures contradict each other.
            DataError: The training loader cannot be shared out.
        """
        model = next((item for item in args if isinstance(item, nn.Module)), None)
        optimizer = next((i for i in args if hasattr(i, "param_groups") or hasattr(i, "params")), None)
        if self.poplar is not None or model is None or optimizer is None:
            return self._counted_once(super().prepare(*args, device_placement=device_placement))
        loader = next((item for item in args if isinstance(item, DataLoader)), None)
        if loader is None:
            raise ConfigError(
                "prepare was given a model and its optimizer, but no training loader to profile and plan with. Give "
                "all three to one call: accelerator.prepare(model, optimizer, loader, scheduler)."
            )
        training = self._plan_for(model, optimizer, loader)
        args = tuple(training if item is loader else undivided(item, self.num_processes) for item in args)
        accumulation, share = self.gradient_accumulation_steps, self.plan.ranks[self.process_index]
        self.gradient_accumulation_steps = len(share.micro_batch_sizes)
        engine_config = self.state.deepspeed_plugin.deepspeed_config if self.state.deepspeed_plugin else None
        try:
            with shared_state(self.plan, self.poplar.ranks, engine_config):
                prepared = super().prepare(*args, device_placement=device_placement)
        finally:
            self.gradient_accumulation_steps = accumulation
        items = prepared if isinstance(prepared, tuple) else (prepared,)
        self._loop.parallel_models = [item for item in items if isinstance(item, DistributedDataParallel)]
        return self._counted_once(self._own_optimizers(prepared))

    def _plan_for(self, model: nn.Module, optimizer: Any, loader: DataLoader) -> LoopLoader:
        config, emulation, given, written = self._poplar_settings
        raise_together(loader_problems(loader), DataError)
        self.gradient_accumulation_steps = accumulation_of(self.gradient_accumulation_steps, written)
        batch = BatchRequest(
            per_device_micro_batch_size=stock_batch_size(loader),
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            world_size=self.num_processes,
        )
        raise_together(batch_problems(batch=batch, config=config, plan=given, deepspeed_config=written))
        run = LoopRun(config=config, emulation=emulation, batch=batch, deepspeed_config=written, given_plan=given)
        host = LoopHost(self, model, optimizer=optimizer, **self._poplar_loss)
        head = StreamHead(loader.dataset, run.ranks) if is_stream(loader.dataset) else None
        rows = loader.dataset if head is None else head.rows
        run.prepare(host, dataset=rows, collate=loader.collate_fn, resumed=None)
        run.weigher.drops_unlabelled = False
        self.poplar, self._loop = run, LoopStep(self, run, model)
        if self.distributed_type == DistributedType.DEEPSPEED:
            use_plan(self, run)
        steps = step_loader(
            run,
            loader.dataset,
            head=head,
            order=lambda: self._order(loader),
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last if head is not None else loader.batch_sampler.drop_last,
            length_column="length",
            loader_kwargs=inherited_settings(loader),
        )
        if self.distributed_type != DistributedType.DEEPSPEED:
            by_length = steps.plan_sampler.cutter is not None
            self.ddp_handler = data_parallel_settings(self.ddp_handler, run.plan, by_length=by_length)
        self._loop.loader = LoopLoader(
            steps,
            control=self._loop,
            dataset=loader.dataset,
            batches_per_step=batch.gradient_accumulation_steps,
        )
        return self._loop.loader

    def _order(self, loader: DataLoader) -> LoopOrder:
        settings = self.dataloader_config
        return LoopOrder(
            loader.batch_sampler.sampler,
            ranks=self.poplar.ranks,
            data_seed=settings.data_seed,
            seedable=settings.use_seedable_sampler,
        )

    def _own_optimizers(self, prepared: Any) -> Any:
        if self.distributed_type != DistributedType.DEEPSPEED:
            return prepared
        items = prepared if isinstance(prepared, tuple) else (prepared,)
        own = {
            id(optimizer): LoopEngineOptimizer(optimizer.optimizer, control=self._loop)
            for optimizer in self._optimizers
        }
        self._optimizers = [own[id(optimizer)] for optimizer in self._optimizers]
        items = tuple(own.get(id(item), item) for item in items)
        return items if isinstance(prepared, tuple) else items[0]

    def _counted_once(self, prepared: Any) -> Any:
        for scheduler in self._schedulers:
            if isinstance(scheduler, AcceleratedScheduler):
                # Accelerate's name for "the global batch does not grow with the ranks": one step per optimizer step.
                scheduler.split_batches = True
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As the stock method; the scheduler takes one step per optimizer step."""
        return self._counted_once(super().prepare_scheduler(scheduler))

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As the stock method; the optimizer takes one step per optimizer step."""
        if self._loop is None or getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        placed = self.device_placement if device_placement is None else device_placement
        own = LoopOptimizer(optimizer, control=self._loop, device_placement=placed, scaler=self.scaler)
        self._optimizers.append(own)
        return own

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> Any:
        """A loader to evaluate with: the ranks take shares by speed, `gather_for_metrics` puts them together."""
        stock = getattr(data_loader, "_is_accelerate_prepared", False) or self.poplar is None
        if stock or is_stream(data_loader.dataset) or loader_problems(data_loader):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        run, size = self.poplar, stock_batch_size(data_loader)
        order = HostOrder(data_loader.batch_sampler.sampler, ranks=run.ranks, seedable=False)
        left_out = len(order) % (size * self.num_processes) if data_loader.batch_sampler.drop_last else 0
        loader = EvaluationLoader(
            data_loader.dataset,
            sampler=EvaluationSampler(
                shares=evaluation_shares(
                    run.plan, run.profile, per_device_batch_size=size, world_size=self.num_processes
                ),
                rank=self.process_index,
                num_rows=len(order) - left_out,
                order=lambda: order(0),
            ),
            collate_fn=data_loader.collate_fn,
            device=self.device if self.device_placement else None,
            stock_batch_size=size,
            **inherited_settings(data_loader),
        )
        self._dataloaders.append(loader)
        return loader

    # ---- in the loop --------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the run; None before `prepare`."""
        return None if self.poplar is None else self.poplar.plan

    @property
    def items_in_step(self) -> int:
        """Items (tokens or rows, see `loss_reduction`) of the running optimizer step over all ranks.

        A sum loss divided by it is the mean over the global batch.
        """
        return 0 if self._loop is None or self._loop.step is None else self._loop.step.total_items

    @property
    def samples_in_step(self) -> int:
        """Samples of the running optimizer step over all ranks."""
        return 0 if self._loop is None or self._loop.step is None else self._loop.step.num_samples

    def step_loss(self) -> torch.Tensor:
        """The loss of the running optimizer step over all ranks' micro-batches so far, a scalar; a collective call.

        On the last micro-step (`sync_gradients`) it is the loss of the global batch.
        """
        if self._loop is None:
            raise CompatibilityError("step_loss() needs a training loader from accelerator.prepare().")
        return self._loop.step_loss()

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """As the stock method: gradients are reduced on the last micro-step of each optimizer step."""
        if self._loop is None or self._loop.micro_step is None:
            with super().accumulate(*models):
                yield
        else:
            with self._loop.running():
                yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As the stock method, with the loss weighted by the micro-batch's share of the global batch."""
        if self._loop is None or self._loop.micro_step is None:
            super().backward(loss, **kwargs)
        else:
            self._loop.backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As the stock method; with DeepSpeed too, and only where the gradients are complete.

        Returns:
            The norm before clipping; on earlier micro-steps that of this rank's gradients so far.
        """
        loop = self._loop
        if loop is None or loop.micro_step is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if self.distributed_type == DistributedType.DEEPSPEED:
            if norm_type != 2:
                raise CompatibilityError(f"DeepSpeed clips by the 2-norm, not by norm_type {norm_type}. Use 2.")
            return loop.clip_engine(float(max_norm))
        if not loop.last:
            gradients = [p.grad for p in parameters if p.grad is not None]
            return torch.nn.utils.get_total_norm(gradients, norm_type)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As the stock method, where the gradients are complete."""
        if self._loop is None or self._loop.last:
            super().clip_grad_value_(parameters, clip_value)

    # ---- where ranks meet ---------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """As the stock method; refused in micro-steps that not all ranks have."""
        self._check_meeting("gather")
        return super().gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As the stock method; refused in micro-steps that not all ranks have."""
        self._check_meeting("reduce")
        return super().reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As the stock method; refused in micro-steps that not all ranks have."""
        self._check_meeting("pad_across_processes")
        return super().pad_across_processes(tensor, *args, **kwargs)

    def wait_for_everyone(self) -> None:
        """As the stock method; refused in micro-steps that not all ranks have."""
        self._check_meeting("wait_for_everyone")
        super().wait_for_everyone()

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What all ranks hold for the rows of one batch, each row once, in the dataset's order.

        Raises:
            DataError: Under unequal shares a tensor holds something else than one entry per row.
        """
        active = self.gradient_state.active_dataloader
        if isinstance(active, EvaluationLoader):
            return gather_rows(
                input_data,
                rows=active.rows,
                rank=self.process_index,
                stock_batch_size=active.stock_batch_size,
                as_objects=use_gather_object,
            )
        if self._loop is None or self._loop.micro_step is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        self._check_meeting("gather_for_metrics")
        rows = tuple(self.poplar.ranks.gather(self._loop.rows))
        return gather_rows(input_data, rows=rows, rank=self.process_index, as_objects=use_gather_object)

    def _check_meeting(self, name: str) -> None:
        if self._loop is not None:
            self._loop.check_meeting(name)

    # ---- stop and continue --------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the stock method, with the plan and the position in the data (samples consumed)."""
        location = super().save_state(output_dir, *args, **kwargs)
        loop = self._loop
        if loop is not None and self.is_main_process:
            loader = loop.loader
            LoopState(
                epoch=loader.iteration,
                samples_consumed=loader.samples_done,
                batches_done=loader.batches_done,
                global_batch_size=loop.global_batch_size,
            ).save(location)
            self.poplar.save(location)
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As the stock method; the next iteration of the training loader continues at the next sample.

        `skip_first_batches` is not needed afterwards, and does no harm.

        Raises:
            ConfigError: The checkpoint was trained with another global batch size, or its training state was cut by
                other shares.
        """
        if self._loop is None:
            super().load_state(input_dir, *args, **kwargs)
            return
        folder = newest_checkpoint(self.project_dir) if input_dir is None else Path(input_dir).expanduser()
        if self.distributed_type == DistributedType.DEEPSPEED:
            check_shares(self.plan, self.poplar.ranks, self.state.deepspeed_plugin.deepspeed_config, folder)
        super().load_state(input_dir, *args, **kwargs)
        self._loop.resume(LoopState.load(folder))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As the stock method; for the training loader `num_batches` counts as `len(loader)` does.

        Raises:
            DataError: It would begin in the middle of an optimizer step.
        """
        if isinstance(dataloader, LoopLoader):
            return SkippedLoader(dataloader, dataloader.step_for(num_batches))
        return super().skip_first_batches(dataloader, num_batches)
