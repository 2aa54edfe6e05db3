"""What the suites share: tiny models and data, one run under a plan, and the one-process answer to compare with."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    set_seed,
)

from accelerate_poplar import Plan, PoplarConfig, PoplarTrainer, PoplarTrainerMixin, RankPlan
from accelerate_poplar.comm import connect
from accelerate_poplar.host import start_gloo_state

VOCABULARY = 64
LENGTH = 12
STEPS = 5


class PlainModel(nn.Module):
    """A module that knows nothing of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layers(features).squeeze(-1)}


def squared_error(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A plain mean that ignores the item count."""
    return functional.mse_loss(outputs["logits"], labels)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model, its data, and the independent formula of its loss over a whole batch."""

    model: Callable[[], nn.Module]
    row: Callable[[int, torch.Generator], dict[str, torch.Tensor]]
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    trainer_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def _tokens(index: int, generator: torch.Generator, *, masked: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, VOCABULARY, (LENGTH,), generator=generator)
    labels = ids.clone()
    attention = torch.ones(LENGTH, dtype=torch.long)
    padded = (index * 5) % 8
    if padded:
        labels[-padded:] = -100
        attention[-padded:] = 0
        ids[-padded:] = 0
    if masked:
        labels[torch.rand(LENGTH, generator=generator) > 0.4] = -100
    if index % 7 == 3:
        labels[:] = -100
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}


def _causal_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    total = functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-100, reduction="sum"
    )
    return total / (labels != -100).sum()


def _masked_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"].reshape(-1)
    total = functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels, ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum()


def _class_row(index: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    row = _tokens(index, generator, masked=False)
    return {**row, "labels": torch.tensor(index % 3)}


def _class_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return functional.cross_entropy(logits, batch["labels"])


def _plain_row(index: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"features": torch.randn(6, generator=generator), "labels": torch.randn((), generator=generator)}


def _bert_config(**kwargs: Any) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **kwargs,
    )


def tiny_llama(hidden_size: int = 16, num_hidden_layers: int = 2) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


KINDS = {
    "llama": Kind(tiny_llama, lambda i, g: _tokens(i, g, masked=False), _causal_loss),
    "bert_mlm": Kind(lambda: BertForMaskedLM(_bert_config()), lambda i, g: _tokens(i, g, masked=True), _masked_loss),
    "bert_cls": Kind(lambda: BertForSequenceClassification(_bert_config(num_labels=3)), _class_row, _class_loss),
    "plain": Kind(
        PlainModel,
        _plain_row,
        lambda model, batch: functional.mse_loss(model(batch["features"])["logits"], batch["labels"]),
        {"compute_loss_func": squared_error},
    ),
}


