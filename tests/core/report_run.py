"""Output directories of runs that never took place, for the tests of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate_poplar.cluster import cluster_from_dict
from accelerate_poplar.model_shape import find_model
from accelerate_poplar.plan import Plan
from accelerate_poplar.profiles import ClusterProfile
from accelerate_poplar.search import find_plan
from accelerate_poplar.simulate import Workload, simulated_profile

CLUSTER = {
    "name": "two kinds",
    "hosts": [
        {"name": "big", "device": "A100-80GB", "count": 2, "link_gbytes_per_s": 20},
        {"name": "small", "device": "V100S-PCIe-32GB", "count": 2, "link_gbytes_per_s": 10},
    ],
    "inter_host_gbytes_per_s": 5,
}
STEPS = (50, 100, 150, 200)


def simulated(zero_stage: int = 2, global_batch_size: int = 64) -> tuple[ClusterProfile, Plan]:
    """A profile and its plan on a cluster of two kinds."""
    work = Workload(model=find_model("llama-0.5b", seq_len=1024))
    profile = simulated_profile(cluster_from_dict(CLUSTER), work, zero_stage=zero_stage)
    return profile, find_plan(profile, global_batch_size=global_batch_size, zero_stage=zero_stage)


def history_line(step: int, seconds: float, plan: Plan, **changes: Any) -> dict[str, Any]:
    """One line of the history, `seconds` a step on every rank."""
    line = {
        "version": 1,
        "step": step,
        "samples": 50 * plan.global_batch_size,
        "step_time_s": seconds,
        "predicted_step_time_s": plan.predicted_step_time_s,
        "samples_per_s": plan.global_batch_size / seconds,
        "tokens_per_s": 1024 * plan.global_batch_size / seconds,
        "idle_fraction": 0.03,
        "mfu": 0.31,
        "emulated": False,
        "ranks": [
            {
                "rank": rank,
                "compute_time_s": 0.8 * seconds,
                "wait_time_s": 0.2 * seconds,
                "peak_memory_gib": 20.0 + rank,
            }
            for rank in range(plan.world_size)
        ],
        "event": None,
    }
    return line | changes


def write_run(folder: Path) -> Plan:
    """A whole run: plan, profile, history with two events, trainer state."""
    folder.mkdir(parents=True, exist_ok=True)
    profile, plan = simulated()
    profile.save(folder / "profiles.json")
    plan.save(folder)
    seconds = plan.predicted_step_time_s
    lines = [
        history_line(STEPS[0], 1.5 * seconds, plan),
        history_line(STEPS[1], 1.02 * seconds, plan),
        {
            "version": 1,
            "step": STEPS[1],
            "event": {"kind": "straggler", "text": "rank 1 takes 1.40x the time it was profiled at", "rank": 1},
        },
        history_line(STEPS[2], 1.4 * seconds, plan),
        {
            "version": 1,
            "step": STEPS[2],
            "event": {"kind": "replan", "text": "rank 1 gets 3 samples fewer", "rank": 1},
        },
        history_line(STEPS[3], 1.1 * seconds, plan),
    ]
    (folder / "poplar_history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = [{"step": 100, "loss": 5.25}, {"step": 200, "loss": 4.125}, {"step": 200, "train_runtime": 10.0}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return plan
