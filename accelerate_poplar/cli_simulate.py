"""`accelerate-poplar simulate`: what a plan, or a cluster that need not exist, would give."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .advice import advise
from .cephalo import CephaloResult, simulate_cephalo
from .cluster import Cluster, load_cluster
from .errors import ConfigError, InsufficientMemoryError
from .latencies import LatencyTable
from .model_shape import MODELS, find_model
from .plan import Plan
from .profiles import ClusterProfile
from .search import ZeroStage
from .simulate import TABLE_DTYPES, StrategyResult, Workload, compare, evaluate, simulated_profile
from .simulate_report import SimulationReport, to_json, to_text

DEFAULT_TOKENS = 2**21
"""Tokens per optimizer step where no batch is given: the Poplar paper's 2 million."""

DESCRIPTION = """\
Predict the step time of every strategy under the step-time model. Nothing is run and no GPU is needed.

Either on measured profiles (--profiles, with --plan for a plan of your own), or on a cluster described in a YAML file
(--cluster, with --model). Every figure of a described cluster is simulated."""

EXAMPLE = f"""\
examples:
  accelerate-poplar simulate --profiles profiles.json --plan poplar_plan.json
  accelerate-poplar simulate --cluster configs/clusters/c.yaml --model llama-1.1b --timeline step.png
models: {", ".join(MODELS)}, or a transformers config.json"""


def zero_stage(text: str) -> ZeroStage:
    """Parse `0` to `3` or `auto`, for argparse."""
    if text == "auto":
        return "auto"
    if text in {"0", "1", "2", "3"}:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not 0, 1, 2, 3 or auto")


