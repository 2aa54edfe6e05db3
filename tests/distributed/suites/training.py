"""PoplarTrainer as a drop-in: the stock run's samples and figures, epochs, resume, ends, odd losses, bad input."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from suites import common
from suites.common import KINDS, compare, compare_parameters, history, make_plan, rows, run_cases, train
from torch.nn import functional
from transformers import Trainer, TrainerCallback

from accelerate_poplar import (
    ConfigError,
    DataError,
    InsufficientMemoryError,
    PlanError,
    PoplarConfig,
    PoplarTrainer,
    PoplarTrainingArguments,
)
from accelerate_poplar.comm import connect
from accelerate_poplar.host import start_gloo_state


class Ids(torch.utils.data.Dataset):
    """Rows that carry their own number, to see who ran what."""

    def __init__(self, count: int, *, packed: bool = False) -> None:
        self.rows = rows("llama", count)
        if packed:
            ids = torch.randint(
                4, common.VOCABULARY, (count, common.LENGTH), generator=torch.Generator().manual_seed(5)
            )
            self.rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self.rows[index], "id": torch.tensor(index)}


class Recording:
    """Notes the ids of every real micro-batch, by optimizer step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []

    def of(self, trainer_class: type) -> type:
        seen = self.seen

        class Recorded(trainer_class):  # type: ignore[misc, valid-type]
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                ids = inputs.pop("id", None)
                if self.model.training and ids is not None and not getattr(self, "_ghost_now", False):
                    seen.append((self.state.global_step, ids.tolist()))
                return super().compute_loss(model, inputs, *args, **kwargs)

            def _weighted(self, micro_step: Any) -> Any:
                self._ghost_now = micro_step.batch is self.poplar.weigher.ghost
                return super()._weighted(micro_step)

        return Recorded

    def by_step(self) -> list[list[int]]:
        """Ids of every optimizer step over all ranks, sorted."""
        steps: dict[int, list[int]] = {}
        for report in connect(120.0).gather(self.seen):
            for step, ids in report:
                steps.setdefault(step, []).extend(ids)
        return [sorted(steps[step]) for step in sorted(steps)]


def recorded_run(
    trainer_class: type, count: int, *, packed: bool = False, **kwargs: Any
) -> tuple[Any, list[list[int]], list[Any]]:
    recording = Recording()
    data = Ids(count, packed=packed)
    trainer = train("llama", data, trainer_class=recording.of(trainer_class), **kwargs)
    return trainer, recording.by_step(), recording.seen


def plan_of(zero_stage: int, sizes: list[list[int]]) -> dict[str, Any]:
    return {"poplar_plan": make_plan(zero_stage, sizes)}


# ---- the stock run ----------------------------------------------------------------------------------------------


def deepspeed_settings(stage: int, **more: Any) -> dict[str, Any]:
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    return {**auto, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, **more}


def stock_run(stage: int, count: int, **overrides: Any) -> tuple[Any, list[list[int]]]:
    recording = Recording()
    real = common.arguments

    def on_gloo(output_dir: str, **settings: Any) -> Any:
        start_gloo_state()
        configured = {"accelerator_config": {"use_configured_state": True}, "deepspeed": deepspeed_settings(stage)}
        return real(output_dir, **{**configured, **settings})

    with mock.patch.object(common, "arguments", on_gloo):
        trainer = train("llama", Ids(count, packed=True), trainer_class=recording.of(Trainer), **overrides)
    return trainer, recording.by_step()


