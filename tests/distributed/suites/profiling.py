"""Profiling between two real ranks."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import torch
import torch.distributed as dist
from profiling_cases import TWO_RANKS
from suites import common
from suites.common import collate, new_model, parameters, rows, run_cases, train
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from accelerate_poplar import PoplarConfig
from accelerate_poplar.allocations import AllocationCounter
from accelerate_poplar.comm import connect, together
from accelerate_poplar.emulation import Emulation
from accelerate_poplar.host import start_gloo_state
from accelerate_poplar.measure import MeasuredProfile, explain_memory, profile_cluster
from accelerate_poplar.memory import predict_activations
from accelerate_poplar.model_state import ZeroSettings, model_size, model_states
from accelerate_poplar.preflight import preflight
from accelerate_poplar.profile_cache import ProfileCache

CPU = torch.device("cpu")
BUCKET = 2_000


def token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def token_rows(size: int) -> dict[str, torch.Tensor]:
    return collate(rows("llama", size))


def profile(model: nn.Module, **changes: Any) -> MeasuredProfile:
    values: dict[str, Any] = {
        "model": model,
        "loss_fn": token_loss,
        "make_batch": token_rows,
        "ranks": connect(60.0),
        "device": CPU,
        "dtype": torch.float32,
        "zero_stages": (0, 1, 2, 3),
        "largest_micro_batch": 4,
        "user_caps": None,
        "memory_fraction": 0.9,
        "budget_s": 5.0,
        "relative_error": 0.2,
        "model_name": "tiny",
        "seq_len": common.LENGTH,
    }
    return profile_cluster(**{**values, **changes})


def same_profile_on_both() -> list[str]:
    measured = profile(new_model("llama"), emulation=Emulation(slowdown=(1.0, 2.0)[dist.get_rank()]))
    problems = []
    if len({str(other) for other in connect(60.0).gather(measured.to_dict())}) > 1:
        problems.append("the ranks hold different profiles")
    stages = measured.zero_stages
    if stages[0].per_micro_step_s or stages[1].per_micro_step_s:
        problems.append("stages 0 and 1 do not communicate in every micro-step")
    if not stages[2].per_micro_step_s or not stages[3].per_micro_step_s > stages[2].per_micro_step_s:
        problems.append(f"stage 3 costs more in every micro-step than stage 2: {stages}")
    if not all(stage.per_step_s > 0.0 for stage in stages.values()):
        problems.append(f"a step costs something at every stage: {stages}")
    if not measured.emulated or measured.stragglers:
        problems.append("emulated ranks are called emulated, and no stragglers")
    return problems


def engines_leave_no_trace() -> list[str]:
    model = new_model("llama")
    model.eval()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pointers = [p.data_ptr() for p in model.parameters()]
    state = torch.get_rng_state()
    profile(model)
    problems = [n for n, p in model.named_parameters() if not torch.equal(before[n], p) or p.grad is not None]
    if not torch.equal(state, torch.get_rng_state()):
        problems.append("torch's random numbers moved")
    if pointers != [p.data_ptr() for p in model.parameters()] or model.training:
        problems.append("the model was replaced or left in training mode")
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        problems.append("hooks were left")
    return problems


def partitioned_model() -> list[str]:
    """A model created under `deepspeed.zero.Init` is profiled and stays partitioned as it was."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = new_model("llama")
    shards = {name: p.ds_tensor.detach().clone() for name, p in model.named_parameters()}
    measured = profile(model, zero_stages=(3,))
    problems = [n for n, p in model.named_parameters() if not torch.equal(shards[n], p.ds_tensor)]
    problems += [n for n, p in model.named_parameters() if p.numel() != 0]
    whole = profile(new_model("llama"), zero_stages=(3,))
    if measured.num_parameters != whole.num_parameters or measured.memory[0].states != whole.memory[0].states:
        problems.append("the partitioned model counts as smaller than it is")
    if [p.micro_batch_size for p in measured.ranks[0].points][:2] != [1, 2]:
        problems.append(f"points: {measured.ranks[0].points}")
    return problems


def training_state(zero_stage: int) -> list[str]:
    """Predicted training state, and peak, against what an engine really allocates."""
    problems = []
    for dtype in (torch.float32, torch.bfloat16):
        problems += _training_state(zero_stage, dtype)
    return problems


