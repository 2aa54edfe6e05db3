"""What every rank of `bench_state.py` does; the measurement to take is the first argument, a JSON object the second."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import torch
import torch.distributed as dist
from deepspeed.utils import logger
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from accelerate_poplar.comm import Ranks, connect
from accelerate_poplar.curve import StepTimeCurve
from accelerate_poplar.emulation import Emulation
from accelerate_poplar.errors import InsufficientMemoryError
from accelerate_poplar.measure import profile_cluster
from accelerate_poplar.memory import predict_activations
from accelerate_poplar.model_state import ZeroSettings, model_size, model_states
from accelerate_poplar.profiles import ClusterProfile
from accelerate_poplar.rank_memory import RankMemory
from accelerate_poplar.state_budget import state_memory
from accelerate_poplar.state_collectives import gather_shards, reduce_shards
from accelerate_poplar.state_layout import StateShares
from accelerate_poplar.state_memory import StateMemory
from accelerate_poplar.state_plan import StatePlan, find_state_plan, plan_with_fractions
from accelerate_poplar.state_shards import held_bytes, uneven_state
from accelerate_poplar.state_simulation import fits

MIB = 2**20
VOCABULARY = 1024
WARM_UP = 2


def make_model(layers: int, hidden: int) -> LlamaForCausalLM:
    """A Llama of any size, the same on every rank."""
    set_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=max(1, hidden // 64),
            max_position_embeddings=256,
            use_cache=False,
        )
    )


def make_batch(rows: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens."""
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def deepspeed_config(zero_stage: int) -> dict[str, Any]:
    """Small buffers, so that the shares are what is seen."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": zero_stage,
            "reduce_bucket_size": 2_000_000,
            "stage3_prefetch_bucket_size": 1_000_000,
            "stage3_max_live_parameters": 2_000_000,
            "stage3_param_persistence_threshold": 1000,
        },
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def build(model: torch.nn.Module, zero_stage: int, fractions: tuple[float, ...] | None, steps: int = 1) -> Any:
    """An engine on given shares."""
    config = deepspeed_config(zero_stage) | {"gradient_accumulation_steps": steps}
    with uneven_state(fractions, zero_stage=zero_stage, deepspeed_config=config):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def memory(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes this rank holds, and its resident memory between two steps."""
    fractions = tuple(request["fractions"]) or None
    engine = build(make_model(request["layers"], request["hidden"]), request["zero_stage"], fractions)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        engine.backward(engine(**make_batch(1, 32)).loss)
        engine.step()
        seconds.append(time.perf_counter() - start)
    gc.collect()
    held = held_bytes(engine)
    return {
        "held_mib": held.total / MIB,
        "resident_mib": psutil.Process().memory_info().rss / MIB,
        "step_s": min(seconds),
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
    }