def same_as_stock(stage: int) -> list[str]:
    settings = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "linear",
    }
    stock, stock_steps = stock_run(stage, 80, **settings)
    sizes = [[4, 2], [1, 1]] if stage > 1 else [[4, 2], [2]]
    ours, our_steps, _ = recorded_run(PoplarTrainer, 80, packed=True, trainer_kwargs=plan_of(stage, sizes), **settings)
    problems = [] if stock_steps == our_steps else [f"samples: {our_steps}, stock {stock_steps}"]
    if len(our_steps) != 20:
        problems.append(f"{len(our_steps)} steps, expected 20")
    for key in ("loss", "grad_norm", "learning_rate", "train_loss"):
        # The stock train_loss is rank 0's own; the mean of its logged losses is what it should be.
        want = [sum(history(stock, "loss")) / 20] if key == "train_loss" else history(stock, key)
        problems += compare(key, history(ours, key), want)
    if ours.state.max_steps != stock.state.max_steps or ours.state.epoch != stock.state.epoch:
        problems.append(f"max_steps {ours.state.max_steps} and epoch {ours.state.epoch}")
    if ours.args.gradient_accumulation_steps != 2:
        problems.append("the training arguments were left changed")
    return problems


# ---- every sample once ------------------------------------------------------------------------------------------


def once_per_epoch(workers: int) -> list[str]:
    _, steps, _ = recorded_run(
        PoplarTrainer,
        100,
        trainer_kwargs=plan_of(2, [[3, 2], [1, 1]]),
        max_steps=-1,
        num_train_epochs=2,
        train_sampling_strategy="random",
        dataloader_num_workers=workers,
    )
    per_epoch = -(-100 // 7)
    problems = []
    for epoch in range(2):
        seen = sorted(i for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch] for i in step)
        if seen != list(range(100)):
            problems.append(f"epoch {epoch}: {len(seen)} samples, {len(set(seen))} distinct")
    if steps[0] == steps[per_epoch]:
        problems.append("both epochs follow the same order")
    return problems


def short_tail(stage: int, count: int, want: list[int]) -> list[str]:
    trainer, steps, _ = recorded_run(
        PoplarTrainer, count, trainer_kwargs=plan_of(stage, [[3], [1]]), max_steps=-1, num_train_epochs=1
    )
    reference = common.reference("llama", rows("llama", count), 4, steps=len(want), optimizer="sgd")
    problems = [] if [len(step) for step in steps] == want else [f"steps of {[len(s) for s in steps]}, want {want}"]
    problems += [] if sorted(i for s in steps for i in s) == list(range(count)) else ["not every sample exactly once"]
    return (
        problems
        + compare("loss", history(trainer, "loss"), reference.losses)
        + compare_parameters(common.parameters(trainer), reference.parameters)
    )


def four_sizes_by_hand() -> list[str]:
    """21 samples a step on four ranks, given as a list and as a mapping."""
    problems = []
    for sizes in ((2, 2, 2, 15), {0: 2, 1: 2, 2: 2, 3: 15}):
        config = PoplarConfig(zero_stage=1, per_rank_micro_batch_sizes=sizes)
        _, steps, own = recorded_run(
            PoplarTrainer, 42, trainer_kwargs={"poplar_config": config}, max_steps=-1, num_train_epochs=1
        )
        if [len(step) for step in steps] != [21, 21] or sorted(i for s in steps for i in s) != list(range(42)):
            problems.append(f"{sizes}: steps {steps}")
        rank = connect(60.0).rank
        if [len(ids) for _, ids in own] != [[2, 2, 2, 15][rank]] * 2:
            problems.append(f"{sizes}: rank {rank} ran {own}")
    config = PoplarConfig(zero_stage=1, per_rank_micro_batch_sizes=(2, 2, 15))
    problems += raises(ConfigError, "3 values", "4 ranks", trainer_kwargs={"poplar_config": config})
    return problems


# ---- losses -----------------------------------------------------------------------------------------------------


def _smoothed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    keep = labels != -100
    logs = -torch.log_softmax(logits, dim=-1)
    nll = logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)[keep].sum() / keep.sum()
    uniform = logs.mean(dim=-1)[keep].sum() / keep.sum()
    return 0.9 * nll + 0.1 * uniform


