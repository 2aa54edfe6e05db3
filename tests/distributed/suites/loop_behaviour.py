"""What a plain loop does beyond its gradient: schedules, positions, evaluation, refusals."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from suites import common, loops
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler, TensorDataset

from accelerate_poplar import CompatibilityError, ConfigError, DataError, PoplarAccelerator, PoplarPlugin
from accelerate_poplar.comm import connect

STAGES = ("ddp", 0, 1, 2, 3)


class Line(nn.Module):
    """y = w x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


class TokenMean(nn.Module):
    """A mean over the labels that count, whose value the batch dictates."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.w[0] * values[labels != -100].mean()}


class Numbers(nn.Module):
    """Takes sample numbers; its loss is the mean of their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layer(ids.float().unsqueeze(-1) / 100).squeeze(-1)
        return {"loss": (scores - 1.0).square().mean(), "scores": scores}


def ids_of(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"ids": torch.tensor(index)} for index in range(count)]


def prepared(
    stage: int | str,
    sizes: list[list[int]],
    model: nn.Module,
    data: Any,
    *,
    loader: dict[str, Any] | None = None,
    schedule: Callable[[int], float] = lambda step: 1.0,
    lr: float = 0.1,
    **kwargs: Any,
) -> tuple[Any, ...]:
    plan = common.make_plan(0 if stage == "ddp" else int(stage), sizes)
    kwargs.setdefault("gradient_accumulation_steps", max(len(own) for own in sizes))
    accelerator = loops.accelerator_for(stage, poplar_plan=plan, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    settings = {"batch_size": 1, "collate_fn": common.collate} | (loader or {})
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(data, **settings), scheduler)


def value(model: nn.Module) -> float:
    return float(next(iter(loops.parameters(Accelerator(), model).values())))


@contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[list[str]]:
    problems: list[str] = []
    try:
        yield problems
    except kind as error:
        problems += [f"{part!r} is not in {error}" for part in parts if part not in str(error)]
    else:
        problems.append(f"no {kind.__name__} was raised")


def all_ids(own: list[int]) -> list[int]:
    return [number for part in connect(60.0).gather(own) for number in part]


# ---- loss and gradient ------------------------------------------------------------------------------------------


def line_has_the_global_gradient(world_size: int) -> list[str]:
    problems = []
    data = TensorDataset(torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 5.0]))
    for stage in STAGES:
        accelerator, model, optimizer, loader, _ = prepared(
            stage, [[3], [1]], Line(), data, loader={"collate_fn": None}
        )
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                if stage == "ddp" and abs(float(accelerator.unwrap_model(model).w.grad) + 4.0) > 1e-6:
                    problems.append(f"gradient {accelerator.unwrap_model(model).w.grad}, expected -4")
                optimizer.step()
                optimizer.zero_grad()
        if abs(value(model) - 0.4) > 1e-6:
            problems.append(f"stage {stage}: w = {value(model)}, expected 0.4")
    return problems


def _token_rows(first: list[float], second: list[float]) -> list[dict[str, torch.Tensor]]:
    rows = []
    for values in (first, second):
        labels = torch.tensor([1] * len(values) + [-100] * (8 - len(values)))
        rows.append({"values": torch.tensor(values + [0.0] * (8 - len(values))), "labels": labels})
    return rows


def tokens_weigh_alike(world_size: int) -> list[str]:
    accelerator, model, optimizer, loader, _ = prepared(
        2, [[1], [1]], TokenMean(), _token_rows([10.0], [2.0] * 7), lr=0.1
    )
    problems = []
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        problems += common.compare("loss", [float(accelerator.step_loss())], [3.0])
        problems += common.compare("items", [float(accelerator.items_in_step)], [8.0])
        optimizer.step()
    return problems + common.compare("w", [value(model)], [1.0 - 0.1 * 3.0])


def a_rank_without_labels_adds_nothing(world_size: int) -> list[str]:
    problems = []
    for stage in STAGES:
        accelerator, model, optimizer, loader, _ = prepared(
            stage, [[1], [1]], TokenMean(), _token_rows([], [2.0, 4.0])
        )
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                problems += common.compare(f"stage {stage}: loss", [float(accelerator.step_loss())], [3.0])
                optimizer.step()
        problems += common.compare(f"stage {stage}: w", [value(model)], [0.7])
    return problems


def a_sum_is_divided_by_the_items_of_the_step(world_size: int) -> list[str]:
    accelerator, model, optimizer, loader, _ = prepared(1, [[2, 1], [1]], Numbers(), ids_of(4), loss_reduction="sum")
    rates = []
    for batch in loader:
        with accelerator.accumulate(model):
            scores = model(**batch)["scores"]
            accelerator.backward((scores - 1.0).square().sum() / accelerator.items_in_step)
            if accelerator.sync_gradients:
                rates.append(float(accelerator.step_loss()))
            optimizer.step()
    other = Numbers()
    common.reset_host()
    return common.compare("loss", rates, [float(_numbers_loss(accelerator, model, other))])


