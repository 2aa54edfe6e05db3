"""What every rank of `bench_throughput.py` does: profile, plan, and train with each strategy in turn."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from bench_throughput_clock import OwnSpeed, StepClock, TimedStep, Turns
from bench_throughput_judge import EVEN, undecided
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_callback import PrinterCallback

from accelerate_poplar import ClusterProfile, Plan, PoplarConfig, PoplarTrainer, find_plan
from accelerate_poplar.comm import Ranks, connect
from accelerate_poplar.config import EmulationConfig
from accelerate_poplar.curve import StepTimeCurve
from accelerate_poplar.emulation import Emulation
from accelerate_poplar.errors import PlanError
from accelerate_poplar.host import has_accelerator, start_gloo_state
from accelerate_poplar.steady import standard_error

STRATEGIES = ("flops", "proportional", "poplar", "optimal")
WARM_UP = 2
"""First optimizer steps of every plan that are not measured: it meets its sizes for the first time, and memory grows."""
NEARLY = 0.99
"""Of the highest speed of a curve, a speed that the bound may be measured at."""
SAME_WITHIN = 0.01
"""Plans whose micro-batches differ by no more than this are run once."""
SHAPES = {"narrow": (4, 128, 4, 1024), "tiny": (2, 256, 4, 512), "base": (12, 768, 12, 1024)}
"""Layers, hidden size, heads, vocabulary. A narrow model leaves a CPU's cache with more rows: its time per row grows with
the micro-batch, where that of a GPU falls."""


class Bench:
    """One setting on one rank."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job = job
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.rank = int(os.environ["RANK"])
        self.global_batch_size = job["per_rank_samples"] * self.world_size
        self.ranks: Ranks | None = None
        self.own: OwnSpeed | None = None
        emulation = EmulationConfig.from_environment()
        self.slowdown = emulation.slowdown[self.rank] if emulation.slowdown else 1.0

    def run(self, output: Path) -> None:
        """Every model at every stage; after each of them rank 0 writes all results so far."""
        results = []
        for model in self.job["models"]:
            rows = self.rows(model)
            profile = self.profile(model, rows)
            self.own = self.own_speed(model, rows, profile)
            for stage in self.job["zero_stages"]:
                results.append(self.compare(model, stage, rows, profile))
                if self.rank == 0:
                    output.write_text(json.dumps(results), encoding="utf-8")

    def say(self, text: str) -> None:
        """One line on rank 0."""
        if self.rank == 0:
            print(f"bench_throughput: {text}", file=sys.stderr, flush=True)

    # ---- models and data ----------------------------------------------------------------------------------------

    def model(self, name: str) -> torch.nn.Module:
        """The model, the same at every call."""
        layers, hidden, heads, vocabulary = SHAPES[self.job["size"]]
        length = self.job["seq_len"]
        shape = {
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "max_position_embeddings": length,
        }
        set_seed(5)
        if name == "llama":
            return LlamaForCausalLM(LlamaConfig(**shape))
        return BertForMaskedLM(BertConfig(**shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))

    def rows(self, name: str) -> list[dict[str, torch.Tensor]]:
        """As many rows as a run needs; masked once and for all, so that all runs see the same."""
        generator = torch.Generator().manual_seed(1)
        count = self.steps_of_run(len(STRATEGIES)) * self.global_batch_size
        vocabulary = SHAPES[self.job["size"]][-1]
        ids = torch.randint(4, vocabulary, (count, self.job["seq_len"]), generator=generator)
        if name == "llama":
            return [{"input_ids": row, "labels": row} for row in ids]
        # Equally many labels in every row: the stock Trainer's average over ranks is then the average over tokens.
        hidden = torch.rand(ids.shape, generator=generator).argsort(dim=1) < max(1, self.job["seq_len"] // 7)
        labels, masked = ids.masked_fill(~hidden, -100), ids.masked_fill(hidden, 3)
        return [{"input_ids": row, "labels": label} for row, label in zip(masked, labels, strict=True)]

    # ---- profile and plans --------------------------------------------------------------------------------------

    def profile(self, model: str, rows: list[Any]) -> ClusterProfile:
        """The profile of all stages, with a peak for every rank."""
        self.say(f"{self.job['title']}: profiling {model}")
        config = PoplarConfig(
            zero_stage="auto",
            global_batch_size=self.global_batch_size,
            profile_budget_s=self.job["profile_budget_s"],
            profile_relative_error=0.01,
            # A CPU's memory would be no limit. Cards that the even split fits are the usual case.
            max_micro_batch_size=None if has_accelerator() else self.job["per_rank_samples"],
            reprofile=True,
            replan="off",
            report=False,
        )
        with tempfile.TemporaryDirectory() as folder:
            self.forget()
            trainer = PoplarTrainer(
                model=self.model(model),
                args=self.arguments(folder, None, 1, steps=1),
                train_dataset=rows,
                poplar_config=config,
            )
            trainer.poplar_prepare()
        self.ranks = connect()
        found = trainer.poplar.profile
        if min(rank.peak_flops for rank in found.ranks) > 0:
            return found
        # A processor's data sheet knows nothing of cores shared with others; an emulated rank's knows the slowdown.
        factors = self.job["slowdown"] or [1.0] * self.world_size
        peaks = [1e12 / factor for factor in factors]
        ranks = tuple(dataclasses.replace(r, peak_flops=p) for r, p in zip(found.ranks, peaks, strict=True))
        return dataclasses.replace(found, ranks=ranks)

    def plans(self, profile: ClusterProfile, zero_stage: int) -> dict[str, Plan]:
        """The plan of every strategy that has one."""
        found = {}
        for name in STRATEGIES:
            try:
                found[name] = find_plan(
                    profile, global_batch_size=self.global_batch_size, zero_stage=zero_stage, strategy=name
                )
            except PlanError as problem:
                self.say(f"{name} has no plan at ZeRO stage {zero_stage}: {problem}")
        return found

    # ---- runs ---------------------------------------------------------------------------------------------------

    def steps_of_run(self, turns: int) -> int:
        """Optimizer steps of a run in which so many plans take turns."""
        return (WARM_UP + self.job["steps"]) * turns

    def compare(self, model: str, stage: int, rows: list[Any], profile: ClusterProfile) -> dict[str, Any]:
        """All strategies and the even split."""
        plans = self.plans(profile, stage)
        sizes = {EVEN: [[self.job["per_rank_samples"]]] * self.world_size}
        sizes |= {name: [list(rank.micro_batch_sizes) for rank in plan.ranks] for name, plan in plans.items()}
        # Equal plans are run once, under the name of the first.
        first = {name: next(other for other in sizes if as_good_as(sizes[other], own)) for name, own in sizes.items()}
        distinct = {name: plan for name, plan in plans.items() if first[name] == name}
        steps, losses = self.measure(model, stage, rows, profile, distinct, first.get("optimal"))
        speeds = zip(*(step.own_speeds for own in steps.values() for step in own), strict=True)
        own_speeds = [statistics.median(column) for column in speeds]
        strategies = {}
        for name, run in first.items():
            shares = self.shares(steps[run])
            strategies[name] = {
                # What it would be while the ranks are as fast as they were most of the time.
                "samples_per_s": statistics.median(shares) * sum(own_speeds),
                "shares_of_bound": shares,
                "standard_error": standard_error(shares),
                "step_times_s": [step.seconds for step in steps[run]],
                "predicted_step_time_s": plans[name].predicted_step_time_s if name in plans else None,
                "loss_difference": max(abs(loss - even) for loss, even in losses[run]),
                "micro_batch_sizes": sizes[name],
                "same_as": run if run != name else "",
            }
            self.say(f"{model}, ZeRO stage {stage}: {name} {statistics.median(shares):.3f} of the bound")
        return {
            "title": self.job["title"],
            "emulated": bool(self.job["slowdown"]),
            "model": f"{self.job['size']} {model}",
            "zero_stage": stage,
            "global_batch_size": self.global_batch_size,
            "bound_samples_per_s": sum(own_speeds),
            "own_samples_per_s": own_speeds,
            "strategies": strategies,
        }

    def measure(
        self,
        model: str,
        stage: int,
        rows: list[Any],
        profile: ClusterProfile,
        plans: Mapping[str, Plan],
        best: str | None,
    ) -> tuple[dict[str, list[TimedStep]], dict[str, list[tuple[float, float]]]]:
        """The even split, then all plans in turns, then those that cannot be told from the best yet.

        Args:
            plans: By name.
            best: The name of the plan that is judged; None where there is none.

        Returns:
            The measured steps by name, and by name the losses of steps next to the even split's losses, where its shorter
            run has these steps.
        """
        self.say(f"{model}, ZeRO stage {stage}: even")
        timed, even = self.train(model, stage, rows, profile, [])
        steps, losses = {EVEN: timed}, {EVEN: list(zip(even, even, strict=True))}
        turns = list(plans)
        for _ in range(self.job["rounds"]):
            if not turns:
                break
            self.say(f"{model}, ZeRO stage {stage}: {', '.join(turns)} in turns")
            timed, found = self.train(model, stage, rows, profile, [plans[name] for name in turns])
            pairs = list(zip(found, even, strict=False))
            for number, name in enumerate(turns):
                steps.setdefault(name, []).extend(timed[number :: len(turns)])
                losses.setdefault(name, []).extend(pairs[number :: len(turns)])
            shares = {name: self.shares(steps[name]) for name in plans}
            turns = undecided(shares, best, stage) if best in plans else []
        return steps, losses

    def shares(self, steps: Sequence[TimedStep]) -> list[float]:
        """The speed of each step over the sum of the ranks' own speeds around it."""
        return [self.global_batch_size / step.seconds / sum(step.own_speeds) for step in steps]

    def train(
        self, model: str, stage: int, rows: list[Any], profile: ClusterProfile, plans: Sequence[Plan]
    ) -> tuple[list[TimedStep], list[float]]:
        """One run; without plans the stock Trainer's.

        Returns:
            The measured steps, of which the first follows the first plan; and the losses of all steps, rank 0's on every
            rank.
        """
        self.forget()
        turns = max(len(plans), 1)
        clock, count = StepClock(self.own, self.ranks), self.steps_of_run(turns)
        with tempfile.TemporaryDirectory() as folder:
            args = self.arguments(folder, stage, self.job["per_rank_samples"], steps=count)
            common = {"model": self.model(model), "args": args, "train_dataset": rows, "callbacks": [clock]}
            if plans:
                config = PoplarConfig(replan="off", report=False)
                trainer = PoplarTrainer(**common, poplar_plan=plans[0], poplar_config=config)
                trainer.add_callback(Turns(plans, count))
                trainer.poplar_prepare()
                trainer.poplar.pace_by(profile)
            else:
                trainer = Trainer(**common)
                emulation = Emulation(slowdown=self.slowdown)
                emulation.attach(trainer.model)
                emulation.expect(self.pass_seconds(profile, self.job["per_rank_samples"]))
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        # The clock leaves out the first step.
        measured = clock.steps[count - turns * self.job["steps"] - 1 :]
        steps, losses = self.ranks.broadcast((measured, losses))
        del trainer, common
        gc.collect()
        return steps, losses

    def own_speed(self, model: str, rows: list[Any], profile: ClusterProfile) -> OwnSpeed:
        """This rank on its own, at a size that is about as fast as its fastest one: the largest that can be repeated in the
        time there is, else the smallest.
        """
        times = self.curve(profile).times()
        speeds = np.arange(1, len(times)) / times[1:]
        fast = 1 + np.flatnonzero(speeds >= NEARLY * speeds.max())
        size = int(max(fast[times[fast] <= self.job["own_speed_s"] / 2.0], default=fast[0]))
        network = self.model(model).to(self.device()).train()
        batch = {key: torch.stack([row[key] for row in rows[:size]]).to(self.device()) for key in rows[0]}
        emulation = Emulation(slowdown=self.slowdown)
        emulation.expect(self.pass_seconds(profile, size))
        return OwnSpeed(network, batch, emulation, self.job["own_speed_s"])

    def curve(self, profile: ClusterProfile) -> StepTimeCurve:
        """This rank's, up to its largest micro-batch at any stage."""
        caps = [stage.max_micro_batch_size[self.rank] for stage in profile.zero_stages.values()]
        return StepTimeCurve.fit(profile.ranks[self.rank].points, max_micro_batch_size=max(caps))

    def pass_seconds(self, profile: ClusterProfile, size: int) -> float | None:
        """What a micro-batch takes by the profile; None where such sizes were not profiled."""
        times = self.curve(profile).times()
        return float(times[size]) if size < len(times) else None

    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_accelerator() else torch.device("cpu")

    def arguments(self, folder: str, zero_stage: int | None, per_device: int, *, steps: int) -> TrainingArguments:
        """The same for every run."""
        deepspeed = None
        if zero_stage is not None:
            keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
            deepspeed = {
                **dict.fromkeys(keys, "auto"),
                "zero_optimization": {"stage": zero_stage},
                "bf16": {"enabled": "auto"},
                "gradient_clipping": 0.0,
                "steps_per_print": 10**9,
            }
        on_gloo = {} if has_accelerator() else {"accelerator_config": {"use_configured_state": True}}
        return TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=per_device,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            seed=5,
            learning_rate=1e-3,
            max_grad_norm=0.0,
            # The stock Trainer multiplies the loss by the number of ranks where a model takes an item count, also where
            # it ignores the count, as BERT does. All rows have equally many labels, so a rank's own count is right.
            average_tokens_across_devices=False,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            bf16=has_accelerator(),
            log_level="error",
            dataloader_pin_memory=False,
            deepspeed=deepspeed,
            **on_gloo,
        )

    def forget(self) -> None:
        """Make the host libraries forget the run before, as in a new process."""
        AcceleratorState._reset_state()
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        if not has_accelerator():
            start_gloo_state()


def as_good_as(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> bool:
    """True where two plans, sizes by rank and micro-step, are the same but for single samples, which no run could tell."""
    if [len(own) for own in one] != [len(own) for own in other]:
        return False
    pairs = [(a, b) for own, theirs in zip(one, other, strict=True) for a, b in zip(own, theirs, strict=True)]
    return all(abs(a - b) <= SAME_WITHIN * min(a, b) for a, b in pairs)


def main() -> int:
    """Run one setting; rank 0 writes the results."""
    warnings.simplefilter("ignore")
    job, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    if job["cores"]:
        os.sched_setaffinity(0, {job["cores"][int(os.environ["RANK"])]})
    Bench(job).run(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