class OwnLoss(PoplarTrainer):
    """An overridden compute_loss that ignores the item count: a mean over tokens."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        shifted = labels[:, 1:]
        loss = functional.cross_entropy(
            outputs.logits[:, :-1].reshape(-1, common.VOCABULARY), shifted.reshape(-1), ignore_index=-100
        )
        return (loss, outputs) if return_outputs else loss


class OwnScaledLoss(PoplarTrainer):
    """An overridden compute_loss that honours the item count and multiplies by the number of ranks itself."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].reshape(-1, common.VOCABULARY)
        kind = "mean" if num_items_in_batch is None else "sum"
        loss = functional.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=-100, reduction=kind)
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def summed_error(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A custom loss that honours the item count."""
    total = (outputs["logits"] - labels).pow(2).sum()
    return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


def odd_loss(name: str, accumulation: int) -> list[str]:
    kind, trainer_class, overrides, formula = {
        "smoothing": ("llama", PoplarTrainer, {"label_smoothing_factor": 0.1}, _smoothed),
        "own": ("llama", OwnLoss, {}, KINDS["llama"].loss),
        "own_scaled": ("llama", OwnScaledLoss, {}, KINDS["llama"].loss),
        "func": ("plain", PoplarTrainer, {}, KINDS["plain"].loss),
        "func_summed": ("plain", PoplarTrainer, {}, KINDS["plain"].loss),
        "mlm": ("bert_mlm", PoplarTrainer, {}, KINDS["bert_mlm"].loss),
        "no_average": ("llama", PoplarTrainer, {"average_tokens_across_devices": False}, KINDS["llama"].loss),
    }[name]
    sizes = [[3] * accumulation, [1] * accumulation]
    data = rows(kind, 4 * accumulation * 5)
    changed = dataclasses.replace(
        KINDS[kind],
        loss=formula,
        trainer_kwargs={"compute_loss_func": summed_error} if name == "func_summed" else KINDS[kind].trainer_kwargs,
    )
    original = KINDS[kind]
    KINDS[kind] = changed
    try:
        trainer = train(kind, data, trainer_class=trainer_class, trainer_kwargs=plan_of(2, sizes), **overrides)
        want = common.reference(kind, data, 4 * accumulation, optimizer="sgd")
    finally:
        KINDS[kind] = original
    return (
        compare("loss", history(trainer, "loss"), want.losses)
        + compare("grad_norm", history(trainer, "grad_norm"), want.grad_norms)
        + compare_parameters(common.parameters(trainer), want.parameters)
    )


def twelve_samples(stage: int) -> list[str]:
    """12 samples in 1, 2, 3, 4 micro-steps: the same gradient and logged loss."""
    data = rows("llama", 60)
    want = common.reference("llama", data, 12, optimizer="sgd")
    problems = []
    for count in (1, 2, 3, 4):
        sizes = [
            [8 // count + (k < 8 % count) for k in range(count)],
            [4 // count + (k < 4 % count) for k in range(count)],
        ]
        trainer = train("llama", data, trainer_kwargs=plan_of(stage, sizes))
        problems += [f"{count} micro-steps: {p}" for p in compare("loss", history(trainer, "loss"), want.losses)]
        problems += [
            f"{count} micro-steps: {p}" for p in compare_parameters(common.parameters(trainer), want.parameters)
        ]
    return problems


class Square(torch.nn.Module):
    """y = w x, w = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": functional.mse_loss(self.w * x, labels)}


def straight_line() -> list[str]:
    """Targets 1, 1, 1 on rank 0 and 5 on rank 1: gradient -4, so SGD at 0.1 gives w = 0.4."""
    data = [{"x": torch.ones(()), "labels": torch.tensor(target)} for target in (1.0, 1.0, 1.0, 5.0)]
    problems = []
    for stage in (0, 1, 2, 3):
        trainer = train(
            "llama", data, model=Square(), trainer_kwargs=plan_of(stage, [[3], [1]]), max_steps=1, learning_rate=0.1
        )
        w = common.parameters(trainer)["w"].item()
        if abs(w - 0.4) > 1e-6:
            problems.append(f"stage {stage}: w = {w}, expected 0.4")
    return problems


class Given(torch.nn.Module):
    """A token loss with known values: mean of w + value over the tokens that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.w + values)[labels != -100].mean()}


def unequal_tokens() -> list[str]:
    """One token at loss 10 beside seven at 2: 3.0, not 6.0."""
    one = torch.tensor([0] + [-100] * 6)
    data = [
        {"values": torch.full((7,), 10.0), "labels": one},
        {"values": torch.full((7,), 2.0), "labels": torch.zeros(7, dtype=torch.long)},
        {"values": torch.full((7,), 4.0), "labels": torch.tensor([0, 0, 0] + [-100] * 4)},
    ]
    trainer = train("llama", data, model=Given(), trainer_kwargs=plan_of(1, [[1], [1]]), max_steps=1)
    return compare("loss", history(trainer, "loss"), [3.0])


# ---- after the step ---------------------------------------------------------------------------------------------


def identical_parameters(stage: int) -> list[str]:
    """After every optimizer step, under bf16 and accumulation, all ranks hold the same parameters."""
    found: list[str] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            totals = connect(60.0).gather([p.detach().float().sum().item() for p in model.parameters()])
            if any(total != totals[0] for total in totals):
                found.append(f"step {state.global_step}: ranks differ")

    settings = deepspeed_settings(stage, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    train(
        "llama",
        rows("llama", 60),
        trainer_kwargs={**plan_of(stage, [[3, 2], [1, 2]]), "callbacks": [Watch()]},
        bf16=True,
        use_cpu=True,
        deepspeed=settings,
        learning_rate=0.5,
    )
    return found


def learning_rate() -> list[str]:
    """Stepped once per optimizer step, never rescaled, whatever the ranks and micro-steps."""
    trainer = train(
        "llama",
        rows("llama", 200),
        trainer_kwargs=plan_of(1, [[2, 2, 1], [3]]),
        lr_scheduler_type="linear",
        learning_rate=1.0,
        max_steps=10,
    )
    return compare("learning_rate", history(trainer, "learning_rate"), [1.0 - 0.1 * step for step in range(10)])


def speed_of_real_samples() -> list[str]:
    trainer = train(
        "llama", rows("llama", 10), trainer_kwargs=plan_of(2, [[3], [1]]), max_steps=-1, num_train_epochs=3
    )
    metrics = trainer.state.log_history[-1]
    samples = metrics["train_samples_per_second"] * metrics["train_runtime"]
    return [] if abs(samples - 30) < 0.6 else [f"{samples} samples were counted, 30 were run"]


def compiled() -> list[str]:
    """A model that Accelerate compiles is profiled and trained compiled, with the same result."""
    plain = train("llama", rows("llama", 32), trainer_kwargs=plan_of(1, [[3], [1]]))
    switch = os.environ.pop("TORCHDYNAMO_DISABLE", None)
    with tempfile.TemporaryDirectory() as folder:
        settings = PoplarConfig(
            global_batch_size=4, zero_stage=1, report=False, cache_dir=folder, profile_budget_s=3.0, enabled=True
        )
        other = train(
            "llama",
            rows("llama", 32),
            trainer_kwargs={"poplar_config": settings},
            torch_compile=True,
            torch_compile_backend="aot_eager",
        )
    if switch is not None:
        os.environ["TORCHDYNAMO_DISABLE"] = switch
    problems = compare("loss", history(other, "loss"), history(plain, "loss"))
    problems += compare_parameters(common.parameters(other), common.parameters(plain), rtol=1e-4)
    if not other.model_wrapped.is_compiled:
        problems.append("the engine runs the model uncompiled")
    return problems


# ---- checkpoints ------------------------------------------------------------------------------------------------


def resume(stage: int) -> list[str]:
    """b=(3,1) for 5 steps, then (2,2): the next sample is number 21, max_steps and learning rate as before."""
    ranks = connect(60.0)
    folder = ranks.broadcast(tempfile.mkdtemp() if ranks.rank == 0 else None)
    settings = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch",
        "save_strategy": "steps",
        "save_steps": 5,
        "output_dir": folder,
        "learning_rate": 0.01,
    }
    whole, steps, _ = recorded_run(PoplarTrainer, 40, trainer_kwargs=plan_of(stage, [[3], [1]]), **settings)
    checkpoint = f"{folder}/checkpoint-5"
    if ranks.rank == 0 and not Path(checkpoint, "poplar_plan.json").is_file():
        return ["the checkpoint holds no plan"]
    recording = Recording()

    class Resumed(recording.of(PoplarTrainer)):  # type: ignore[misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(resume_from_checkpoint=checkpoint)

    resumed = train(
        "llama",
        Ids(40),
        trainer_class=Resumed,
        trainer_kwargs=plan_of(stage, [[2], [2]]),
        **{**settings, "save_strategy": "no"},
    )
    got = recording.by_step()
    problems = [] if got == steps[5:] else [f"resumed with {got[:2]}, expected {steps[5:7]}"]
    if stage < 4:
        for key in ("loss", "learning_rate"):
            problems += compare(key, history(resumed, key)[5:], history(whole, key)[5:], rtol=1e-4)
    if resumed.state.max_steps != whole.state.max_steps:
        problems.append(f"max_steps {resumed.state.max_steps}, expected {whole.state.max_steps}")
    return problems


# ---- settings and bad input -------------------------------------------------------------------------------------


def raises(error: type[Exception], *texts: str, data: Any = None, **kwargs: Any) -> list[str]:
    """The run stops with an error of that type, before training, whose message holds every text."""
    try:
        train("llama", Ids(12) if data is None else data, **kwargs)
    except error as found:
        return [f"{text!r} is not in: {found}" for text in texts if text not in str(found)]
    return [f"{error.__name__} was not raised"]


def conflicts_together() -> list[str]:
    return raises(
        ConfigError,
        "3 values",
        "auto_find_batch_size",
        "split_batches",
        "dispatch_batches",
        trainer_kwargs={"poplar_config": PoplarConfig(per_rank_micro_batch_sizes=(1, 2, 3))},
        auto_find_batch_size=True,
        accelerator_config={"split_batches": True, "dispatch_batches": True},
    )


def json_against_plan() -> list[str]:
    return raises(
        ConfigError,
        "32",
        "28",
        "auto",
        trainer_kwargs={"poplar_config": PoplarConfig(per_rank_micro_batch_sizes=(16, 12))},
        deepspeed={**deepspeed_settings(2), "train_batch_size": 32},
    )


def micro_above_cap() -> list[str]:
    config = PoplarConfig(per_rank_micro_batch_sizes=(4, 2), max_micro_batch_size=3)
    return raises(ConfigError, "rank 0", "4", "3", trainer_kwargs={"poplar_config": config})


def misspelt_key() -> list[str]:
    return raises(
        ConfigError, "poplar_enabeld", "enabled", deepspeed={**deepspeed_settings(1), "poplar": {"poplar_enabeld": 1}}
    )


def empty_data() -> list[str]:
    return raises(DataError, "empty", data=[])


def nothing_left() -> list[str]:
    """3 samples, a global batch of 4, drop_last: an error, not zero steps called success."""
    return raises(
        DataError,
        "3 samples",
        "4",
        "drop_last",
        data=Ids(3),
        trainer_kwargs=plan_of(1, [[3], [1]]),
        dataloader_drop_last=True,
    )


def missing_file() -> list[str]:
    return raises(ConfigError, "no-such.yaml", trainer_kwargs={"poplar_config": "no-such.yaml"})


def unequal_micro_steps() -> list[str]:
    """At ZeRO-2/3 a plan with unequal micro-step counts is refused before any collective."""
    problems = []
    for stage in (2, 3):
        try:
            make_plan(stage, [[2, 1], [1]])
            problems.append(f"stage {stage}: accepted")
        except PlanError as error:
            problems += [f"{t!r} not in {error}" for t in ("rank 0 has 2", "rank 1 has 1") if t not in str(error)]
    return problems


def auto_keys_under_zero_init() -> list[str]:
    """All batch keys "auto" and a ZeRO-3 model made before the trainer: the right global batch, no assertion."""
    import logging

    from transformers import LlamaForCausalLM

    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("transformers.trainer")
    common.reset_host()
    with tempfile.TemporaryDirectory() as folder:
        args = common.arguments(
            folder, arguments_class=PoplarTrainingArguments, deepspeed=deepspeed_settings(3), log_level="info"
        )
        model = LlamaForCausalLM._from_config(KINDS["llama"].model().config)
        if not any(hasattr(p, "ds_id") for p in model.parameters()):
            return ["the model was not created under zero.Init"]
        trainer = PoplarTrainer(
            model=model,
            args=args,
            train_dataset=rows("llama", 40),
            data_collator=common.collate,
            poplar_config=PoplarConfig(per_rank_micro_batch_sizes=(3, 1)),
        )
        handler = Collect()
        logger.addHandler(handler)
        try:
            trainer.train()
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.ERROR)
    found = [line for line in lines if "Total train batch size" in line]
    # The host library logs on the main process of a machine only.
    if args.process_index == 0 and not any(line.strip().endswith("= 4") for line in found):
        return [f"global batch in the log: {found}"]
    return []


def plan_in_output_dir() -> list[str]:
    ranks = connect(60.0)
    folder = ranks.broadcast(tempfile.mkdtemp() if ranks.rank == 0 else None)
    train("llama", rows("llama", 20), trainer_kwargs=plan_of(2, [[3], [1]]), output_dir=folder)
    ranks.gather(None)
    plan = json.loads(Path(folder, "poplar_plan.json").read_text())
    sizes = [rank["micro_batch_sizes"] for rank in plan["ranks"]]
    return [] if sizes == [[3], [1]] and plan["digest"].startswith("sha256:") else [str(plan)]


def slow_rank(stage: int) -> list[str]:
    """200 ms added to rank 1's backward: the history blames it, the plan changes, the result does not."""
    ranks = connect(60.0)
    folder = ranks.broadcast(tempfile.mkdtemp() if ranks.rank == 0 else None)
    data = rows("llama", 256)
    # Large enough for a rank's share to be worth more than a pass costs with no sample at all.
    common.set_seed(3)
    model = common.tiny_llama(hidden_size=128, num_hidden_layers=4)
    twin = copy.deepcopy(model)

    class Slow(TrainerCallback):
        active = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            Slow.active = ranks.rank == 1

    def delay(module: Any, inputs: Any, output: Any) -> None:
        if Slow.active and output.requires_grad:
            output.register_hook(lambda gradient: time.sleep(0.2))

    model.model.layers[1].mlp.register_forward_hook(delay)
    config = PoplarConfig(zero_stage=stage, replan="on", replan_every=3, report=False, profile_budget_s=3.0)
    trainer = train(
        "llama",
        data,
        model=model,
        trainer_kwargs={"poplar_config": config, "callbacks": [Slow()]},
        output_dir=folder,
        per_device_train_batch_size=16,
        max_steps=8,
        logging_steps=2,
    )
    want = common.reference("llama", data, 32, steps=8, optimizer="sgd", model=twin).losses
    problems = compare(
        "loss", history(trainer, "loss"), [(a + b) / 2 for a, b in zip(want[::2], want[1::2], strict=True)]
    )
    ranks.gather(None)
    lines = [json.loads(line) for line in Path(folder, "poplar_history.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line.get("ranks"))
    fast, slow = first["ranks"]
    if slow["compute_time_s"] < max(0.2, fast["compute_time_s"]) or slow["wait_time_s"] > fast["wait_time_s"]:
        problems.append(f"rank 1 is not blamed: {first['ranks']}")
    events = [line["event"] for line in lines if line["event"]]
    if not any(event["kind"] == "replan" and event["rank"] == 1 for event in events):
        problems.append(f"no re-plan that names rank 1: {events}")
    return problems


@contextlib.contextmanager
def emulated(**variables: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {f"POPLAR_EMULATE_{name}": value for name, value in variables.items()}):
        yield


def too_small_a_card() -> list[str]:
    """The training state exceeds rank 1's memory at every stage: rank, bytes and a remedy, not an out-of-memory error."""
    with emulated(MEMORY_GIB="4,0.00001"):
        return raises(
            InsufficientMemoryError,
            "rank 1",
            "MiB",
            "needs",
            "gradient checkpointing",
            trainer_kwargs={"poplar_config": PoplarConfig(zero_stage="auto", profile_budget_s=2.0, reprofile=True)},
        )


def switched_off() -> list[str]:
    """enabled: false is the stock even split through the same code."""
    _, steps, own = recorded_run(
        PoplarTrainer,
        16,
        trainer_kwargs={"poplar_config": PoplarConfig(enabled=False, zero_stage=2)},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
    )
    sizes = [len(ids) for _, ids in own]
    return [] if sizes == [2] * 4 and [len(s) for s in steps] == [8, 8] else [f"{sizes}, {steps}"]


def two_rank_cases() -> dict[str, Callable[[], Any]]:
    from training_cases import TWO_RANKS

    table: dict[str, Callable[[], Any]] = {
        **{f"same_as_stock-zero{s}": (lambda s=s: same_as_stock(s)) for s in range(4)},
        **{f"once_per_epoch-{w}workers": (lambda w=w: once_per_epoch(w)) for w in (0, 2)},
        **{f"ten_samples-zero{s}": (lambda s=s: short_tail(s, 10, [4, 4, 2])) for s in range(4)},
        **{f"nine_samples-zero{s}": (lambda s=s: short_tail(s, 9, [4, 4, 1])) for s in range(4)},
        **{
            f"odd_loss-{name}-acc{a}": (lambda name=name, a=a: odd_loss(name, a))
            for name in ("smoothing", "own", "own_scaled", "func", "func_summed", "mlm", "no_average")
            for a in (1, 2, 4)
        },
        **{f"twelve_samples-zero{s}": (lambda s=s: twelve_samples(s)) for s in (1, 2)},
        **{f"identical_parameters-zero{s}": (lambda s=s: identical_parameters(s)) for s in (1, 2)},
        **{f"resume-zero{s}": (lambda s=s: resume(s)) for s in range(4)},
        "straight_line": straight_line,
        "unequal_tokens": unequal_tokens,
        "learning_rate": learning_rate,
        "speed_of_real_samples": speed_of_real_samples,
        "compiled": compiled,
        "conflicts_together": conflicts_together,
        "json_against_plan": json_against_plan,
        "micro_above_cap": micro_above_cap,
        "misspelt_key": misspelt_key,
        "empty_data": empty_data,
        "nothing_left": nothing_left,
        "missing_file": missing_file,
        "unequal_micro_steps": unequal_micro_steps,
        "auto_keys_under_zero_init": auto_keys_under_zero_init,
        "plan_in_output_dir": plan_in_output_dir,
        "switched_off": switched_off,
        "too_small_a_card": too_small_a_card,
        **{f"slow_rank-zero{s}": (lambda s=s: slow_rank(s)) for s in (1, 2)},
    }
    missing = set(TWO_RANKS) ^ set(table)
    if missing:
        raise KeyError(f"training_cases.py and this suite differ: {sorted(missing)}")
    return table


if __name__ == "__main__":
    if int(os.environ["WORLD_SIZE"]) == 4:
        run_cases({"four_sizes_by_hand": four_sizes_by_hand})
    else:
        only = os.environ.get("POPLAR_TEST_ONLY")
        table = two_rank_cases()
        run_cases({name: case for name, case in table.items() if not only or only in name})
