"""What every rank of `bench_profile.py` does: profile, and train at every stage under the plan found."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_callback import PrinterCallback

from accelerate_poplar import Plan, PoplarConfig, PoplarTrainer, find_plan
from accelerate_poplar.curve import StepTimeCurve
from accelerate_poplar.device import synchronize
from accelerate_poplar.host import has_accelerator, start_gloo_state
from accelerate_poplar.measure import MeasuredProfile

WARM_UP = 3
"""First optimizer steps of a run, not measured."""
VOCABULARY = 1024
REPEATS = 4
"""Micro-steps that one size costs: a warm-up and three repeats."""


class StepClock(TrainerCallback):
    """Times from the end of one optimizer step to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, *others: Any, **kwargs: Any) -> None:
        synchronize(args.device)
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """One time per measured step."""
        return [after - before for before, after in zip(self.ends[WARM_UP:], self.ends[WARM_UP + 1 :], strict=False)]


def make_model(job: Mapping[str, Any]) -> torch.nn.Module:
    """The model, the same at every call."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": job["hidden"],
        "intermediate_size": 4 * job["hidden"],
        "num_hidden_layers": job["layers"],
        "num_attention_heads": 4,
        "max_position_embeddings": job["seq_len"],
    }
    set_seed(5)
    if job["model"] == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, use_cache=False))
    return BertForMaskedLM(BertConfig(**shape))


def make_trainer(
    job: Mapping[str, Any], folder: str, stage: int | None, config: PoplarConfig, plan: Plan | None, clock: StepClock
) -> PoplarTrainer:
    """A trainer in a fresh host state; `stage` None leaves the stage open."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    if not has_accelerator():
        start_gloo_state()
    deepspeed = None
    if stage is not None:
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        deepspeed = {
            **dict.fromkeys(keys, "auto"),
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": "auto"},
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
        }
    ids = torch.randint(4, VOCABULARY, (256, job["seq_len"]), generator=torch.Generator().manual_seed(1))
    args = TrainingArguments(
        output_dir=folder,
        max_steps=job["steps"] + WARM_UP + 1,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        seed=5,
        bf16=has_accelerator(),
        log_level="error",
        dataloader_pin_memory=False,
        deepspeed=deepspeed,
        **({} if has_accelerator() else {"accelerator_config": {"use_configured_state": True}}),
    )
    trainer = PoplarTrainer(
        model=make_model(job),
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[clock],
        poplar_config=config,
        **({} if plan is None else {"poplar_plan": plan}),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def profile(job: Mapping[str, Any], global_batch_size: int) -> MeasuredProfile:
    """Measure everything anew."""
    config = PoplarConfig(
        zero_stage="auto",
        global_batch_size=global_batch_size,
        profile_budget_s=job["profile_budget_s"],
        reprofile=True,
        replan="off",
        report=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(job, folder, None, config, None, StepClock())
        trainer.poplar_prepare()
    measured = trainer.poplar.profile
    if not isinstance(measured, MeasuredProfile):
        raise TypeError(f"expected a fresh profile, not {type(measured).__name__}")
    return measured


def run(job: Mapping[str, Any], measured: MeasuredProfile, stage: int, global_batch_size: int) -> dict[str, Any]:
    """Train at one stage under the optimal plan."""
    plan = find_plan(measured, global_batch_size=global_batch_size, zero_stage=stage)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(job, folder, stage, PoplarConfig(replan="off", report=False), plan, clock)
        trainer.poplar_prepare()
        trainer.poplar.pace_by(measured)
        trainer.train()
    del trainer
    gc.collect()
    seconds = clock.seconds()
    return {
        "zero_stage": stage,
        "predicted_step_time_s": plan.predicted_step_time_s,
        "measured_step_time_s": statistics.median(seconds),
        "step_times_s": seconds,
        "per_micro_step_s": measured.stage(stage).per_micro_step_s,
        "per_step_s": measured.stage(stage).per_step_s,
        "micro_batch_sizes": [list(rank.micro_batch_sizes) for rank in plan.ranks],
    }


def every_size(measured: MeasuredProfile) -> dict[str, float]:
    """What timing every size up to the cap would have cost the slowest rank."""
    costs = []
    for number, rank in enumerate(measured.ranks):
        cap = max(stage.max_micro_batch_size[number] for stage in measured.zero_stages.values())
        costs.append(REPEATS * float(StepTimeCurve.fit(rank.points, max_micro_batch_size=cap).times().sum()))
    return {"seconds": max(costs), "micro_steps": REPEATS * cap}


def main() -> int:
    """Run one setting; rank 0 writes the results."""
    warnings.simplefilter("ignore")
    job, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    global_batch_size = job["per_rank_samples"] * int(os.environ["WORLD_SIZE"])
    measured = profile(job, global_batch_size)
    runs = [run(job, measured, stage, global_batch_size) for stage in job["zero_stages"]]
    result = {
        "slowdown": job["slowdown"],
        "emulated": measured.emulated,
        "model": job["model"],
        "num_parameters": measured.num_parameters,
        "global_batch_size": global_batch_size,
        "runs": runs,
        "profile": {"seconds": measured.seconds, "micro_steps": max(measured.timed_micro_steps)},
        "every_size": every_size(measured),
        "points": [[[p.micro_batch_size, p.step_time_s] for p in rank.points] for rank in measured.ranks],
    }
    if int(os.environ["RANK"]) == 0:
        output.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