def _numbers_loss(accelerator: Any, model: nn.Module, fresh: Numbers) -> torch.Tensor:
    # The first step's loss was taken before the update: undo it.
    trained = loops.parameters(accelerator, model)
    ids = torch.arange(4)
    with torch.no_grad():
        # loss = mean((w x + b - 1)^2); one SGD step of size 0.1 is inverted by solving for the old w and b.
        x = ids.float() / 100
        ones = torch.ones_like(x)
        design = torch.stack([x, ones], dim=1)
        step = torch.eye(2) - 0.2 * design.T @ design / 4
        new = torch.tensor([float(trained["layer.weight"]), float(trained["layer.bias"])])
        old = torch.linalg.solve(step, new - 0.2 * design.T @ ones / 4)
        fresh.layer.weight.copy_(old[0].reshape(1, 1))
        fresh.layer.bias.copy_(old[1].reshape(1))
        return fresh(ids)["loss"]


def a_loop_without_accumulate(world_size: int) -> list[str]:
    """zero_grad first, no accumulate(): the first loop of Accelerate's documentation."""
    problems = []
    data = common.rows("bert_cls", 24)
    want = common.reference("bert_cls", data, 8, steps=3, optimizer="sgd")
    for stage in ("ddp", 1, 3):
        sizes = [[2, 2, 1], [3, 0, 0]] if stage == 3 else [[2, 2, 1], [3]]
        accelerator, model, optimizer, loader, scheduler = prepared(
            stage, sizes, common.new_model("bert_cls"), data, lr=0.05
        )
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
        found = loops.parameters(accelerator, model)
        problems += [f"stage {stage}: {text}" for text in common.compare_parameters(found, want.parameters)]
    return problems


def clipping_is_done_where_the_loop_asks(world_size: int) -> list[str]:
    problems = []
    data = common.rows("llama", 8)
    model = common.new_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    norms = []
    for start in (0, 4):
        common.KINDS["llama"].loss(model, common.collate(data[start : start + 4])).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.25)))
        optimizer.step()
        optimizer.zero_grad()
    want = {name: p.detach() for name, p in model.named_parameters()}
    for stage in STAGES:
        sizes = [[2, 1], [1, 0]] if stage in (2, 3) else [[2, 1], [1]]
        accelerator, model, optimizer, loader, _ = prepared(stage, sizes, common.new_model("llama"), data, lr=0.05)
        found = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.25)
                if accelerator.sync_gradients and norm is not None:
                    found.append(float(norm))
                optimizer.step()
                optimizer.zero_grad()
        if stage != 0:
            problems += common.compare(f"stage {stage}: norm", found, norms)
        got = loops.parameters(accelerator, model)
        problems += [f"stage {stage}: {text}" for text in common.compare_parameters(got, want)]
    return problems


def the_schedule_takes_one_step_per_optimizer_step(world_size: int) -> list[str]:
    problems = []
    for stage in ("ddp", 1, 2):
        sizes = [[1, 1], [1, 1]] if stage == 2 else [[1, 1, 1], [1]]
        accelerator, model, optimizer, loader, scheduler = prepared(
            stage, sizes, Numbers(), ids_of(12), schedule=lambda step: 0.5**step
        )
        rates = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(scheduler.get_last_lr()[0])
        problems += common.compare(f"stage {stage}: lr", rates, [0.05, 0.025, 0.0125])
    return problems


# ---- data -------------------------------------------------------------------------------------------------------


def run_ids(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any, steps: int) -> list[list[int]]:
    """All ranks' sample numbers of each optimizer step."""
    seen: list[list[int]] = []
    own: list[int] = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator._loop.micro_step.weight:
                own += batch["ids"].tolist()
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            seen.append(all_ids(own))
            own = []
            if len(seen) == steps:
                break
    return seen


def every_sample_once_in_every_epoch(world_size: int) -> list[str]:
    problems = []
    for processes in (0, 2):
        accelerator, model, optimizer, loader, _ = prepared(
            0,
            [[3, 1], [2]],
            Numbers(),
            ids_of(100),
            loader={"shuffle": True, "num_workers": processes, "generator": torch.Generator().manual_seed(5)},
        )
        orders = []
        for _ in range(2):
            steps = run_ids(accelerator, model, optimizer, loader, 1000)
            orders.append([number for step in steps for number in step])
            if sorted(orders[-1]) != list(range(100)):
                problems.append(f"{processes} loader processes: {orders[-1]}")
            if [len(step) for step in steps] != [6] * 16 + [4]:
                problems.append(f"steps of {[len(step) for step in steps]}")
        if orders[0] == orders[1]:
            problems.append("both epochs have the same order")
    if len(loader) != 17 * 2:
        problems.append(f"len(loader) is {len(loader)}")
    return problems


