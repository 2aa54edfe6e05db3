"""LoRA, checkpointing, bf16, label smoothing, NEFTune; TRL's SFT and DPO trainers: all under uneven plans."""

from __future__ import annotations

import functools
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from datasets import Dataset
from finetuning_cases import CASES
from peft import LoraConfig, get_peft_model
from suites import common
from suites.common import compare, compare_parameters, history, make_plan, rows
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, TrainingArguments, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from accelerate_poplar import ConfigError, PoplarConfig, PoplarTrainer, PoplarTrainerMixin, PoplarTrainingArguments

STEPS = 3
GLOBAL_BATCH = 4
SIZES = {0: [[2, 1], [1]], 1: [[2, 1], [1]], 2: [[3], [1]], 3: [[3], [1]]}
"""Micro-batches by stage; below stage 2 ranks run unequally many."""
EPSILON = 0.2
Loss = Callable[[nn.Module, list[Any]], torch.Tensor]


class PoplarSFTTrainer(PoplarTrainerMixin, SFTTrainer):
    """SFT on unequal ranks."""


class PoplarDPOTrainer(PoplarTrainerMixin, DPOTrainer):
    """DPO on unequal ranks."""


class PoplarGRPOTrainer(PoplarTrainerMixin, GRPOTrainer):
    """What is refused."""


