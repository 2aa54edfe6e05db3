"""Rows of unequal length: who runs what follows the measured time per token, what is computed does not."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from suites import common, loops
from suites.evaluation import Stream
from torch.utils.data import DataLoader

from accelerate_poplar import PoplarTrainer

STEPS = 3
GLOBAL_BATCH = 8


def uneven_rows(count: int) -> list[dict[str, list[int]]]:
    """Rows of 3 to 12 tokens, some of which are not to be learnt."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(count):
        ids = torch.randint(4, common.VOCABULARY, (3 + index * 7 % 10,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100 if index % 3 else ids[0], *ids[1:]]})
    return rows


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded("labels", -100)}


def expected(rows: list[Any]) -> dict[str, torch.Tensor]:
    model = common.new_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for start in range(0, STEPS * GLOBAL_BATCH, GLOBAL_BATCH):
        common.KINDS["llama"].loss(model, pad(rows[start : start + GLOBAL_BATCH])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def settings(stage: int, cache: str) -> dict[str, Any]:
    return {"zero_stage": stage, "profile_budget_s": 0.5, "cache_dir": cache, "report": False}


def _trained(stage: int, dataset: Any) -> Any:
    common.reset_host()
    with tempfile.TemporaryDirectory() as folder:
        trainer = PoplarTrainer(
            model=common.new_model("llama"),
            args=common.arguments(folder, max_steps=STEPS, per_device_train_batch_size=GLOBAL_BATCH // 2),
            train_dataset=dataset,
            data_collator=pad,
            poplar_config=settings(stage, folder),
        )
        trainer.train()
    return trainer


def _problems(name: str, trainer: Any, rows: list[Any]) -> list[str]:
    problems = [] if trainer._poplar_loader.plan_sampler.cutter else [f"{name}: the steps were cut by rows"]
    shortest = [getattr(row, "tokens", None) for row in trainer.poplar.profile.shortest]
    if shortest != [3] * len(trainer.poplar.profile.ranks):
        problems.append(
            f"{name}: no micro-batch of the shortest row was timed on some rank, but rows of {shortest} tokens"
        )
    found = common.compare_parameters(common.parameters(trainer), expected(rows))
    return problems + [f"{name}: {text}" for text in found]


def rows_of_unequal_length_equal_one_process(world_size: int) -> list[str]:
    rows = uneven_rows(STEPS * GLOBAL_BATCH)
    return [text for stage in (1, 2) for text in _problems(f"stage {stage}", _trained(stage, rows), rows)]


def a_stream_of_unequal_lengths_equals_one_process(world_size: int) -> list[str]:
    rows = uneven_rows(STEPS * GLOBAL_BATCH)
    return _problems("stream", _trained(3, Stream(rows)), rows)


def a_loop_over_rows_of_unequal_length_equals_one_process(world_size: int) -> list[str]:
    rows = uneven_rows(STEPS * GLOBAL_BATCH)
    with tempfile.TemporaryDirectory() as folder:
        accelerator = loops.accelerator_for("ddp", poplar_config=settings(0, folder))
        model = common.new_model("llama")
        model, optimizer, loader = accelerator.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            DataLoader(rows, batch_size=GLOBAL_BATCH // 2, collate_fn=pad),
        )
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    problems = [] if loader.steps.plan_sampler.cutter else ["the steps were cut by rows"]
    return problems + common.compare_parameters(loops.parameters(accelerator, model), expected(rows))