def exchange(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of even and uneven exchanges of the same bytes."""
    group, rank, world_size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    flat = torch.zeros(request["mib"] * MIB // 2 // 240 * 240, dtype=torch.bfloat16)
    bounds = StateShares(fractions=tuple(request["fractions"])).bounds(flat.numel())
    sizes = [after - before for before, after in itertools.pairwise(bounds)]
    equal = flat.numel() // world_size
    own = torch.zeros(equal, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {
        "gather_even": lambda: dist.all_gather_into_tensor(flat, flat[rank * equal : (rank + 1) * equal].clone()),
        "gather_uneven": lambda: gather_shards(torch.split(flat, sizes), group),
        "reduce_even": lambda: dist.reduce_scatter_tensor(own, flat),
        "reduce_uneven": lambda: reduce_shards(torch.split(flat, sizes), group),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(request["rounds"] + 1):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


@dataclasses.dataclass
class Setting:
    """Two emulated ranks and what they are asked to train."""

    request: dict[str, Any]
    ranks: Ranks
    emulation: Emulation

    def plans(self, layers: int) -> tuple[ClusterProfile, dict[str, StatePlan | None]]:
        """Profile a model of so many layers, and plan with even and with free shares; a collective call.

        The emulated memory is what the planner is told; a model that does not fit it with even shares is timed all the same.
        None: does not fit.
        """
        stage, length, batch = (self.request[name] for name in ("zero_stage", "length", "global_batch_size"))
        profile = profile_cluster(
            model=make_model(layers, self.request["hidden"]),
            loss_fn=lambda own, batch: own(**batch).loss,
            make_batch=lambda rows: make_batch(rows, length),
            ranks=self.ranks,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            zero_stages=(stage,),
            largest_micro_batch=batch,
            user_caps=None,
            memory_fraction=1.0,
            budget_s=self.request["budget_s"],
            relative_error=0.03,
            model_name="llama",
            seq_len=length,
            emulation=self.emulation,
            deepspeed_config=deepspeed_config(stage),
        )
        known = self.memory(layers)
        asked = {"global_batch_size": batch, "zero_stage": stage}
        even = [1 / len(known)] * len(known)
        return profile, {
            "even": _unless_too_large(lambda: plan_with_fractions(profile, known, even, **asked)),
            "free": _unless_too_large(lambda: find_state_plan(profile, known, **asked)),
        }

    def memory(self, layers: int) -> tuple[StateMemory, ...]:
        """Every rank's memory with a model of so many layers, as predicted; nothing is run."""
        stage, length = self.request["zero_stage"], self.request["length"]
        model = make_model(layers, self.request["hidden"])
        activations = predict_activations(
            model,
            lambda own, batch: own(**batch).loss,
            lambda rows: make_batch(rows, length),
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            sizes=(1, 2, 4),
        )
        states = model_states(
            model_size(model),
            dtype=torch.bfloat16,
            zero_stage=stage,
            world_size=self.ranks.world_size,
            settings=ZeroSettings.from_config(deepspeed_config(stage)),
        )
        ranks = [
            RankMemory(
                device_bytes=mib * MIB,
                budget_bytes=mib * MIB,
                activations=activations,
                measured_correction=1.0,
                states={stage: states},
            )
            for mib in self.request["memory_mib"]
        ]
        return state_memory(ranks, stage, largest_micro_batch=self.request["global_batch_size"])

    def largest(self) -> dict[str, int]:
        """Layers of the largest model with room for one sample on every rank, with even and with free shares; 0: none."""
        found = {"even": 0, "free": 0}
        for layers in range(1, self.request["most_layers"] + 1):
            memory = self.memory(layers)
            if not fits(memory, uneven=True):
                break
            found["free"] = layers
            if fits(memory, uneven=False):
                found["even"] = layers
        return found

    def timed(self, found: StatePlan, layers: int, profile: ClusterProfile) -> float:
        """Median seconds of an optimizer step of a plan, the ranks as fast as their profile says."""
        rank, batch = self.ranks.rank, self.request["global_batch_size"]
        sizes = found.plan.ranks[rank].micro_batch_sizes
        times = StepTimeCurve.fit(profile.ranks[rank].points, max_micro_batch_size=batch).times()
        engine = build(
            make_model(layers, self.request["hidden"]), self.request["zero_stage"], found.fractions, steps=len(sizes)
        )
        seconds = []
        with self.emulation.attach(engine.module):
            for step in range(WARM_UP + self.request["steps"]):
                dist.barrier()
                start = time.perf_counter()
                for number, size in enumerate(sizes):
                    rows = make_batch(max(1, size), self.request["length"], seed=1000 * step + number)
                    self.emulation.expect(float(times[max(1, size)]))
                    engine.backward(engine(**rows).loss * (size * self.ranks.world_size / batch))
                    engine.step()
                dist.barrier()
                seconds.append(time.perf_counter() - start)
        self.emulation.expect(None)
        engine.destroy()
        del engine
        gc.collect()
        return statistics.median(seconds[WARM_UP:])


def _unless_too_large(plan: Callable[[], StatePlan]) -> StatePlan | None:
    try:
        return plan()
    except InsufficientMemoryError:
        return None


def gain(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The largest model with even and with free shares, and the speed of both at these sizes; a collective call."""
    setting = Setting(request, connect(300.0), Emulation(slowdown=request["slowdown"][dist.get_rank()]))
    largest = setting.largest()
    found = []
    for layers in sorted(set(largest.values()) - {0}):
        profile, plans = setting.plans(layers)
        found.append(
            {
                "layers": layers,
                "parameters": profile.num_parameters,
                "largest": largest,
                "plans": {name: _plan_figures(plan) for name, plan in plans.items()},
                "measured_s": {
                    name: None if plan is None else setting.timed(plan, layers, profile)
                    for name, plan in plans.items()
                },
            }
        )
    return found


def _plan_figures(plan: StatePlan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {
        "fractions": plan.fractions,
        "micro_batch_sizes": [list(rank.micro_batch_sizes) for rank in plan.plan.ranks],
        "predicted_s": plan.plan.predicted_step_time_s,
        "held_mib": [count / MIB for count in plan.held_bytes],
    }


def main() -> None:
    """Take one measurement and let rank 0 write what all ranks found."""
    warnings.simplefilter("ignore")
    logger.setLevel(logging.ERROR)
    name, request, output = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    deepspeed.init_distributed("gloo")
    found = {"memory": memory, "exchange": exchange, "gain": gain}[name](request)
    reports = connect(300.0).gather(found)
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
