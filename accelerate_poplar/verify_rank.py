"""What one rank of `accelerate-poplar verify` does: train under uneven plans and compare with one process."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers import TrainingArguments, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_callback import PrinterCallback

from .config import LaunchEnvironment, PoplarConfig
from .device import device_facts
from .errors import ConfigError
from .plan import LOCK_STEP_STAGES, Plan, RankPlan
from .trainer import PoplarTrainer
from .trainer_host import TrainerHost
from .verify import CaseResult, VerifyOptions, VerifyReport
from .verify_models import Kind, Row, collate, find_kinds, make_rows

STEPS = 4
LEARNING_RATE = 0.05
TOLERANCE = {"cpu": 1e-5}
"""Relative difference that counts as equal, by kind of device; accelerators add in another order every time."""
ACCELERATOR_TOLERANCE = 1e-4
NEGLIGIBLE = 1e-3
"""Figures below this are compared absolutely, in units of it."""

_SHAPES = ((3, 2), (1, 0), (2, 1), (1, 1))
"""Micro-batches of ranks 0, 1, 2, 3, and over again; 0 = nothing to run in that micro-step."""


@dataclass
class Found:
    """Differences between a run and what one process gets."""

    tolerance: float
    largest: float = 0.0
    problems: list[str] = field(default_factory=list)

    def numbers(self, name: str, got: list[float], want: list[float]) -> None:
        """Compare what was logged at every step."""
        if len(got) != len(want):
            self._add(float("inf"), f"{name}: logged at {len(got)} optimizer steps, expected {len(want)}")
            return
        for step, (ours, theirs) in enumerate(zip(got, want, strict=True), start=1):
            difference = abs(ours - theirs) / max(abs(theirs), NEGLIGIBLE)
            self._add(difference, f"{name} at step {step}: {ours:.8g}, one process has {theirs:.8g}")

    def tensors(self, got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
        """Compare every parameter after the last step."""
        for name, value in want.items():
            largest = max(value.abs().max().item(), NEGLIGIBLE)
            difference = (got[name] - value).abs().max().item() / largest
            self._add(difference, f"parameter {name}: differs by {difference:.2g} of its largest value {largest:.3g}")

    def _add(self, difference: float, text: str) -> None:
        # Written so that NaN counts as a difference.
        if not difference <= self.tolerance:
            self.problems.append(text)
        self.largest = difference if not difference <= self.largest else self.largest


def uneven_plan(zero_stage: int, world_size: int) -> Plan:
    """A plan whose ranks differ in everything they may differ in at that stage."""
    sizes: list[tuple[int, ...]] = [_SHAPES[rank % len(_SHAPES)] for rank in range(world_size)]
    if zero_stage not in LOCK_STEP_STAGES:
        sizes = [tuple(size for size in own if size) for own in sizes]
    return Plan(
        zero_stage=zero_stage,
        global_batch_size=sum(map(sum, sizes)),
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=tuple(RankPlan(rank=rank, micro_batch_sizes=tuple(own)) for rank, own in enumerate(sizes)),
    )


def run(options: VerifyOptions, *, trainer_class: type[PoplarTrainer] = PoplarTrainer) -> VerifyReport:
    """Run every case; a collective call, the same report on every rank.

    Args:
        options: What to verify.
        trainer_class: The trainer that is put to the test.

    Raises:
        ConfigError: The user's model cannot be built.
    """
    warnings.simplefilter("ignore")
    kinds = find_kinds(options)
    cases = []
    for name, kind in kinds.items():
        for stage in options.zero_stages:
            started = time.perf_counter()
            trainer, found = _case(kind, stage, trainer_class)
            ranks, plan = trainer.poplar.ranks, trainer.poplar_prepare()
            reports = ranks.gather((found.largest, found.problems))
            cases.append(
                CaseResult(
                    kind=name,
                    zero_stage=stage,
                    micro_batch_sizes=tuple(own.micro_batch_sizes for own in plan.ranks),
                    largest_difference=max(largest for largest, _ in reports),
                    problems=_by_rank([problems for _, problems in reports]),
                    seconds=time.perf_counter() - started,
                )
            )
    return VerifyReport(
        ranks=tuple(ranks.gather(_where(trainer.args.device))),
        model=options.model or "",
        steps=STEPS,
        tolerance=_tolerance(trainer.args.device),
        versions={name: version(name) for name in ("torch", "accelerate", "transformers", "deepspeed")},
        cases=tuple(cases),
    )


def _case(kind: Kind, zero_stage: int, trainer_class: type[PoplarTrainer]) -> tuple[PoplarTrainer, Found]:
    plan = uneven_plan(zero_stage, LaunchEnvironment.from_environment().world_size)
    batch = plan.global_batch_size
    # The last step is a short one.
    rows = make_rows(kind, (STEPS - 1) * batch + (batch + 1) // 2)
    trainer = _train(kind, plan, rows, trainer_class)
    device = trainer.args.device
    found = Found(_tolerance(device))
    losses, norms, parameters = _one_process(kind, rows, batch, device, TrainerHost(trainer))
    log = trainer.state.log_history
    found.numbers("loss", [entry["loss"] for entry in log if "loss" in entry], losses)
    # DeepSpeed gives no gradient norm at stage 0.
    if any("grad_norm" in entry for entry in log):
        found.numbers("gradient norm", [entry["grad_norm"] for entry in log if "grad_norm" in entry], norms)
    found.tensors(_parameters(trainer), parameters)
    return trainer, found


def _train(kind: Kind, plan: Plan, rows: list[Any], trainer_class: type[PoplarTrainer]) -> PoplarTrainer:
    # Each case is a run of its own; the host libraries keep the settings of the one before in the process.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    set_seed(3)
    model = kind.model()
    with tempfile.TemporaryDirectory(prefix="accelerate-poplar-") as folder:
        trainer = trainer_class(
            model=model,
            args=_arguments(folder, plan.zero_stage),
            train_dataset=rows,
            data_collator=collate,
            poplar_config=PoplarConfig(replan="off", report=False),
            poplar_plan=plan,
            **kind.trainer_kwargs,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer


def _arguments(folder: str, zero_stage: int) -> TrainingArguments:
    batch_keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    deepspeed = {
        **dict.fromkeys(batch_keys, "auto"),
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
        # Left out, Accelerate would clip to a norm of 1.
        "gradient_clipping": 0.0,
    }
    return TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        seed=11,
        learning_rate=LEARNING_RATE,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        label_names=["labels"],
        log_level="error",
        deepspeed=deepspeed,
    )


def _one_process(
    kind: Kind, rows: list[Any], global_batch_size: int, device: torch.device, host: TrainerHost
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final parameters of plain gradient descent on the whole global batches."""
    set_seed(3)
    model: nn.Module = kind.model().to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for start in range(0, len(rows), global_batch_size):
        batch = {name: value.to(device) for name, value in collate(rows[start : start + global_batch_size]).items()}
        loss = kind.loss(model, batch) if kind.loss is not None else _stock_loss(host, model, batch)
        torch.autograd.backward(loss)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        losses.append(loss.item())
        norms.append(sum(float(g.double().pow(2).sum()) for g in gradients) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach().cpu() for name, p in model.named_parameters()}


