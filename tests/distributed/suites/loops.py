"""The plain Accelerate loop that the suites run."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from suites import common
from torch import nn
from torch.utils.data import DataLoader

from accelerate_poplar import PoplarAccelerator, PoplarPlugin


@dataclasses.dataclass
class Result:
    losses: list[float]
    learning_rates: list[float]
    parameters: dict[str, torch.Tensor]
    accelerator: Any


def accelerator_for(stage: int | str, **kwargs: Any) -> PoplarAccelerator:
    common.reset_host()
    plugin = None if stage == "ddp" else PoplarPlugin(zero_stage=stage)
    return PoplarAccelerator(deepspeed_plugin=plugin, **kwargs)


def parameters(accelerator: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict(accelerator.unwrap_model(model).named_parameters())
    partitioned = [p for p in named.values() if hasattr(p, "ds_id")]
    if not partitioned:
        return {name: p.detach().float().clone() for name, p in named.items()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned):
        return {name: p.detach().float().clone() for name, p in named.items()}


def train(case: Any, data: list[Any], *, steps: int = common.STEPS) -> Result:
    plan = common.make_plan(case.zero_stage, [list(own) for own in case.sizes])
    accelerator = accelerator_for(
        case.stage, poplar_plan=plan, gradient_accumulation_steps=max(len(own) for own in case.sizes)
    )
    model = common.new_model(case.kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(data, batch_size=1, collate_fn=common.collate)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    losses: list[float] = []
    rates: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    losses.append(float(accelerator.step_loss()))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(scheduler.get_last_lr()[0])
                if len(losses) == steps:
                    break
    return Result(losses, rates, parameters(accelerator, model), accelerator)
