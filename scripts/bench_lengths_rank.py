"""What every rank of `bench_lengths.py` does: train in each way in turn, and note samples, padding and compute."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_callback import PrinterCallback

from accelerate_poplar import PoplarConfig, PoplarTrainerMixin
from accelerate_poplar.comm import Ranks, connect
from accelerate_poplar.emulation import Emulation
from accelerate_poplar.host import start_gloo_state

WARM_UP = 3
"""First optimizer steps of a run, not measured."""
VOCABULARY, LONGEST = 1024, 512
LEARNING_RATE = 0.05
STRATEGIES = {"group_by_length": "group_by_length", "batch_rebalance": "batch_rebalance"}
OURS = "PoplarTrainer"
Row = dict[str, Any]


@dataclass
class Notes:
    """One rank's figures of one run, by optimizer step."""

    samples: list[list[int]] = field(default_factory=list)
    padded_tokens: list[int] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def begin_step(self) -> None:
        """Room for the next step."""
        self.samples.append([])
        self.padded_tokens.append(0)
        self.compute_s.append(0.0)


class StepNoter(TrainerCallback):
    """Parts the notes by optimizer step."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.notes.begin_step()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.notes.ends.append(time.perf_counter())


class NotingTrainer(Trainer):
    """The stock trainer; notes every micro-batch it trains on."""

    notes: Notes
    emulation: Emulation
    _training_now = False

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        before, self._training_now = self.emulation.compute_time(), True
        try:
            loss = super().training_step(*args, **kwargs)
        finally:
            self._training_now = False
        self.notes.compute_s[-1] += self.emulation.compute_time() - before
        return loss

    def compute_loss(self, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs = dict(inputs)
        ids = inputs.pop("row")
        if self._training_now:
            self.notes.samples[-1] += ids.tolist()
            self.notes.padded_tokens[-1] += inputs["input_ids"].numel()
        return super().compute_loss(model, inputs, *args, **kwargs)


class OurTrainer(PoplarTrainerMixin, NotingTrainer):
    """The same on unequal ranks; every micro-step of the plan passes through `NotingTrainer`."""


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Pad to the longest row."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[number, :length] = labels[number, :length] = torch.tensor(row["input_ids"])
        mask[number, :length] = 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "row": torch.tensor([row["row"] for row in rows]),
    }


class Bench:
    """One ZeRO stage on one rank."""

    def __init__(self, job: Mapping[str, Any], rows: list[list[int]], folder: Path) -> None:
        self.job = job
        self.rows: list[Row] = [{"input_ids": row, "row": number} for number, row in enumerate(rows)]
        self.folder = folder
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.ranks: Ranks | None = None

    def run(self) -> dict[str, Any]:
        """All ways in turn, several rounds."""
        ways = list(self.job["ways"])
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for turn in range(self.job["rounds"]):
            for name in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                self.say(f"ZeRO stage {self.job['zero_stage']}, round {turn + 1} of {self.job['rounds']}: {name}")
                rounds[name].append(self.train(name, compare=turn == 0))
        return {
            "zero_stage": self.job["zero_stage"],
            "slowdown": self.job["slowdown"],
            "global_batch_size": self.job["per_rank_samples"] * self.world_size,
            "ways": {name: self.combined(found) for name, found in rounds.items()},
        }

    @staticmethod
    def combined(rounds: list[dict[str, float]]) -> dict[str, Any]:
        """Medians over the rounds; the loss is compared in the first."""
        names = ("tokens_per_s", "padding_share", "idle_share")
        medians = {name: statistics.median(found[name] for found in rounds) for name in names}
        return {**medians, "loss_difference": rounds[0]["loss_difference"], "rounds": rounds}

    def train(self, way: str, *, compare: bool) -> dict[str, float]:
        """One run; its figures over the measured steps."""
        self.forget()
        notes = Notes()
        with tempfile.TemporaryDirectory() as output:
            common = {
                "model": self.model(),
                "args": self.arguments(output, STRATEGIES.get(way, "random")),
                "train_dataset": self.rows,
                "data_collator": collate,
                "callbacks": [StepNoter(notes)],
            }
            if way == OURS:
                config = PoplarConfig(
                    cache_dir=str(self.folder / "cache"),
                    profile_budget_s=self.job["profile_budget_s"],
                    replan="off",
                    report=False,
                )
                trainer: NotingTrainer = OurTrainer(**common, poplar_config=config)
                trainer.emulation = trainer.poplar.emulation
            else:
                trainer = NotingTrainer(**common)
                trainer.emulation = Emulation(slowdown=self.job["slowdown"][self.rank])
                trainer.emulation.attach(trainer.model)
            trainer.notes = notes
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        self.ranks = self.ranks or connect()
        everyone = self.ranks.gather(notes)
        del trainer, common
        gc.collect()
        figures = self.figures(everyone)
        figures["loss_difference"] = self.loss_difference(everyone, losses) if compare else 0.0
        return figures

    def figures(self, everyone: list[Notes]) -> dict[str, float]:
        """Speed, padding and idle time over the measured steps of all ranks."""
        measured = range(WARM_UP, len(everyone[0].samples))
        real = sum(len(self.rows[row]["input_ids"]) for step in measured for row in self.samples(everyone, step))
        padded = sum(notes.padded_tokens[step] for notes in everyone for step in measured)
        ends = everyone[0].ends
        slowest = sum(max(notes.compute_s[step] for notes in everyone) for step in measured)
        mean = sum(notes.compute_s[step] for notes in everyone for step in measured) / len(everyone)
        return {
            "tokens_per_s": real / (ends[-1] - ends[WARM_UP - 1]),
            "padding_share": 1.0 - real / padded,
            "idle_share": 1.0 - mean / slowest,
        }

    @staticmethod
    def samples(everyone: list[Notes], step: int) -> list[int]:
        """Rows of one step on all ranks, each once (a ghost micro-batch repeats one)."""
        return sorted({row for notes in everyone for row in notes.samples[step]})

    def loss_difference(self, everyone: list[Notes], losses: list[float]) -> float:
        """Largest difference of the logged losses to those of one process with the same samples; rank 0 computes."""
        largest = 0.0
        if self.rank == 0:
            model = self.model().train()
            optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
            for step in range(self.job["checked_steps"]):
                rows = [self.rows[row] for row in self.samples(everyone, step)]
                items = sum(len(row["input_ids"]) - 1 for row in rows)
                total = 0.0
                for row in rows:
                    batch = {key: value for key, value in collate([row]).items() if key != "row"}
                    loss = model(**batch).loss * ((len(row["input_ids"]) - 1) / items)
                    loss.backward()
                    total += float(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
                largest = max(largest, abs(total - losses[step]))
        return float(self.ranks.broadcast(largest))

    def model(self) -> LlamaForCausalLM:
        """The model, the same at every call."""
        set_seed(5)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=LONGEST,
        )
        return LlamaForCausalLM(config)

    def arguments(self, folder: str, strategy: str) -> TrainingArguments:
        """The same for every way, but for the sampling strategy."""
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        accumulation = self.job["accumulation"]
        return TrainingArguments(
            output_dir=folder,
            max_steps=self.job["steps"] + WARM_UP,
            per_device_train_batch_size=self.job["per_rank_samples"] // accumulation,
            gradient_accumulation_steps=accumulation,
            train_sampling_strategy=strategy,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            seed=5,
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            remove_unused_columns=False,
            log_level="error",
            dataloader_pin_memory=False,
            accelerator_config={"use_configured_state": True},
            deepspeed={
                **dict.fromkeys(keys, "auto"),
                "zero_optimization": {"stage": self.job["zero_stage"]},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,
                "steps_per_print": 10**9,
            },
        )

    def forget(self) -> None:
        """Make the host libraries forget the run before, as in a new process."""
        AcceleratorState._reset_state()
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        start_gloo_state()

    def say(self, text: str) -> None:
        """One line on rank 0."""
        if self.rank == 0:
            print(f"bench_lengths: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Run one ZeRO stage; rank 0 writes the results."""
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    os.sched_setaffinity(0, {job["cores"][int(os.environ["RANK"])]})
    bench = Bench(job, rows, folder)
    result = bench.run()
    if bench.rank == 0:
        (folder / "results.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