def _stock_loss(host: TrainerHost, model: nn.Module, batch: Row) -> torch.Tensor:
    count = host.count(batch)
    return host.loss(model, batch, None if count is None else torch.tensor(count, device=host.device))


def _parameters(trainer: PoplarTrainer) -> dict[str, torch.Tensor]:
    """The trained parameters, whole; a collective call at ZeRO-3."""
    import deepspeed

    named = dict(trainer.accelerator.unwrap_model(trainer.model_wrapped).named_parameters())
    partitioned = [p for p in named.values() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        return {name: p.detach().float().cpu().clone() for name, p in named.items()}


def _by_rank(reports: list[list[str]]) -> tuple[str, ...]:
    """Problems with the ranks they were found on; what all ranks found is said once."""
    ranks: dict[str, list[int]] = {}
    for rank, problems in enumerate(reports):
        for problem in problems:
            ranks.setdefault(problem, []).append(rank)
    return tuple(
        problem if len(found) == len(reports) else f"rank {', '.join(map(str, found))}: {problem}"
        for problem, found in ranks.items()
    )


def _tolerance(device: torch.device) -> float:
    return TOLERANCE.get(device.type, ACCELERATOR_TOLERANCE)


def _where(device: torch.device) -> str:
    facts = device_facts(device)
    return f"{facts.host} ({facts.device})"


def main(arguments: list[str], *, trainer_class: type[PoplarTrainer] = PoplarTrainer) -> int:
    """Entry of a rank that `verify.launch` started.

    Args:
        arguments: The options as JSON, and the path that the report is written to.
        trainer_class: The trainer that is put to the test.

    Returns:
        0, also when something differs or a setting is wrong: that is in the file.
    """
    options = VerifyOptions.from_json(arguments[0])
    try:
        found = run(options, trainer_class=trainer_class).to_dict()
    except ConfigError as error:
        found = {"error": str(error)}
    # Ranks of one machine may share the file, so each puts it in place whole.
    target = Path(arguments[1])
    own = target.with_name(f"rank{LaunchEnvironment.from_environment().rank}-{target.name}")
    own.write_text(json.dumps(found), encoding="utf-8")
    own.replace(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