def with_adapters(seed: int = 3) -> nn.Module:
    """A tiny Llama with LoRA adapters that do something from the first step on; the same at every call."""
    set_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(common.tiny_llama(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


# ---- the host's own trainer -------------------------------------------------------------------------------------


def run_trainer(stage: int, model: nn.Module, **settings: Any) -> Any:
    return common.train(
        "llama",
        rows("llama", STEPS * GLOBAL_BATCH),
        model=model,
        max_steps=STEPS,
        trainer_kwargs={"poplar_plan": make_plan(stage, SIZES[stage])},
        **settings,
    )


def same_as_reference(trainer: Any, want: common.Reference, *, rtol: float = 1e-5) -> list[str]:
    problems = compare("loss", history(trainer, "loss"), want.losses, rtol=rtol)
    norms = history(trainer, "grad_norm")
    problems += compare("grad_norm", norms, want.grad_norms, rtol=rtol) if norms else []
    return problems + compare_parameters(common.parameters(trainer), want.parameters, rtol=rtol)


def plain_reference(model: nn.Module) -> common.Reference:
    data = rows("llama", STEPS * GLOBAL_BATCH)
    return common.reference("llama", data, GLOBAL_BATCH, steps=STEPS, optimizer="sgd", model=model)


def lora(stage: int) -> list[str]:
    trainer = run_trainer(stage, with_adapters())
    return same_as_reference(trainer, plain_reference(with_adapters()))


def lora_smoothed() -> list[str]:
    trainer = run_trainer(1, with_adapters(), label_smoothing_factor=EPSILON)
    return same_as_reference(trainer, reference(with_adapters(), rows("llama", STEPS * GLOBAL_BATCH), smoothed_loss))


def smoothed_loss(model: nn.Module, batch_rows: list[Any]) -> torch.Tensor:
    """The definition: (1 - e) of the loss at the label and e of the mean over the vocabulary."""
    batch = common.collate(batch_rows)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    kept = labels != -100
    losses = -torch.log_softmax(logits, dim=-1)[kept]
    own = losses.gather(1, labels[kept][:, None])
    return ((1 - EPSILON) * own.sum() + EPSILON * losses.mean(dim=-1).sum()) / kept.sum()


def lora_profiled() -> list[str]:
    """The profile counts gradients and optimizer for what is trained, and leaves the adapters as they were."""
    with tempfile.TemporaryDirectory() as cache:
        config = PoplarConfig(zero_stage=2, profile_budget_s=0.5, cache_dir=cache, report=False)
        trainer = common.train(
            "llama",
            rows("llama", STEPS * GLOBAL_BATCH),
            model=with_adapters(),
            max_steps=STEPS,
            per_device_train_batch_size=GLOBAL_BATCH // 2,
            trainer_kwargs={"poplar_config": config},
        )
    problems = same_as_reference(trainer, plain_reference(with_adapters()))
    trainable = sum(p.numel() for p in with_adapters().parameters() if p.requires_grad)
    total = sum(p.numel() for p in with_adapters().parameters())
    for rank, memory in enumerate(trainer.poplar.profile.memory):
        states = memory.states[2]
        found = (states.parameters, states.gradients, states.optimizer)
        if found != (4 * total, 2 * trainable, 2 * trainable):
            problems.append(f"rank {rank}: parameters, gradients, optimizer of {found} bytes")
    return problems


def checkpointed(stage: int) -> list[str]:
    trainer = run_trainer(stage, common.new_model("llama"), gradient_checkpointing=True)
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    problems = [] if model.is_gradient_checkpointing else ["checkpointing was off"]
    return problems + same_as_reference(trainer, plain_reference(common.new_model("llama")))


def bf16(stage: int) -> list[str]:
    """Eight bits of mantissa: each value is right to 1 part in 256, sums of many to a few of these."""
    trainer = run_trainer(stage, common.new_model("llama"), bf16=True, use_cpu=True)
    want = plain_reference(common.new_model("llama"))
    dtypes = {p.dtype for p in trainer.accelerator.unwrap_model(trainer.model_wrapped).parameters()}
    problems = [] if dtypes == {torch.bfloat16} else [f"parameters in {dtypes}"]
    problems += compare("loss", history(trainer, "loss"), want.losses, rtol=2**-8)
    problems += compare("grad_norm", history(trainer, "grad_norm"), want.grad_norms, rtol=2**-5)
    return problems + compare_parameters(common.parameters(trainer), want.parameters, rtol=2**-6)


class HooksNoted(PoplarTrainer):
    """Notes the hooks of the embeddings before and after profiling."""

    hooks: tuple[Any, ...] = ()

    def poplar_prepare(self, checkpoint: Any = None) -> Any:
        embeddings = self.model.get_input_embeddings()
        before = (dict(embeddings._forward_hooks), getattr(embeddings, "neftune_noise_alpha", None))
        if self.poplar.plan is not None:
            return super().poplar_prepare(checkpoint)
        plan = super().poplar_prepare(checkpoint)
        # Watching the run, which begins after profiling, has a hook of its own.
        kept = {key: hook for key, hook in embeddings._forward_hooks.items() if key in before[0]}
        self.hooks = (before, (kept, embeddings.neftune_noise_alpha))
        return plan


def neftune() -> list[str]:
    with tempfile.TemporaryDirectory() as cache:
        config = PoplarConfig(zero_stage=1, profile_budget_s=0.5, cache_dir=cache, report=False)
        trainer = common.train(
            "llama",
            rows("llama", STEPS * GLOBAL_BATCH),
            trainer_class=HooksNoted,
            max_steps=STEPS,
            per_device_train_batch_size=GLOBAL_BATCH // 2,
            neftune_noise_alpha=5.0,
            trainer_kwargs={"poplar_config": config},
        )
    before, after = trainer.hooks
    problems = (
        [] if before == after and len(before[0]) == 1 and before[1] == 5.0 else [f"hooks {before}, then {after}"]
    )
    losses, clean = history(trainer, "loss"), plain_reference(common.new_model("llama")).losses
    if len(losses) != STEPS or not all(map(math.isfinite, losses)):
        problems.append(f"losses {losses}")
    if losses[0] == clean[0]:
        problems.append("there was no noise in training")
    stayed = before[0].keys() & trainer.model.get_input_embeddings()._forward_hooks.keys()
    return problems + (["the hook stayed"] if stayed else [])


# ---- one process ------------------------------------------------------------------------------------------------


def reference(model: nn.Module, data: list[Any], loss_of: Loss) -> common.Reference:
    """One process, whole batches, SGD."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses, norms = [], []
    for start in range(0, STEPS * GLOBAL_BATCH, GLOBAL_BATCH):
        loss = loss_of(model, data[start : start + GLOBAL_BATCH])
        loss.backward()
        squares = sum(float(p.grad.double().pow(2).sum()) for p in model.parameters() if p.grad is not None)
        losses.append(loss.item())
        norms.append(squares**0.5)
        optimizer.step()
        optimizer.zero_grad()
    return common.Reference(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


# ---- SFT --------------------------------------------------------------------------------------------------------


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; numbers 4 to 63 stand for themselves."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{str(n): n for n in range(4, common.VOCABULARY)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


def sentences(count: int) -> Dataset:
    """Texts of 3 to 10 words."""
    generator = torch.Generator().manual_seed(5)
    lines = [torch.randint(4, common.VOCABULARY, (3 + i * 5 % 8,), generator=generator).tolist() for i in range(count)]
    return Dataset.from_dict({"text": [" ".join(map(str, line)) for line in lines]})


def trl_settings(stage: int | None, folder: str) -> dict[str, Any]:
    """A plan by hand, or a short profile."""
    config = PoplarConfig(
        zero_stage=None if stage is not None else 2, profile_budget_s=0.5, cache_dir=folder, report=False
    )
    plan = {} if stage is None else {"poplar_plan": make_plan(stage, SIZES[stage])}
    return {"poplar_config": config, **plan}


def trl_arguments(kind: type[TrainingArguments], folder: str, **settings: Any) -> TrainingArguments:
    own = {"bf16": False, "gradient_checkpointing": False, "max_steps": STEPS, "remove_unused_columns": True}
    return common.arguments(folder, arguments_class=kind, **{**own, "per_device_train_batch_size": 2, **settings})


def run_sft(stage: int | None, data: Dataset, *, kind: type[TrainingArguments] = SFTConfig, **settings: Any) -> Any:
    common.reset_host()
    with tempfile.TemporaryDirectory() as folder:
        trainer = PoplarSFTTrainer(
            model=with_adapters(),
            args=trl_arguments(kind, folder, **settings),
            train_dataset=data,
            processing_class=tokenizer(),
            **trl_settings(stage, folder),
        )
        trainer.train()
    return trainer


def texts_loss(model: nn.Module, texts: list[list[int]]) -> torch.Tensor:
    """Mean over the predicted tokens of all texts, each run by itself."""
    total, tokens = torch.zeros(()), 0
    for text in texts:
        ids = torch.tensor([text])
        total = total + functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum")
        tokens += len(text) - 1
    return total / tokens


def expected_metrics(model: nn.Module, texts: list[list[int]]) -> dict[str, float]:
    """What SFTTrainer logs besides the loss."""
    entropy, correct, tokens = 0.0, 0, 0
    for text in texts:
        ids = torch.tensor([text])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        logs = torch.log_softmax(logits, dim=-1)
        entropy -= float((logs.exp() * logs).sum())
        correct += int((logits.argmax(dim=-1) == ids[0, 1:]).sum())
        tokens += len(text) - 1
    return {"entropy": entropy / tokens, "mean_token_accuracy": correct / tokens, "num_tokens": sum(map(len, texts))}


def sft(stage: int) -> list[str]:
    trainer = run_sft(stage, sentences(STEPS * GLOBAL_BATCH))
    texts = trainer.train_dataset["input_ids"]
    problems = same_as_reference(trainer, reference(with_adapters(), list(texts), texts_loss))
    for name, value in expected_metrics(with_adapters(), list(texts)[:GLOBAL_BATCH]).items():
        problems += compare(name, history(trainer, name)[:1], [value])
    return problems


def sft_packed() -> list[str]:
    trainer = run_sft(
        1, sentences(STEPS * GLOBAL_BATCH * 3), packing=True, max_length=common.LENGTH, gradient_checkpointing=True
    )
    packed = []
    for row in trainer.train_dataset:
        ends = torch.tensor(row["seq_lengths"]).cumsum(0).tolist()
        packed.append([row["input_ids"][a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)])
    if len(packed) < STEPS * GLOBAL_BATCH or max(map(len, packed)) < 2:
        return [f"{len(packed)} packed rows of up to {max(map(len, packed))} texts"]

    def loss_of(model: nn.Module, batch_rows: list[Any]) -> torch.Tensor:
        return texts_loss(model, [text for row in batch_rows for text in row])

    return same_as_reference(trainer, reference(with_adapters(), packed, loss_of))


def sft_by_length() -> list[str]:
    trainer = run_sft(None, sentences(STEPS * GLOBAL_BATCH))
    problems = [] if trainer._poplar_loader.plan_sampler.cutter else ["the steps were cut by rows"]
    texts = list(trainer.train_dataset["input_ids"])
    return problems + same_as_reference(trainer, reference(with_adapters(), texts, texts_loss))


def sft_plain_arguments() -> list[str]:
    """The stock arguments, with a flag of ours, become SFT's as the stock trainer makes them."""
    trainer = run_sft(1, sentences(STEPS * GLOBAL_BATCH), kind=PoplarTrainingArguments, poplar_replan="off")
    problems = [] if isinstance(trainer.args, SFTConfig) else [f"arguments are {type(trainer.args).__name__}"]
    problems += [] if trainer.poplar.config.replan == "off" else ["the flag was lost"]
    texts = list(trainer.train_dataset["input_ids"])
    return problems + same_as_reference(trainer, reference(with_adapters(), texts, texts_loss))


def sft_evaluated() -> list[str]:
    """7 rows on b = (3, 1)."""
    common.reset_host()
    with tempfile.TemporaryDirectory() as folder:
        trainer = PoplarSFTTrainer(
            model=with_adapters(),
            args=trl_arguments(SFTConfig, folder, per_device_eval_batch_size=2),
            train_dataset=sentences(STEPS * GLOBAL_BATCH),
            eval_dataset=sentences(7),
            processing_class=tokenizer(),
            **trl_settings(2, folder),
        )
        trainer.train()
        metrics = trainer.evaluate()
    texts = list(trainer.train_dataset["input_ids"])
    model = with_adapters()
    reference(model, texts, texts_loss)
    rows_ = list(trainer.eval_dataset["input_ids"])
    want = {"eval_loss": float(texts_loss(model, rows_).detach())}
    want |= {f"eval_{name}": value for name, value in expected_metrics(model, rows_).items() if name != "num_tokens"}
    found = metrics | {k: history(trainer, k)[-1] for k in want if k not in metrics}
    return [text for name, value in want.items() for text in compare(name, [found[name]], [value])]


# ---- DPO --------------------------------------------------------------------------------------------------------

BETA = 0.5


def preferences(count: int) -> Dataset:
    """Prompts of 2 words with two answers of 2 to 6 words."""
    generator = torch.Generator().manual_seed(6)

    def words(n: int) -> str:
        return " ".join(map(str, torch.randint(4, common.VOCABULARY, (n,), generator=generator).tolist()))

    made = [
        {"prompt": words(2), "chosen": " " + words(2 + i % 4), "rejected": " " + words(3 + i % 3)}
        for i in range(count)
    ]
    return Dataset.from_list(made)


def run_dpo(stage: int, *, model: nn.Module, reference_model: nn.Module | None = None, evaluate: int = 0) -> Any:
    common.reset_host()
    with tempfile.TemporaryDirectory() as folder:
        trainer = PoplarDPOTrainer(
            model=model,
            ref_model=reference_model,
            args=trl_arguments(DPOConfig, folder, beta=BETA, per_device_eval_batch_size=2),
            train_dataset=preferences(STEPS * GLOBAL_BATCH),
            eval_dataset=preferences(evaluate) if evaluate else None,
            processing_class=tokenizer(),
            **trl_settings(stage, folder),
        )
        trainer.train()
        trainer.evaluated = trainer.evaluate() if evaluate else {}
    return trainer


def log_probability(model: nn.Module, row: dict[str, Any], answer: str) -> torch.Tensor:
    ids = torch.tensor([[*row["prompt_ids"], *row[answer]]])
    logs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])
    return logs[len(row["prompt_ids"]) - 1 :].sum()


