"""Training a tiny model on a DeepSpeed engine with given shares of its state: what the uneven-state suites share."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_optimizer_state
from state_cases import StateCase
from suites import common

from accelerate_poplar.state_shards import HeldBytes, held_bytes, uneven_state

STEPS = 3
ROWS = 40


def start() -> tuple[int, int]:
    """Join the process group; returns rank and world size."""
    logger.setLevel(logging.ERROR)
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo")
    return dist.get_rank(), int(os.environ["WORLD_SIZE"])


def deepspeed_config(case: StateCase, rank: int, world_size: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.zero_stage, **dict(case.zero)}
    if device := zero.pop("offload_param_device", None):
        zero["offload_param"] = {"device": device}
    if case.offload == "all" or (case.offload == "last" and rank == world_size - 1):
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "zero_optimization": zero,
        "bf16": {"enabled": case.bf16},
        "gradient_clipping": case.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def build(case: StateCase, **config: Any) -> Any:
    """A DeepSpeed engine around a new model, on the shares of the case."""
    rank, world_size = start()
    settings = deepspeed_config(case, rank, world_size) | config
    block = uneven_state(case.fractions or None, zero_stage=case.zero_stage, deepspeed_config=settings)
    if not case.fractions and case.offload == "last":
        block = nullcontext()
    init = deepspeed.zero.Init
    with block:
        if case.zero_init == "inside":
            init = deepspeed.zero.Init
        common.set_seed(3)
        with init(config_dict_or_path=settings) if case.zero_init else nullcontext():
            model = common.KINDS[case.kind].model()
        if case.frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("mlp" not in name and "intermediate" not in name)
        if case.checkpointing:
            model.gradient_checkpointing_enable()
        engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(case, model), config=settings)
    return engine


def _optimizer(case: StateCase, model: torch.nn.Module) -> torch.optim.Optimizer:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for _, p in named]}]
    if case.two_groups:
        groups = [
            {"params": [p for name, p in named if "layers.1" not in name]},
            {"params": [p for name, p in named if "layers.1" in name], "lr": 0.005},
        ]
    return torch.optim.SGD(groups, lr=0.05) if case.optimizer == "sgd" else torch.optim.AdamW(groups, lr=0.01)


def train(engine: Any, case: StateCase, *, steps: int = STEPS, first: int = 0) -> None:
    """Some optimizer steps on consecutive global batches, and one evaluation in between."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data, total = common.rows(case.kind, ROWS + sum(case.sizes)), sum(case.sizes)
    for step in range(first, first + steps):
        for micro_step in range(case.accumulation):
            start_row = (step * case.accumulation + micro_step) * total % ROWS + sum(case.sizes[:rank])
            batch = common.collate(data[start_row : start_row + case.sizes[rank]])
            loss = engine(**batch).loss * (case.sizes[rank] * world_size / total)
            engine.backward(loss)
            engine.step()
        if step == first:
            engine.eval()
            with torch.no_grad():
                engine(**common.collate(data[:2]))
            engine.train()


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters, fp32 master and optimizer moments of all parameters, whole, on every rank."""
    named = dict(engine.module.named_parameters())
    sharded = [p for p in named.values() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
        found = {name: p.detach().clone() for name, p in named.items()}
    keys = {key for state in engine.optimizer.optimizer.state.values() for key in state if key.startswith("exp_")}
    if len(engine.optimizer.optimizer.param_groups) > 1 and not sharded:
        # Stock DeepSpeed links the moments of the first parameter group only.
        keys.clear()
    for name, parameter in named.items():
        if parameter.requires_grad:
            found[f"{name}.fp32"] = safe_get_full_fp32_param(parameter).clone()
            for key in sorted(keys):
                found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


def run(case: StateCase) -> tuple[dict[str, torch.Tensor], HeldBytes]:
    """Train a new model; returns its whole state and what this rank held of it."""
    engine = build(case)
    train(engine, case)
    state, held = whole_state(engine), held_bytes(engine)
    engine.destroy()
    return state, held


def differences(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> list[str]:
    """Tensors that differ by more than `tolerance`, one sentence each."""
    if got.keys() != want.keys():
        return [f"states {sorted(got.keys() ^ want.keys())} are in one run only"]
    found = []
    for name, value in want.items():
        difference = (got[name].double() - value.double()).abs().max().item()
        if not difference <= tolerance:
            found.append(f"{name}: differs by {difference:.3g}")
    return found


def held_problems(held: HeldBytes, case: StateCase) -> list[str]:
    """Shares really held that are more than 2% away from the fractions; a collective call."""
    rank = dist.get_rank()
    sharded = ["master", "moments"] + (["parameters", "gradients"] if case.zero_stage == 3 else [])
    mine = torch.tensor([getattr(held, name) for name in sharded], dtype=torch.float64)
    total = mine.clone()
    dist.all_reduce(total)
    wanted = case.fractions[rank]
    # Of each parameter at least one element is held, which is more than a tiny share of a tiny model.
    allowed = 0.02 * wanted + (0.003 if wanted < 0.05 else 0.0)
    return [
        f"{name}: holds {own / whole:.4f} of all bytes, wanted {wanted}"
        for name, own, whole in zip(sharded, mine.tolist(), total.tolist(), strict=True)
        if whole and not abs(own / whole - wanted) <= allowed
    ]