def _training_state(zero_stage: int, dtype: torch.dtype) -> list[str]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 4,
        "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": BUCKET, "stage3_prefetch_bucket_size": 100},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype is torch.bfloat16},
    }
    make = common.tiny_llama
    size = model_size(make(64, 3))
    states = model_states(
        size, dtype=dtype, zero_stage=zero_stage, world_size=2, settings=ZeroSettings.from_config(config)
    )
    activations = predict_activations(make(64, 3), token_loss, token_rows, device=CPU, dtype=dtype)
    counter = AllocationCounter()
    with counter:
        model = make(64, 3)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config
        )
        for _ in range(3):
            peaks = []
            for _ in range(2):
                # What only a cycle of references holds is let go of at no particular time.
                gc.collect()
                counter.reset_peak()
                engine.backward(token_loss(engine, token_rows(4)))
                peaks.append(counter.peak_bytes)
                engine.step()
    gc.collect()
    idle = states.parameters + states.optimizer
    if zero_stage == 3:
        idle += states.gradients + states.buffers
    expected = states.total + activations.at(4)
    problems = []
    # Small parameters stay gathered between steps at stage 3, and are gathered again with the rest.
    if not (0.8 if zero_stage == 3 else 0.95) * idle <= counter.live_bytes <= 1.05 * idle:
        problems.append(f"{dtype}: holds {counter.live_bytes} bytes between steps, formula {idle}")
    # At stage 2 it depends on the rank whether its gradients come when activations are most.
    if not 0.95 * max(peaks) <= expected <= (1.25 if zero_stage == 2 else 1.10) * max(peaks):
        problems.append(f"{dtype}: peaks at {max(peaks)} bytes, predicted {expected}")
    engine.destroy()
    return problems