@functools.cache
def as_it_was(make: Callable[[], nn.Module]) -> nn.Module:
    return make().requires_grad_(False)


def margin(model: nn.Module, row: dict[str, Any], make: Callable[[], nn.Module]) -> torch.Tensor:
    """How much more than the reference model, which it was at first, the model prefers the chosen answer."""
    before = as_it_was(make)
    with torch.no_grad():
        start = log_probability(before, row, "chosen_ids") - log_probability(before, row, "rejected_ids")
    return log_probability(model, row, "chosen_ids") - log_probability(model, row, "rejected_ids") - start


def preference_loss(model: nn.Module, batch_rows: list[Any], make: Callable[[], nn.Module]) -> torch.Tensor:
    """The definition: the mean of -log sigmoid(beta x margin)."""
    margins = torch.stack([margin(model, row, make) for row in batch_rows])
    return -functional.logsigmoid(BETA * margins).mean()


def trained_on_preferences(make: Callable[[], nn.Module], data: list[Any]) -> tuple[nn.Module, common.Reference]:
    """What one process makes of the model, and what it saw on the way."""
    model = make()
    return model, reference(model, data, functools.partial(preference_loss, make=make))


def dpo(stage: int) -> list[str]:
    """Adapters that are there already: TRL compares with a copy of them as they were."""
    trainer = run_dpo(stage, model=with_adapters())
    data = list(trainer.train_dataset)
    # Three samples make six rows of a batch, so that rows cut out of it are no pairs.
    problems = [] if trainer.poplar.loss_rule.kind == "mean" else [f"the loss is taken for {trainer.poplar.loss_rule}"]
    problems += same_as_reference(trainer, trained_on_preferences(with_adapters, data)[1])
    with torch.no_grad():
        chosen = [float(log_probability(with_adapters(), row, "chosen_ids")) for row in data[:GLOBAL_BATCH]]
    return problems + compare("chosen", history(trainer, "logps/chosen")[:1], [sum(chosen) / GLOBAL_BATCH])