def steps_hold_the_samples_of_the_stock_run(world_size: int) -> list[str]:
    """The same seed, loader and accumulation through stock Accelerate on the same two ranks."""
    torch.manual_seed(123)
    common.reset_host()
    stock = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = stock.prepare(DataLoader(ids_of(24), batch_size=2, shuffle=True, collate_fn=common.collate))
    want = []
    for _ in range(2):
        batches = [batch["ids"].tolist() for batch in loader]
        steps = [[*batches[start], *batches[start + 1]] for start in range(0, len(batches), 2)]
        want += [sorted(all_ids(step)) for step in steps]
    torch.manual_seed(123)
    plan = common.make_plan(0, [[4, 1], [3]])
    accelerator = loops.accelerator_for("ddp", poplar_plan=plan, gradient_accumulation_steps=2)
    model = Numbers()
    torch.manual_seed(123)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(ids_of(24), batch_size=2, shuffle=True, collate_fn=common.collate),
    )
    got = []
    for _ in range(2):
        got += [sorted(step) for step in run_ids(accelerator, model, optimizer, loader, 1000)]
    return [] if got == want else [f"{got}, expected {want}"]


def a_checkpoint_continues_at_the_next_sample(world_size: int) -> list[str]:
    problems = []
    data = common.rows("bert_cls", 20)
    for index, row in enumerate(data):
        row["ids"] = torch.tensor(index)
    want = common.reference(
        "bert_cls", [{k: v for k, v in row.items() if k != "ids"} for row in data], 4, steps=5, optimizer="sgd"
    )
    for stage in ("ddp", 1, 2):
        with tempfile.TemporaryDirectory() as folder:
            place = connect(60.0).broadcast(str(Path(folder) / "state"))
            _steps(stage, [[3], [1]], data, 3, save=place)
            found, ids = _steps(stage, [[1, 1], [1, 1]], data, 2, load=place)
            if [sorted(step) for step in ids] != [[12, 13, 14, 15], [16, 17, 18, 19]]:
                problems.append(f"stage {stage}: continued with {ids}")
            problems += [f"stage {stage}: {text}" for text in common.compare_parameters(found, want.parameters)]
            connect(60.0).gather(None)
    return problems


def _steps(
    stage: int | str, sizes: list[list[int]], data: Any, steps: int, *, save: str = "", load: str = ""
) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    accelerator, model, optimizer, loader, _ = prepared(stage, sizes, common.new_model("bert_cls"), data, lr=0.05)
    if load:
        accelerator.load_state(load)
        loader = accelerator.skip_first_batches(loader, 3 * accelerator.gradient_accumulation_steps)
    own: list[int] = []
    seen: list[list[int]] = []
    for batch in loader:
        own += batch.pop("ids").tolist()
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            seen.append(all_ids(own))
            own = []
            if len(seen) == steps:
                break
    if save:
        accelerator.save_state(save)
        accelerator.wait_for_everyone()
    return loops.parameters(accelerator, model), seen


def batches_can_be_skipped(world_size: int) -> list[str]:
    accelerator, model, optimizer, loader, _ = prepared(0, [[2], [1]], Numbers(), ids_of(9), loader={"batch_size": 1})
    problems = []
    for skipped, want in ((1, [3, 4, 5, 6, 7, 8]), (3, [])):
        steps = run_ids(accelerator, model, optimizer, accelerator.skip_first_batches(loader, skipped), 100)
        found = sorted(number for step in steps for number in step)
        if found != want:
            problems.append(f"skipping {skipped}: {found}")
    loader.batches_per_step = 2
    with refused(DataError, "skip_first_batches(3)", "multiple of 2") as found:
        accelerator.skip_first_batches(loader, 3)
    return problems + found


# ---- evaluation -------------------------------------------------------------------------------------------------