class BatchNorm(nn.Module):
    """Statistics that profiling must not touch, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layers(features).squeeze(-1)}


def training_unchanged(kind: str, zero_stage: int) -> list[str]:
    """An even split by hand (nothing profiled) and an even split after profiling train the same bits."""

    def run(config: PoplarConfig) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], torch.Tensor]:
        if kind == "dropout":
            torch.manual_seed(5)
            model: nn.Module = BertForMaskedLM(
                BertConfig(
                    vocab_size=common.VOCABULARY,
                    hidden_size=16,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    intermediate_size=32,
                    max_position_embeddings=common.LENGTH,
                )
            )
        else:
            torch.manual_seed(5)
            model = BatchNorm()
        name = "bert_mlm" if kind == "dropout" else "plain"
        trainer = train(
            name, rows(name, 32), model=model, trainer_kwargs={"poplar_config": config}, optim="adamw_torch"
        )
        buffers = [b.clone() for b in trainer.accelerator.unwrap_model(trainer.model_wrapped).buffers()]
        return parameters(trainer), buffers, torch.get_rng_state()

    by_hand = run(PoplarConfig(per_rank_micro_batch_sizes=(4, 4), zero_stage=zero_stage, report=False))
    with tempfile.TemporaryDirectory() as folder:
        profiled = run(
            PoplarConfig(
                strategy="even",
                global_batch_size=8,
                zero_stage=zero_stage,
                report=False,
                reprofile=True,
                profile_budget_s=3.0,
                cache_dir=folder,
            )
        )
    problems = [name for name, value in by_hand[0].items() if not torch.equal(value, profiled[0][name])]
    if not all(torch.equal(a, b) for a, b in zip(by_hand[1], profiled[1], strict=True)):
        problems.append("buffers differ")
    if not torch.equal(by_hand[2], profiled[2]):
        problems.append("random numbers differ")
    return problems


def memory_two_to_one(zero_stage: int) -> list[str]:
    """Emulated memories of 2 to 1: the plan keeps to them and the run stays within."""
    model = common.tiny_llama(64, 3)
    settings = ZeroSettings(reduce_bucket_elements=BUCKET)
    states = model_states(
        model_size(model), dtype=torch.float32, zero_stage=zero_stage, world_size=2, settings=settings
    )
    activations = predict_activations(model, token_loss, token_rows, device=CPU, dtype=torch.float32)
    small = states.total + activations.at(4)
    gib = [2 * small / 0.9 / 2**30, small / 0.9 / 2**30]
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET},
        "zero_allow_untested_optimizer": True,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"POPLAR_EMULATE_MEMORY_GIB": ",".join(f"{value:.9f}" for value in gib)}),
    ):
        trainer = train(
            "llama",
            rows("llama", 64),
            model=model,
            trainer_kwargs={
                "poplar_config": PoplarConfig(
                    global_batch_size=16, report=False, cache_dir=folder, profile_budget_s=3.0
                )
            },
            deepspeed=config,
            optim="adamw_torch",
        )
    caps = trainer.poplar.profile.stage(zero_stage).max_micro_batch_size
    sizes = [rank.micro_batch_sizes for rank in trainer.poplar.plan.ranks]
    problems = []
    if not 2 <= caps[1] <= 5 or not caps[1] < caps[0]:
        problems.append(f"caps {caps}, expected about 4 on rank 1 and more on rank 0")
    if any(max(own) > cap for own, cap in zip(sizes, caps, strict=True)):
        problems.append(f"the plan {sizes} breaks the caps {caps}")
    if not trainer.poplar.profile.emulated:
        problems.append("emulated figures are not called so")
    return problems


def out_of_memory_in_the_step() -> list[str]:
    """Memory that holds the state, but not the optimizer step, holds nothing."""
    size = model_size(new_model("llama"))
    states = model_states(size, dtype=torch.bfloat16, zero_stage=0, world_size=2)
    memory_bytes = (states.total + states.at_step) // 2 if dist.get_rank() == 1 else 2**30
    measured = profile(
        new_model("llama"),
        dtype=torch.bfloat16,
        zero_stages=(0,),
        memory_fraction=1.0,
        emulation=Emulation(memory_bytes=memory_bytes),
        largest_micro_batch=1,
    )
    text = explain_memory(measured, 0)
    if measured.stage(0).max_micro_batch_size[1] != 0 or "rank 1" not in text or "optimizer step" not in text:
        return [f"{measured.stage(0)}: {text}"]
    return []


def second_start() -> list[str]:
    with tempfile.TemporaryDirectory() as own:
        folder = connect(60.0).broadcast(own)
        cache = ProfileCache(folder=Path(folder))
        first = profile(new_model("llama"), cache=cache)
        again = profile(new_model("llama"), cache=cache)
        other = profile(new_model("llama"), cache=cache, seq_len=common.LENGTH + 1)
        dist.barrier()
    problems = []
    if again.timed_micro_steps or again.ranks != first.ranks or again.zero_stages != first.zero_stages:
        problems.append("the second start did not use the stored profile")
    if not all(other.timed_micro_steps):
        problems.append("a changed sequence length was not measured")
    return problems


def flight() -> list[str]:
    report = preflight(connect(60.0), device=CPU, timeout_s=60.0)
    return [] if report.all_reduce_s > 0.0 and len(report.facts) == 2 else [str(report)]


def the_quicker_rank_goes_on() -> list[str]:
    """While the other rank still measures, nobody idles, so that none is timed on a host that is quieter than in training."""
    ranks = connect(60.0)
    calls: list[int] = []

    def again(found: int) -> bool:
        time.sleep(0.01)
        calls.append(found)
        return True

    result = together(ranks, lambda: time.sleep(0.5 * ranks.rank) or 7, again)
    counts = ranks.gather(len(calls))
    wrong = result != 7 or set(calls) - {7} or counts[0] < 5 or counts[1] > counts[0]
    return [f"result {result}, calls by rank {counts}"] if wrong else []


def crash() -> None:
    """Not a check: one rank fails while profiling, and all must end."""
    start_gloo_state()

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if dist.get_rank() == 1:
            if os.environ["POPLAR_TEST_CRASH"] == "dies":
                os._exit(9)
            raise RuntimeError("scripted crash")
        return token_loss(model, batch)

    profile(new_model("llama"), loss_fn=loss_fn)


def cases() -> dict[str, Callable[[], Any]]:
    table: dict[str, Callable[[], Any]] = {
        "same_profile_on_both": same_profile_on_both,
        "engines_leave_no_trace": engines_leave_no_trace,
        "partitioned_model": partitioned_model,
        **{f"training_state-zero{s}": (lambda s=s: training_state(s)) for s in range(4)},
        **{
            f"training_unchanged-{kind}-zero{s}": (lambda kind=kind, s=s: training_unchanged(kind, s))
            for kind in ("dropout", "batch_norm")
            for s in (0, 3)
        },
        **{f"memory_two_to_one-zero{s}": (lambda s=s: memory_two_to_one(s)) for s in range(4)},
        "out_of_memory_in_the_step": out_of_memory_in_the_step,
        "second_start": second_start,
        "preflight": flight,
        "the_quicker_rank_goes_on": the_quicker_rank_goes_on,
    }
    missing = set(TWO_RANKS) ^ set(table)
    if missing:
        raise KeyError(f"profiling_cases.py and this suite differ: {sorted(missing)}")
    return table


if __name__ == "__main__":
    if os.environ.get("POPLAR_TEST_CRASH"):
        crash()
    else:
        only = os.environ.get("POPLAR_TEST_ONLY")
        run_cases({name: case for name, case in cases().items() if not only or only in name})
