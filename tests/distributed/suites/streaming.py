"""Streams on uneven ranks: every sample once, nothing waits for ever, a position is a number of samples."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from streaming_cases import cases
from suites import common, loops
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate_poplar import PoplarTrainer, RankError
from accelerate_poplar.comm import connect

STEPS_BEFORE = 2


class Stream(IterableDataset):
    """Yields rows, and nothing else is known of it."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows


class Scores(nn.Module):
    """Takes padded rows of numbers; its loss is a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, ids: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(values.mean(dim=1, keepdim=True)) - 1.0).square().mean()}


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    values = nn.utils.rnn.pad_sequence([row["values"] for row in rows], batch_first=True)
    return {"ids": torch.tensor([row["ids"] for row in rows]), "values": values}


def numbered(count: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Rows of 4 to 64 values."""
    return [{"ids": first + i, "values": torch.full((4 + (i * 7) % 61,), float(i % 5))} for i in range(count)]


class Watcher(PoplarTrainer):
    """Remembers the sample numbers this rank has run."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if hasattr(inputs, "micro_batches"):
            batches = [batch for batch in inputs.micro_batches if batch is not None]
            self.seen = [*getattr(self, "seen", []), *(int(i) for batch in batches for i in batch["ids"])]
        return super().training_step(model, inputs, num_items_in_batch)


def train(stage: int, sizes: list[list[int]], dataset: Any, *, max_steps: int, **overrides: Any) -> Any:
    """One run of the trainer over a stream of numbered rows."""
    common.reset_host()
    resume = overrides.pop("resume", None)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        trainer = Watcher(
            model=Scores(),
            args=common.arguments(
                overrides.pop("output_dir", folder), max_steps=max_steps, label_names=[], **overrides
            ),
            train_dataset=dataset,
            data_collator=padded,
            poplar_plan=common.make_plan(stage, sizes),
        )
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def together(own: list[int]) -> list[int]:
    return [number for part in connect(60.0).gather(own) for number in part]


def a_rank_takes_its_share_of_the_stream(world_size: int) -> list[str]:
    problems = []
    for stage, processes in ((0, 0), (2, 2), (3, 0)):
        trainer = train(stage, [[3], [1]], Stream(numbered(20)), max_steps=5, dataloader_num_workers=processes)
        counts = connect(60.0).gather(len(trainer.seen))
        if counts != [15, 5] or sorted(together(trainer.seen)) != list(range(20)):
            problems.append(f"stage {stage}: {counts}, {together(trainer.seen)}")
    return problems


def a_streamed_run_equals_one_process(world_size: int) -> list[str]:
    problems = []
    data = common.rows("llama", 26)
    want = common.reference("llama", data, 8, steps=4, optimizer="sgd")
    for stage in (1, 3):
        sizes = [[4, 1], [3]] if stage == 1 else [[4, 1], [3, 0]]
        trainer = common.train(
            "llama", Stream(data), max_steps=4, trainer_kwargs={"poplar_plan": common.make_plan(stage, sizes)}
        )
        problems += common.compare("loss", common.history(trainer, "loss"), want.losses)
        problems += common.compare_parameters(common.parameters(trainer), want.parameters)
    return problems


def a_filtered_and_shuffled_stream_is_seen_once(world_size: int) -> list[str]:
    import datasets

    problems = []
    rows = datasets.Dataset.from_list([{"ids": i, "values": [float(i % 5)] * (4 + i % 9)} for i in range(40)])
    for processes in (0, 2):
        stream = rows.to_iterable_dataset(num_shards=4).filter(lambda row: row["ids"] % 3 > 0)
        stream = stream.shuffle(seed=7, buffer_size=8).with_format("torch")
        trainer = train(0, [[3, 1], [2]], stream, max_steps=5, dataloader_num_workers=processes)
        found = sorted(together(trainer.seen))
        if found != [i for i in range(40) if i % 3 > 0]:
            problems.append(f"{processes} loader processes: {found}")
    return problems


def streams_that_end_unevenly_are_seen_once(world_size: int) -> list[str]:
    """Each rank has a stream of its own: one of them longer than the plan would have it."""
    problems = []
    lengths = {2: (4, 9), 3: (10, 2, 0)}[world_size]
    sizes = {2: [[3], [1]], 3: [[2], [1], [1]]}[world_size]
    rank = connect(60.0).rank
    for stage in (0, 2):
        rows = numbered(lengths[rank], first=sum(lengths[:rank]))
        trainer = train(stage, sizes, Stream(rows), max_steps=9 if world_size == 2 else 5)
        found = together(trainer.seen)
        if sorted(found) != list(range(sum(lengths))):
            problems.append(f"stage {stage}: {found}")
    return problems


def run_loop(
    stage: int | str, sizes: list[list[int]], dataset: Any, *, steps: int, save: str = "", load: str = ""
) -> list[list[int]]:
    """Sample numbers of all ranks in each optimizer step of a plain loop."""
    accelerator = loops.accelerator_for(
        stage, poplar_plan=common.make_plan(0 if stage == "ddp" else int(stage), sizes)
    )
    torch.manual_seed(0)
    model = Scores()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        DataLoader(dataset, batch_size=2, collate_fn=padded),
    )
    if load:
        accelerator.load_state(load)
    seen: list[list[int]] = []
    own: list[int] = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            own += batch["ids"].tolist() if accelerator._loop.micro_step.weight else []
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            seen.append(together(own))
            own = []
            if len(seen) == steps:
                break
    if save:
        accelerator.save_state(save)
        accelerator.wait_for_everyone()
    return seen


def a_loop_over_streams_that_end_unevenly(world_size: int) -> list[str]:
    problems = []
    rank = connect(60.0).rank
    for stage in ("ddp", 1, 2, 3):
        seen = run_loop(stage, [[2, 1], [1, 1]], Stream(numbered((5, 9)[rank], first=(0, 5)[rank])), steps=100)
        if sorted(number for step in seen for number in step) != list(range(14)) or len(seen) != 5:
            problems.append(f"stage {stage}: {seen}")
    return problems


def a_plan_for_three_shares_out_a_stream(world_size: int) -> list[str]:
    seen = run_loop(1, [[4], [2], [2]], Stream(numbered(19)), steps=100)
    want = [list(range(8)), list(range(8, 16)), [16, 17, 18]]
    return [] if [sorted(step) for step in seen] == want else [f"{seen}"]


def a_stream_continues_at_the_next_sample(world_size: int) -> list[str]:
    problems = []
    for stage in (0, 2):
        with tempfile.TemporaryDirectory() as folder:
            place = connect(60.0).broadcast(folder)
            train(
                stage,
                [[3], [1]],
                Stream(numbered(20)),
                max_steps=2,
                output_dir=place,
                save_strategy="steps",
                save_steps=2,
            )
            trainer = train(
                stage,
                [[2], [2]],
                Stream(numbered(20)),
                max_steps=5,
                output_dir=place,
                resume=str(Path(place) / "checkpoint-2"),
            )
            found = sorted(together(trainer.seen))
            if found != list(range(8, 20)):
                problems.append(f"stage {stage}: {found}")
    return problems


def a_loop_over_a_stream_continues_at_the_next_sample(world_size: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        place = connect(60.0).broadcast(str(Path(folder) / "state"))
        run_loop(2, [[3], [1]], Stream(numbered(18)), steps=3, save=place)
        seen = run_loop(2, [[1, 1], [1, 1]], Stream(numbered(18)), steps=100, load=place)
        connect(60.0).gather(None)
    want = [[12, 13, 14, 15], [16, 17]]
    return [] if [sorted(step) for step in seen] == want else [f"{seen}"]


def streams_that_diverge_are_told_apart(world_size: int) -> list[str]:
    """Alike at first, of different lengths in the end: an error on every rank, not a rank that waits."""
    rank = connect(60.0).rank
    try:
        run_loop(2, [[3], [1]], Stream(numbered((80, 70)[rank])), steps=100)
    except RankError as error:
        text = str(error)
        return [] if "rank 0: 4" in text and "rank 1: 2" in text else [text]
    return ["no RankError was raised"]


def main() -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    common.run_cases({name: functools.partial(globals()[name], world_size) for name in cases(world_size)})


if __name__ == "__main__":
    main()
