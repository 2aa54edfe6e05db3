"""One run on unequal ranks: settings in, plan and weights out. `PoplarTrainer` and `PoplarAccelerator` stand on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ._compat import installed_faults
from .comm import Ranks, agree, connect, decide
from .config import EmulationConfig, PoplarConfig, default_cache_dir
from .console import ProfilingProgress, quiet_third_party, say, warn
from .device import DeviceFacts
from .emulated_rank import EmulatedRank
from .emulation import Emulation
from .errors import RankError
from .host import compile_options
from .inspection import is_partitioned, model_name, whole_parameters
from .loss import HONOURED, LossRule
from .measure import explain_memory, profile_cluster
from .memory import DTYPE_NAMES
from .model_state import ModelSize, model_size, model_states
from .plan import PLAN_FILE_NAME, Plan
from .planning import find_shared_plan, reusable_plan
from .preflight import agree_on_dtype, preflight
from .probe_data import ProbeData, sequence_length
from .profile_cache import ProfileCache
from .profiles import ClusterProfile
from .report import print_plan
from .run_host import Host, agree_on_loss
from .run_request import BatchRequest, candidate_stages
from .sampler import PlanSampler
from .state_engine import loads_universal
from .watch import ComputeClock, RunWatch, event_line
from .weighting import StepWeigher

PROFILE_FILE_NAME = "profiles.json"


class PoplarRun:
    """State of one run on one rank.

    Args:
        config: The settings.
        emulation: Emulated ranks, if any.
        batch: The batch figures without Poplar.
        deepspeed_config: The DeepSpeed config as the user wrote it.
        given_plan: A plan made beforehand; nothing is profiled then.
    """

    def __init__(
        self,
        *,
        config: PoplarConfig,
        emulation: EmulationConfig,
        batch: BatchRequest,
        deepspeed_config: Mapping[str, Any] | None = None,
        given_plan: Plan | None = None,
    ) -> None:
        self.config = config
        self.emulation_config = emulation
        self.batch = batch
        self.deepspeed_config = dict(deepspeed_config or {})
        self.given_plan = given_plan
        self.ranks: Ranks = connect(config.timeout_s)
        self.plan: Plan | None = None
        self.profile: ClusterProfile | None = None
        self.loss_rule: LossRule | None = None
        self.weigher: StepWeigher | None = None
        self.model_size: ModelSize | None = None
        self.clock: ComputeClock | None = None
        self.watch: RunWatch | None = None
        self._emulated = EmulatedRank.of(emulation, self.ranks.rank)
        self._optimizer_bytes: float | None = None
        self._device = torch.device("cpu")

    # ---- before training ----------------------------------------------------------------------------------------

    def prepare(
        self,
        host: Host,
        *,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        resumed: Plan | None,
        resumed_profile: ClusterProfile | None = None,
    ) -> Plan:
        """Agree on the loss, profile where needed, and plan; a collective call.

        Args:
            host: The trainer or loop.
            dataset: The map-style training dataset.
            collate: Its collate function.
            resumed: The plan of the checkpoint that training continues from, if any.
            resumed_profile: The profile it was made from; on the same devices both are used again.

        Returns:
            The plan, the same on every rank.
        """
        self._device = host.device
        quiet_third_party()
        facts = self._look_at_devices(host)
        data = ProbeData(dataset, collate)
        stages = candidate_stages(self.config, self.deepspeed_config, partitioned_model=is_partitioned(host.model))
        global_batch_size = self.batch.global_batch_size(self.config, resumed=resumed, given=self.given_plan)
        self._optimizer_bytes = decide(self.ranks, host.optimizer_bytes)
        if self._emulated is not None:
            self._emulated.attach(host.model, row=data.longest(1))
        with whole_parameters(host.model):
            self.loss_rule = self._agree_on_loss(host, data)
        reusable = reusable_plan(
            resumed, resumed_profile, config=self.config, emulation=self.emulation_config, stages=stages, facts=facts
        )
        plan, self.profile = find_shared_plan(
            ranks=self.ranks,
            config=self.config,
            batch=self.batch,
            stages=stages,
            global_batch_size=global_batch_size,
            profile=lambda wanted: self._measure(host, data, wanted, global_batch_size),
            given=self.given_plan or reusable,
            explain=explain_memory,
            say=self.say,
            resumed=None if loads_universal(self.deepspeed_config) else resumed,
        )
        if reusable is not None and plan is reusable:
            self.profile = resumed_profile
            self.say("same devices as in the checkpoint: its plan is used again, nothing is profiled")
        agree(self.ranks, plan.digest, "the plan")
        self.plan = plan
        self.weigher = self._make_weigher(host, data, plan)
        self.model_size = model_size(host.model)
        for remark in getattr(self.profile, "remarks", ()):
            self.say(remark)
        if self.profile is not None:
            self.pace_by(self.profile)
        self._start_watching(host, plan)
        if self.ranks.rank == 0:
            self._show(host, plan)
        return plan

    def _look_at_devices(self, host: Host) -> Sequence[DeviceFacts]:
        """Every rank's device, found fit to train; all ranks compute in a dtype that each of them has."""
        for fault in installed_faults() if self.ranks.rank == 0 else ():
            warn(fault)
        facts = preflight(self.ranks, device=host.device, timeout_s=self.config.timeout_s).facts
        dtype = agree_on_dtype(facts, host.dtype, allow_fp16=self.config.allow_fp16)
        if dtype is not host.dtype:
            self.say(f"all ranks compute in {DTYPE_NAMES[dtype]}: a device lacks {DTYPE_NAMES[host.dtype]}")
            host.use_dtype(dtype)
        return facts

    def watch_loss(self, host: Host, *, dataset: Any, collate: Callable[[list[Any]], Any]) -> LossRule:
        """What the loss is a mean over, without a plan; a collective call."""
        with whole_parameters(host.model):
            return self._agree_on_loss(host, ProbeData(dataset, collate))

    def _agree_on_loss(self, host: Host, data: ProbeData) -> LossRule:
        return agree_on_loss(self.ranks, host, data)

    def _measure(self, host: Host, data: ProbeData, stages: tuple[int, ...], global_batch_size: int) -> ClusterProfile:
        honoured = self.loss_rule.kind == HONOURED

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            # The count only scales the loss here; read off a shape, it exists for tensors without values too.
            items = torch.tensor(batch["labels"].numel(), device=self._device) if honoured else None
            return host.loss(model, batch, items)

        with ProfilingProgress(active=self.ranks.rank == 0, world_size=self.ranks.world_size) as progress:
            return profile_cluster(
                model=host.model,
                loss_fn=loss_fn,
                make_batch=data.longest,
                shortest=data.shortest(),
                ranks=self.ranks,
                device=host.device,
                dtype=host.dtype,
                zero_stages=stages,
                largest_micro_batch=global_batch_size,
                user_caps=self.config.caps_by_rank(self.ranks.world_size),
                memory_fraction=self.config.memory_fraction_of(self.ranks.rank),
                optimizer_bytes_per_parameter=self._optimizer_bytes,
                budget_s=self.config.profile_budget_s,
                relative_error=self.config.profile_relative_error,
                model_name=model_name(host.model),
                seq_len=sequence_length(data.rows(1)),
                progress=progress,
                emulation=self.emulation,
                deepspeed_config=self.deepspeed_config,
                compile_options=compile_options(),
                uneven_state=self.config.plans_state,
                cache=ProfileCache(
                    folder=Path(self.config.cache_dir) if self.config.cache_dir else default_cache_dir(),
                    refresh=self.config.reprofile,
                ),
            )

    def _counter(self, host: Host) -> Callable[[Any], int]:
        rule = self.loss_rule

        def count(batch: Any) -> int:
            by_host = host.count(batch) if rule.kind == HONOURED else None
            return rule.count(batch) if by_host is None else by_host

        return count

    def _make_weigher(self, host: Host, data: ProbeData, plan: Plan) -> StepWeigher:
        count = self._counter(host)
        return StepWeigher(
            rule=self.loss_rule,
            world_size=self.ranks.world_size,
            zero_stage=plan.zero_stage,
            ghost=data.ghost(count),
            sum_over_ranks=self.sum_over_ranks,
            count=count,
        )

    def _show(self, host: Host, plan: Plan) -> None:
        """Print the table."""
        states = model_states(
            self.model_size,
            dtype=host.dtype,
            zero_stage=plan.zero_stage,
            world_size=1,
            optimizer_bytes_per_parameter=self._optimizer_bytes,
        )
        print_plan(
            plan, self.profile, emulated=self.emulation_config.active, state_bytes=states.sharded(plan.zero_stage)
        )

    def _start_watching(self, host: Host, plan: Plan) -> None:
        self.clock = ComputeClock(
            host.model,
            host.device,
            waits_inside=plan.zero_stage == 3 and self.ranks.world_size > 1,
            emulation=self.emulation,
        )
        self.watch = RunWatch(
            ranks=self.ranks,
            config=self.config,
            device=host.device,
            profile=self.profile,
            emulated=self.emulation_config.active,
            parameters=sum(getattr(p, "ds_numel", p.numel()) for p in host.model.parameters()),
        )

    @property
    def emulation(self) -> Emulation | None:
        """What this rank pretends to be, if anything."""
        return None if self._emulated is None else self._emulated.emulation

    def pace_by(self, profile: ClusterProfile) -> None:
        """Let an emulated rank take as long as a profile says, from now on; called after `prepare`.

        Args:
            profile: Of the plan's stage and the run's rows; the run's own is used without being asked for.
        """
        if self._emulated is not None:
            self._emulated.pace_by(profile, zero_stage=self.plan.zero_stage)

    # ---- while training -----------------------------------------------------------------------------------------

    @contextmanager
    def micro_step(self, model: nn.Module, batch: Any) -> Iterator[None]:
        """Around each forward and backward pass; names the rank where it runs out of memory.

        Args:
            model: The model, wrapped or not.
            batch: The micro-batch.

        Raises:
            RankError: The device is out of memory.
        """
        try:
            with self._as_emulated(model, batch):
                yield
        except torch.OutOfMemoryError as error:
            sizes = list(self.plan.ranks[self.ranks.rank].micro_batch_sizes) if self.plan else []
            raise RankError(
                f"rank {self.ranks.rank}: out of memory while running micro-batches of {sizes} samples ({error}). "
                "Lower max_micro_batch_size or memory_fraction for this rank in the Poplar settings."
            ) from error

    def _as_emulated(self, model: nn.Module, batch: Any) -> AbstractContextManager[None]:
        if self._emulated is None:
            return nullcontext()
        return self._emulated.micro_step(model, batch, plan=self.plan, profile=self.profile)

    def look(self, sampler: PlanSampler, *, step: int) -> dict[str, Any] | None:
        """Judge the plan at the steps the settings name, and change it where they say so; a collective call.

        Args:
            sampler: The training loader's sampler.
            step: Optimizer steps of the run so far.

        Returns:
            A line for the run's history where there was something to say, else None.
        """
        if self.config.replan == "off" or step % self.config.replan_every or sampler.cutter is not None:
            # Steps that are cut by predicted time do not have the plan's sizes to be judged by.
            return None
        verdict = self.watch.look(self.plan)
        if verdict is None:
            return None
        text, kind = verdict.describe(), "straggler"
        changeable = self.config.replan == "on" and not sampler.fixed_plan
        if verdict.gain >= self.config.replan_threshold and changeable:
            first = max(self.ranks.gather(sampler.next_step))
            sampler.set_plan(verdict.better, from_step=first)
            self.plan = verdict.better
            text, kind = f"{text}: changed to it from step {first} of this epoch on", "replan"
        elif verdict.gain >= self.config.replan_threshold:
            text += (
                "; a stream that a loader process reads ahead keeps its plan"
                if sampler.fixed_plan
                else '; set replan: "on" in the Poplar settings to change plans by itself'
            )
        self.say(text)
        return event_line(step=step, kind=kind, text=text, rank=verdict.slowest_drift_rank)

    def sum_over_ranks(self, value: int) -> int:
        """The sum of one whole number over all ranks; a collective call on the training device."""
        if self.ranks.world_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(total)
        return int(total.item())

    def save(self, folder: str | Path) -> None:
        """Write the plan, and the profile where there is one, to a folder."""
        self.plan.save(folder)
        if self.profile is not None:
            self.profile.save(Path(folder) / PROFILE_FILE_NAME)

    def write_report(self, folder: str | Path) -> None:
        """Write `poplar_report.html` from what lies in a run's folder, where the settings ask for it."""
        if not self.config.report:
            return
        # matplotlib is slow to import and needed only here.
        from .report_html import write_report

        try:
            self.say(f"report: {write_report(Path(folder))}")
        except Exception as problem:  # noqa: BLE001 - a page that cannot be drawn must not cost a finished training
            warn(
                f"no report was written ({type(problem).__name__}: {problem}); try `accelerate-poplar report {folder}`"
            )

    def say(self, text: str) -> None:
        """One line on rank 0."""
        if self.ranks.rank == 0:
            say(text)


def saved_plan(folder: str | Path | None) -> tuple[Plan | None, ClusterProfile | None]:
    """The plan a checkpoint was trained with and the profile it was made from, as far as they are there.

    Raises:
        PlanError, ProfileError: A file is there but broken.
    """
    if folder is None:
        return None, None
    plan, profile = Path(folder) / PLAN_FILE_NAME, Path(folder) / PROFILE_FILE_NAME
    return (
        Plan.load(plan) if plan.is_file() else None,
        ClusterProfile.load(profile) if profile.is_file() else None,
    )