def new_llama() -> nn.Module:
    return common.new_model("llama")


def dpo_with_reference_model() -> list[str]:
    trainer = run_dpo(2, model=new_llama(), reference_model=new_llama())
    return same_as_reference(trainer, trained_on_preferences(new_llama, list(trainer.train_dataset))[1])


def dpo_evaluated() -> list[str]:
    trainer = run_dpo(2, model=with_adapters(), evaluate=7)
    model, _ = trained_on_preferences(with_adapters, list(trainer.train_dataset))
    data = list(trainer.eval_dataset)
    with torch.no_grad():
        want = float(preference_loss(model, data, with_adapters))
        margins = float(BETA * torch.stack([margin(model, row, with_adapters) for row in data]).mean())
    return [
        *compare("eval_loss", [trainer.evaluated["eval_loss"]], [want]),
        *compare("eval_rewards/margins", history(trainer, "eval_rewards/margins")[-1:], [margins], rtol=1e-3),
    ]


def grpo_refused() -> list[str]:
    common.reset_host()
    with tempfile.TemporaryDirectory() as folder:
        try:
            PoplarGRPOTrainer(
                model=common.new_model("llama"),
                reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
                args=trl_arguments(GRPOConfig, folder, num_generations=2),
                train_dataset=preferences(4),
                processing_class=tokenizer(),
            )
        except ConfigError as error:
            wanted = ("GRPOTrainer", "num_generations", "SFTTrainer")
            return [f"no word of {word}: {error}" for word in wanted if word not in str(error)]
    return ["GRPO was not refused"]


def case_of(name: str) -> Callable[[], list[str]]:
    function, _, stage = name.partition("-zero")
    check = globals()[function]
    return functools.partial(check, int(stage)) if stage else check


if __name__ == "__main__":
    common.run_cases({name: case_of(name) for name in CASES})