def evaluation_comes_in_order(world_size: int) -> list[str]:
    rows, world = {2: (10, [[3], [1]]), 3: (7, [[3], [2], [1]])}[world_size]
    common.reset_host()
    plan = common.make_plan(2, world)
    accelerator = PoplarAccelerator(deepspeed_plugin=PoplarPlugin(zero_stage=2), poplar_plan=plan)
    model = Numbers()
    with torch.no_grad():
        model.layer.weight.fill_(2.0)
        model.layer.bias.fill_(0.5)
    data = ids_of(rows)
    model, _, _, evaluation = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(ids_of(8), batch_size=2, collate_fn=common.collate),
        DataLoader(data, batch_size=2, collate_fn=common.collate),
    )
    model.eval()
    ids, names, losses, own = [], [], [], []
    for batch in evaluation:
        with torch.no_grad():
            outputs = model(**batch)
        found = accelerator.gather_for_metrics({"ids": batch["ids"], "scores": (outputs["scores"],)})
        ids += found["ids"].tolist()
        own.append(len(batch["ids"]))
        names += accelerator.gather_for_metrics([f"row {number}" for number in batch["ids"].tolist()])
        losses.append(accelerator.gather_for_metrics(outputs["loss"].repeat(2)))
        if found["scores"][0].shape != found["ids"].shape:
            return ["scores and ids differ in length"]
    want = float(((torch.arange(rows).float() / 50 + 0.5) - 1.0).square().mean())
    problems = common.compare("loss", [float(torch.cat(losses).mean())], [want])
    if ids != list(range(rows)) or names != [f"row {number}" for number in range(rows)]:
        problems.append(f"gathered {ids}, {names}")
    share = max(sum(rank) for rank in world)
    rank = connect(60.0).rank
    if rank == 0 and max(own) != min(share, rows):
        problems.append(f"rank 0 took {own} rows, expected up to {share}")
    with refused(DataError, "one entry per row") as found:
        for batch in evaluation:
            accelerator.gather_for_metrics(model(**batch)["loss"])
    return problems + found


# ---- refusals ---------------------------------------------------------------------------------------------------


def contradictions_are_refused_together(world_size: int) -> list[str]:
    common.reset_host()
    with refused(ConfigError, "2 problems", "split_batches", "dispatch_batches") as problems:
        PoplarAccelerator(
            deepspeed_plugin=PoplarPlugin(zero_stage=2),
            dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=True),
        )
    with refused(ConfigError, "per_rank_micro_batch_sizes has 3 values", "2 ranks") as found:
        PoplarAccelerator(poplar_config={"per_rank_micro_batch_sizes": [1, 2, 3]})
    with refused(ConfigError, "zero_stage is 3", "fixes zero_optimization.stage to 2") as more:
        PoplarPlugin(zero_stage=3, hf_ds_config={"zero_optimization": {"stage": 2}})
    return problems + found + more


class OwnBatches(Sampler):
    """A batch sampler of a script's own."""

    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 1]

    def __len__(self) -> int:
        return 1


def loaders_that_cannot_be_shared_out_are_refused(world_size: int) -> list[str]:
    problems = []
    data = ids_of(8)
    bad = {
        "batch_size None": {"batch_size": None, "collate_fn": None},
        "batch_sampler (OwnBatches)": {"batch_sampler": OwnBatches(), "batch_size": 1},
        "DistributedSampler": {"sampler": DistributedSampler(data)},
    }
    for text, settings in bad.items():
        with refused(DataError, text) as found:
            prepared(0, [[2], [1]], Numbers(), data, loader=settings)
        problems += found
    given = {"batch_sampler": BatchSampler(SequentialSampler(data), 2, drop_last=False), "batch_size": 1}
    accelerator, model, optimizer, loader, _ = prepared(0, [[2], [2]], Numbers(), data, loader=given)
    steps = run_ids(accelerator, model, optimizer, loader, 100)
    if steps != [[0, 1, 2, 3], [4, 5, 6, 7]]:
        problems.append(f"torch's own BatchSampler gave {steps}")
    return problems


def meeting_in_a_micro_step_of_one_rank_is_refused(world_size: int) -> list[str]:
    accelerator, model, optimizer, loader, _ = prepared(1, [[1, 1], [1]], Numbers(), ids_of(6))
    problems: list[str] = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if not accelerator.sync_gradients:
                with refused(CompatibilityError, "rank 0", "gather()", "sync_gradients") as found:
                    accelerator.gather(torch.ones(1))
                problems += found
            else:
                accelerator.gather(torch.ones(1))
            optimizer.step()
    return problems


def a_plan_is_found_by_profiling(world_size: int) -> list[str]:
    problems = []
    data = common.rows("bert_cls", 24)
    want = common.reference("bert_cls", data, 8, steps=3, optimizer="sgd")
    for stage in ("ddp", "auto"):
        with tempfile.TemporaryDirectory() as cache:
            settings = {"profile_budget_s": 0.5, "cache_dir": cache}
            accelerator = loops.accelerator_for(stage, poplar_config=settings)
            model = common.new_model("bert_cls")
            model, optimizer, loader = accelerator.prepare(
                model,
                torch.optim.SGD(model.parameters(), lr=0.05),
                DataLoader(data, batch_size=4, collate_fn=common.collate),
            )
            if accelerator.plan.global_batch_size != 8 or accelerator.poplar.profile is None:
                problems.append(f"{stage}: {accelerator.plan}")
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
            found = loops.parameters(accelerator, model)
            problems += [f"{stage}: {text}" for text in common.compare_parameters(found, want.parameters)]
    return problems
