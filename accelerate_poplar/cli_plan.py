"""`accelerate-poplar plan`: which micro-batches every rank should run, from a profile file."""

from __future__ import annotations

import argparse
import json
from typing import Any

from . import cli_simulate
from .advice import advise
from .errors import InsufficientMemoryError
from .limits import limited_by
from .metrics import samples_per_s
from .plan import Plan
from .profiles import ClusterProfile
from .search import STRATEGIES, ZeroStage, find_plan, misfits
from .simulate import StrategyResult, evaluate
from .text_table import format_table, percent, short_ranks, short_sizes
from .units import gib

DESCRIPTION = """\
Decide which micro-batches every rank runs in one optimizer step, from measured profiles.

The profile file comes from `accelerate-poplar profile` or from an earlier run's output directory. No GPU is needed.
With --advise, also: which ranks to leave out, which ZeRO stage is fastest, and what one more card would give."""

EXAMPLE = """\
example:
  accelerate-poplar plan --profiles profiles.json --global-batch-size 512 --zero-stage auto --advise"""


def add_parsers(subparsers: Any) -> None:
    """Add the commands `plan` and `simulate`; each sets `run`, a function of the parsed arguments to an exit code."""
    add_parser(subparsers)
    cli_simulate.add_parser(subparsers)


def add_parser(subparsers: Any) -> None:
    """Add the command `plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="decide every rank's micro-batches from a profile file",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--profiles", required=True, metavar="FILE", help="cluster profile (profiles.json)")
    parser.add_argument("--global-batch-size", required=True, type=int, metavar="N", help="samples per optimizer step")
    parser.add_argument(
        "--zero-stage",
        default="auto",
        type=cli_simulate.zero_stage,
        metavar="STAGE",
        help="0, 1, 2, 3 or auto: the fastest profiled stage at which every rank fits (default: auto)",
    )
    parser.add_argument("--strategy", default="optimal", choices=STRATEGIES, help="how to search (default: optimal)")
    parser.add_argument("--advise", action="store_true", help="also say what to change about the cluster")
    parser.add_argument("--output", metavar="FILE", help="write the plan to FILE (a directory gets poplar_plan.json)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the plan and its figures")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make a plan and print it.

    Returns:
        0.

    Raises:
        ProfileError, PlanError: The profile file or the request is wrong; the message says what to change.
    """
    profile = ClusterProfile.load(args.profiles)
    stage: ZeroStage = args.zero_stage
    plan = find_plan(profile, global_batch_size=args.global_batch_size, zero_stage=stage, strategy=args.strategy)
    result = evaluate(profile, plan)
    limits = limited_by(profile, plan)
    over_even = _gain_over_even(profile, plan)
    advice = None
    if args.advise:
        advice = advise(profile, global_batch_size=args.global_batch_size, zero_stage=stage, strategy=args.strategy)
    if args.output:
        plan.save(args.output)
    if args.json:
        report = {
            **plan.to_dict(),
            "samples_per_s": result.samples_per_s,
            "tokens_per_s": result.tokens_per_s,
            "idle_fraction": result.idle_fraction,
            "mfu": result.mfu,
            "speedup_over_even": over_even,
            "limited_by": list(limits),
            "emulated": profile.emulated,
            "advice": None if advice is None else {**advice.to_dict(), "sentences": list(advice.sentences())},
        }
        print(json.dumps(report, indent=2))
        return 0
    print(_headline(profile, plan, result, over_even, stage))
    print(_table(profile, plan, limits))
    for sentence in () if advice is None else advice.sentences():
        print(f"- {sentence}")
    return 0


def _gain_over_even(profile: ClusterProfile, plan: Plan) -> float | None:
    """Predicted even step time over the plan's; None where an even split does not fit."""
    try:
        even = find_plan(
            profile, global_batch_size=plan.global_batch_size, zero_stage=plan.zero_stage, strategy="even"
        )
    except InsufficientMemoryError:
        return None
    return even.predicted_step_time_s / plan.predicted_step_time_s


def _headline(
    profile: ClusterProfile, plan: Plan, result: StrategyResult, over_even: float | None, asked_stage: ZeroStage
) -> str:
    speed = samples_per_s(plan.global_batch_size, plan.predicted_step_time_s)
    gain = "an even split does not fit" if over_even is None else f"{over_even:.2f}x the even split"
    lines = [
        f"{profile.model}: ZeRO stage {plan.zero_stage}, global batch {plan.global_batch_size}, "
        f"strategy {plan.strategy}",
        f"predicted: {plan.predicted_step_time_s:.4g} s a step, {speed:.4g} samples/s, {gain}, "
        f"idle {percent(result.idle_fraction)}, MFU {percent(result.mfu)}",
    ]
    if asked_stage == "auto":
        lines.extend(
            f"ZeRO stage {stage} is out: not one sample fits on rank {short_ranks(ranks)}."
            for stage, ranks in misfits(profile).items()
        )
    if profile.emulated:
        lines.append("The profile was taken under emulation or simulated: no figure here is of real hardware.")
    return "\n".join(lines)


def _table(profile: ClusterProfile, plan: Plan, limits: tuple[str, ...]) -> str:
    caps = profile.stage(plan.zero_stage).max_micro_batch_size
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, own in zip(profile.ranks, plan.ranks, strict=True):
        cells = (
            rank.host,
            rank.device,
            gib(rank.memory_bytes),
            str(caps[rank.rank]),
            short_sizes(own.micro_batch_sizes),
            str(own.rank_batch_size),
            percent(own.rank_batch_size / plan.global_batch_size),
            limits[rank.rank],
        )
        rows.setdefault(cells, []).append(rank.rank)
    header = ("rank", "host", "device", "memory", "largest", "micro-batches", "samples", "share", "limited by")
    return format_table(header, [(short_ranks(r), *cells) for cells, r in rows.items()], left=(0, 1, 2, 5, 8))
