"""Evaluation and prediction of the trainer against one process."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from suites import common
from torch.utils.data import IterableDataset

from accelerate_poplar import PoplarTrainer

SHARES = {2: [[3], [1]], 3: [[3], [2], [1]]}
ROWS = {2: 10, 3: 7}


class Stream(IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Counting(PoplarTrainer):
    """Remembers how many rows this rank was given in each evaluation step."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.given = [*getattr(self, "given", []), len(next(iter(inputs.values())))]
        return super().prediction_step(model, inputs, *args, **kwargs)


def trainer_for(kind: str, stage: int, world_size: int, eval_dataset: Any, **overrides: Any) -> Any:
    common.reset_host()
    folder = tempfile.mkdtemp()
    settings = {"per_device_eval_batch_size": 2, "max_steps": 2, **overrides}
    metrics = settings.pop("compute_metrics", None)
    return Counting(
        model=common.new_model(kind),
        args=common.arguments(folder, **settings),
        train_dataset=common.rows(kind, 12),
        eval_dataset=eval_dataset,
        data_collator=common.collate,
        compute_metrics=metrics,
        poplar_plan=common.make_plan(stage, SHARES[world_size]),
        **common.KINDS[kind].trainer_kwargs,
    )


def whole_loss(kind: str, parameters: dict[str, torch.Tensor], rows: list[Any]) -> tuple[float, torch.Tensor]:
    """Loss and logits of all rows in one batch of one process."""
    model = common.new_model(kind)
    model.load_state_dict(parameters, strict=False)
    model.eval()
    batch = common.collate(rows)
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "features") if name in batch}
        outputs = model(**inputs)
        return float(common.KINDS[kind].loss(model, batch)), outputs["logits"]


def ordered_accuracy(prediction: Any) -> dict[str, float]:
    """A metric that sees order: the weight of a row is its place."""
    labels, logits = prediction.label_ids, prediction.predictions
    places = np.arange(1, len(labels) + 1)
    return {"score": float(((logits.argmax(-1) == labels) * places).sum()), "rows": float(len(labels))}


def evaluation_equals_one_process(world_size: int) -> list[str]:
    problems = []
    for kind, stages in (("bert_cls", (0, 3)), ("llama", (1, 2)), ("bert_mlm", (2,)), ("plain", (0,))):
        rows = common.rows(kind, ROWS[world_size])
        for stage in stages:
            metric = ordered_accuracy if kind == "bert_cls" else None
            trainer = trainer_for(kind, stage, world_size, rows, compute_metrics=metric)
            trainer.train()
            found = trainer.evaluate()
            want, logits = whole_loss(kind, common.parameters(trainer), rows)
            problems += common.compare(f"{kind} at stage {stage}", [found["eval_loss"]], [want])
            if metric is not None:
                labels = torch.stack([row["labels"] for row in rows])
                places = torch.arange(1, len(rows) + 1)
                right = float(((logits.argmax(-1) == labels) * places).sum())
                problems += common.compare("score", [found["eval_score"], found["eval_rows"]], [right, len(rows)])
            share = sum(SHARES[world_size][trainer.args.process_index]) * 2 * world_size
            if trainer.given[0] != share // sum(map(sum, SHARES[world_size])):
                problems.append(f"{kind}: rank {trainer.args.process_index} was given {trainer.given}")
    return problems


def predictions_come_in_order(world_size: int) -> list[str]:
    rows = common.rows("bert_cls", ROWS[world_size])
    trainer = trainer_for("bert_cls", 2, world_size, None)
    trainer.train()
    found = trainer.predict(rows)
    _, logits = whole_loss("bert_cls", common.parameters(trainer), rows)
    labels = [int(row["labels"]) for row in rows]
    problems = [] if found.label_ids.tolist() == labels else [f"labels {found.label_ids.tolist()}, expected {labels}"]
    if found.predictions.shape != tuple(logits.shape) or not np.allclose(found.predictions, logits, atol=1e-5):
        problems.append(f"predictions {found.predictions}, expected {logits}")
    return problems


def evaluation_without_training(world_size: int) -> list[str]:
    problems = []
    for kind in ("llama", "bert_cls"):
        rows = common.rows(kind, ROWS[world_size])
        trainer = trainer_for(kind, 2, world_size, rows)
        found = trainer.evaluate()
        want, _ = whole_loss(kind, dict(common.new_model(kind).state_dict()), rows)
        problems += common.compare(kind, [found["eval_loss"]], [want])
        trainer.train()
        want = common.reference(kind, common.rows(kind, 12), 4, steps=2, optimizer="sgd")
        problems += common.compare_parameters(common.parameters(trainer), want.parameters)
    return problems


def a_stream_is_evaluated(world_size: int) -> list[str]:
    rows = common.rows("bert_cls", ROWS[world_size])
    trainer = trainer_for("bert_cls", 0, world_size, Stream(rows), compute_metrics=ordered_accuracy)
    trainer.train()
    found = trainer.evaluate()
    want, _ = whole_loss("bert_cls", common.parameters(trainer), rows)
    return common.compare("loss and rows", [found["eval_loss"], found["eval_rows"]], [want, float(len(rows))])