def add_parser(subparsers: Any) -> None:
    """Add the command `simulate`."""
    parser = subparsers.add_parser(
        "simulate",
        help="predict step times on a profile, or on a cluster that need not exist",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--profiles", metavar="FILE", help="measured cluster profile (profiles.json)")
    source.add_argument("--cluster", metavar="FILE", help="cluster file (YAML: hosts, devices, links)")
    parser.add_argument("--plan", metavar="FILE", help="with --profiles: a plan to judge beside the strategies")
    parser.add_argument("--model", metavar="NAME", help="with --cluster: a name from the list below, or a config file")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens per sample (default: the model's maximum)")
    parser.add_argument("--dtype", choices=sorted(TABLE_DTYPES), default="fp16", help="compute dtype (default: fp16)")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--latencies", metavar="FILE", help="measured per-layer times (JSON) to use for the curves")
    parser.add_argument(
        "--global-batch-size", type=int, metavar="N", help="samples per optimizer step (default: 2097152 tokens)"
    )
    parser.add_argument(
        "--zero-stage", type=zero_stage, default="auto", metavar="STAGE", help="0 to 3 or auto (default: auto)"
    )
    parser.add_argument("--advise", action="store_true", help="also say what to change about the cluster")
    parser.add_argument(
        "--timeline", metavar="FILE", help="draw one optimizer step, even split above optimal (PNG, SVG)"
    )
    parser.add_argument("--save-profiles", metavar="FILE", help="write the simulated profile to FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print.

    Returns:
        0.

    Raises:
        ConfigError, ProfileError, PlanError: A file or argument is wrong; the message says what to change.
    """
    if args.cluster:
        return _run_cluster(args)
    return _run_profiles(args)


def _run_profiles(args: argparse.Namespace) -> int:
    profile = ClusterProfile.load(args.profiles)
    plan = Plan.load(args.plan) if args.plan else None
    batch = args.global_batch_size
    if batch is None:
        batch = plan.global_batch_size if plan else _default_batch(profile.seq_len)
    if plan is not None:
        stages = [plan.zero_stage]
    else:
        stages = sorted(profile.zero_stages) if args.zero_stage == "auto" else [args.zero_stage]
    results = {stage: compare(profile, global_batch_size=batch, zero_stage=stage) for stage in stages}
    chosen = _best_stage(results, dict.fromkeys(stages, profile))
    own = None if plan is None else evaluate(profile, plan)
    advice = advise(profile, global_batch_size=batch, zero_stage=chosen) if args.advise else None
    report = SimulationReport(
        title=profile.model,
        simulated=False,
        emulated=profile.emulated,
        batch=batch,
        stage=chosen,
        results=results,
        own=own,
        advice=advice,
    )
    _finish(args, report, profile)
    return 0


def _run_cluster(args: argparse.Namespace) -> int:
    if args.plan:
        raise ConfigError("--plan belongs to --profiles; a plan is made for the profile of one cluster.")
    if not args.model:
        raise ConfigError(f"--cluster needs --model: one of {', '.join(MODELS)}, or a config.json.")
    cluster, work = load_cluster(args.cluster), _workload(args)
    batch = args.global_batch_size
    if batch is None:
        batch = _default_batch(work.model.seq_len)
    stages = [0, 1, 2, 3] if args.zero_stage == "auto" else [args.zero_stage]
    profiles = {stage: simulated_profile(cluster, work, zero_stage=stage) for stage in stages}
    results = {
        stage: compare(profile, global_batch_size=batch, zero_stage=stage, token_flops=work.token_flops)
        for stage, profile in profiles.items()
    }
    chosen = _best_stage(results, profiles)
    advice = None
    if args.advise:
        advice = advise(
            profiles[chosen],
            global_batch_size=batch,
            zero_stage=chosen,
            reshape=lambda ranks: simulated_profile(_placed(cluster, ranks), work, zero_stage=chosen),
        )
    report = SimulationReport(
        title=f"cluster {cluster.name}, {work.model.name}, {work.model.seq_len} tokens a sample",
        simulated=True,
        emulated=False,
        batch=batch,
        stage=chosen,
        results=results,
        advice=advice,
        cephalo=_cephalo(cluster, work, batch),
    )
    if args.save_profiles:
        profiles[chosen].save(args.save_profiles)
    _finish(args, report, profiles[chosen])
    return 0


def _placed(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    return replace(cluster, placement=tuple(cluster.placement[rank] for rank in ranks))


def _workload(args: argparse.Namespace) -> Workload:
    if not args.latencies:
        if args.dtype == "fp32":
            raise ConfigError("fp32 needs --latencies: the device table holds 16-bit figures only.")
        model = find_model(args.model, seq_len=args.seq_len)
        return Workload(model=model, dtype=args.dtype, checkpointing=args.checkpointing)
    if args.seq_len is None:
        raise ConfigError("--latencies needs --seq-len: the table holds curves for certain lengths only.")
    table = LatencyTable.load(args.latencies)
    model = table.shape(args.model, seq_len=args.seq_len)
    return Workload(model=model, dtype=args.dtype, checkpointing=args.checkpointing, table=table)


def _default_batch(seq_len: int) -> int:
    if seq_len == 0:
        raise ConfigError(
            "samples of this profile are not token rows, so the batch cannot be 2097152 tokens; "
            "give --global-batch-size."
        )
    return max(1, DEFAULT_TOKENS // seq_len)


def _best_stage(results: dict[int, tuple[StrategyResult, ...]], profiles: dict[int, ClusterProfile]) -> int:
    """The stage whose optimal plan is fastest, of those at which every rank fits, else of those with any plan."""
    times = {
        stage: result.plan.predicted_step_time_s
        for stage, found in results.items()
        for result in found
        if result.strategy == "optimal" and result.plan is not None
    }
    if not times:
        raise InsufficientMemoryError(results[max(results)][0].problem)
    fitting = [stage for stage in times if min(profiles[stage].stage(stage).max_micro_batch_size) > 0]
    return min(fitting or times, key=lambda stage: (times[stage], stage))


def _cephalo(cluster: Cluster, work: Workload, batch: int) -> CephaloResult | None:
    try:
        return simulate_cephalo(cluster, work, global_batch_size=batch)
    except InsufficientMemoryError:
        return None


def _finish(args: argparse.Namespace, report: SimulationReport, profile: ClusterProfile) -> None:
    if args.timeline:
        from .timeline import draw_timeline

        plans = {
            f"{result.strategy} ({report.marker})": result.plan
            for result in reversed(report.rows(report.stage))
            if result.plan is not None and (result.strategy in ("even", "optimal") or result is report.own)
        }
        draw_timeline(profile, plans, title=f"{report.title}, ZeRO stage {report.stage}", path=args.timeline)
    print(json.dumps(to_json(report), indent=2) if args.json else to_text(report))