def rows(kind: str, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [KINDS[kind].row(index, generator) for index in range(count)]


def new_model(kind: str) -> nn.Module:
    set_seed(3)
    return KINDS[kind].model()


def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def make_plan(zero_stage: int, sizes: list[list[int]]) -> Plan:
    return Plan(
        zero_stage=zero_stage,
        global_batch_size=sum(map(sum, sizes)),
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=tuple(RankPlan(rank=rank, micro_batch_sizes=tuple(own)) for rank, own in enumerate(sizes)),
    )


def reset_host() -> None:
    """Forget the process-wide state of the host libraries, as a new process would."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DYNAMO_"))]:
        del os.environ[name]


def arguments(
    output_dir: str, *, arguments_class: type[TrainingArguments] = TrainingArguments, **overrides: Any
) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": output_dir,
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 11,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "log_level": "error",
    }
    return arguments_class(**(settings | overrides))


def train(
    kind: str,
    dataset: Any,
    *,
    trainer_class: type = PoplarTrainer,
    trainer_kwargs: dict[str, Any] | None = None,
    model: nn.Module | None = None,
    **overrides: Any,
) -> Any:
    """One training run from a fresh host state; returns the trainer."""
    reset_host()
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(overrides.pop("output_dir", folder), **overrides)
        own = dict(trainer_kwargs or {})
        if issubclass(trainer_class, PoplarTrainerMixin) and "poplar" not in (args.deepspeed or {}):
            own.setdefault("poplar_config", PoplarConfig(report=False))
        trainer = trainer_class(
            model=new_model(kind) if model is None else model,
            args=args,
            train_dataset=dataset,
            data_collator=collate,
            **KINDS[kind].trainer_kwargs,
            **own,
        )
        trainer.train()
    return trainer


def history(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    """The trained parameters, whole, on every rank."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    named = dict(model.named_parameters())
    partitioned = [p for p in named.values() if hasattr(p, "ds_id")]
    if not partitioned:
        return {name: p.detach().float().clone() for name, p in named.items()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned):
        return {name: p.detach().float().clone() for name, p in named.items()}


@dataclasses.dataclass
class Reference:
    """What one process gets on the same global batches."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, torch.Tensor]


def reference(
    kind: str,
    dataset: list[dict[str, torch.Tensor]],
    global_batch_size: int,
    *,
    steps: int = STEPS,
    optimizer: str,
    model: nn.Module | None = None,
) -> Reference:
    model = new_model(kind) if model is None else model
    model.train()
    if optimizer == "sgd":
        optim: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    else:
        optim = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-8, weight_decay=0.0)
    losses, norms = [], []
    per_epoch = -(-len(dataset) // global_batch_size)
    for step in range(steps):
        start = (step % per_epoch) * global_batch_size
        batch = collate(dataset[start : start + global_batch_size])
        loss = KINDS[kind].loss(model, batch)
        loss.backward()
        squares = sum(float(p.grad.double().pow(2).sum()) for p in model.parameters() if p.grad is not None)
        losses.append(loss.item())
        norms.append(squares**0.5)
        optim.step()
        optim.zero_grad()
    return Reference(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def compare(name: str, got: list[float], want: list[float], *, rtol: float = 1e-5) -> list[str]:
    """Differences of two lists, as sentences."""
    if len(got) != len(want):
        return [f"{name}: {len(got)} values, expected {len(want)}"]
    return [
        f"{name}[{i}]: {g!r}, expected {w!r}"
        for i, (g, w) in enumerate(zip(got, want, strict=True))
        if not abs(g - w) <= rtol * max(abs(w), 1e-3)
    ]


def compare_parameters(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], *, rtol: float = 1e-5
) -> list[str]:
    problems = []
    for name, value in want.items():
        difference = (got[name] - value).abs().max().item()
        if not difference <= rtol * max(value.abs().max().item(), 1e-3):
            problems.append(f"{name}: differs by {difference:.3g}, largest value {value.abs().max().item():.3g}")
    return problems


def run_cases(cases: dict[str, Callable[[], Any]]) -> None:
    """Run named checks on every rank and let rank 0 write what each found.

    A check returns None or a list of sentences; an exception counts as a failure of that check.
    """
    warnings.simplefilter("ignore")
    results: dict[str, str] = {}
    start_gloo_state()
    ranks = connect(120.0)
    # Accelerate collects garbage in every training; what has been imported by now need not be looked at each time.
    gc.collect()
    gc.freeze()
    for name, case in cases.items():
        start = time.perf_counter()
        try:
            found = case() or []
        except Exception:  # noqa: BLE001 - one failing check must not hide the others
            found = [traceback.format_exc(limit=-12)]
            # Said at once as well: where the other ranks wait in this check, nobody gets to the report below.
            print(f"in {name}:", *found, flush=True)
        own = "\n".join(map(str, found))
        reports = ranks.gather(own)
        results[name] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(reports) if text)
        if ranks.rank == 0:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        if ranks.rank == 0 and results[name]:
            print(f"FAILED {name}: {results[name]}", flush=True)
    if ranks.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
