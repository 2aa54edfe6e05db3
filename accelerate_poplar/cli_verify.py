"""`accelerate-poplar verify`: prove on these machines that uneven plans compute what one process computes."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .config import LaunchEnvironment
from .errors import ConfigError
from .verify import BUILT_IN, STAGES, VerifyOptions, VerifyReport, join, launch

DESCRIPTION = f"""\
Train tiny models under uneven plans, through the same trainer and DeepSpeed engines as a real run, and compare loss,
gradient norm and parameters with one process on the same batches. Every ZeRO stage, every kind of model; rows with
padding and ignored labels spread unevenly, ranks with nothing to do in a micro-step, a short last step. It takes less
than two minutes.

Alone it starts ranks on this machine: one per GPU where there are two or more, else two on the CPU. Under a launcher
it uses the launcher's ranks, on as many hosts as it has.

Exit codes: 0 everything is equal, 1 something differs (the table says what), 2 a setting is wrong or a rank failed.
Models: {", ".join(BUILT_IN)}."""

EXAMPLE = """\
examples:
  accelerate-poplar verify
  accelerate-poplar verify --zero-stages 2,3 --models llama --json
  accelerate-poplar verify --model path/of/my-model --data notes.txt --seq-len 128
  accelerate launch --config_file configs/two_hosts.yaml -m accelerate_poplar.cli verify"""


def add_parsers(subparsers: Any) -> None:
    """Add the command `verify`; it sets `run`, a function of the parsed arguments to an exit code."""
    parser = subparsers.add_parser(
        "verify",
        help="prove on these machines that uneven plans compute what one process computes",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--zero-stages", default=STAGES, type=_stages, metavar="LIST", help="ZeRO stages, e.g. 0,2 (default: 0,1,2,3)"
    )
    parser.add_argument(
        "--models", default=tuple(BUILT_IN), type=_names, metavar="LIST", help="built-in models (default: all of them)"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="your model instead: a folder with a config.json, or a hub name; new random weights, no dropout",
    )
    parser.add_argument("--data", metavar="FILE", help="a text file to take the rows from (default: generated rows)")
    parser.add_argument("--seq-len", type=int, default=64, metavar="N", help="tokens per row of --model (default: 64)")
    parser.add_argument("--num-processes", type=int, metavar="N", help="ranks to start (default: see above)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even where there are GPUs")
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, metavar="S", help="end the ranks after S seconds (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify and print.

    Returns:
        0 when everything is equal, 1 when something differs.

    Raises:
        ConfigError: An argument is wrong.
        RankError: A rank failed, or the time is up.
    """
    options = VerifyOptions(
        kinds=args.models, zero_stages=args.zero_stages, model=args.model, data=args.data, seq_len=args.seq_len
    )
    environment = LaunchEnvironment.from_environment()
    if environment.world_size > 1:
        report = join(options, timeout_s=args.timeout_s)
        return show(report, as_json=args.json, silent=environment.rank != 0)
    count, cpu = _ranks_to_start(args.num_processes, args.cpu)
    return show(launch(options, num_processes=count, cpu=cpu, timeout_s=args.timeout_s), as_json=args.json)


def show(report: VerifyReport, *, as_json: bool = False, silent: bool = False) -> int:
    """Print a report and give its exit code."""
    if not silent:
        print(json.dumps(report.to_dict(), indent=2) if as_json else report.to_text(), flush=True)
    return 0 if report.passed else 1


def _ranks_to_start(asked: int | None, cpu: bool) -> tuple[int, bool]:
    """How many ranks, and whether on the CPU."""
    if asked is not None and asked < 2:
        raise ConfigError(f"--num-processes is {asked}; uneven plans need at least 2 ranks.")
    import torch

    devices = 0 if cpu else torch.accelerator.device_count()
    if devices >= max(2, asked or 2):
        return asked or devices, False
    return asked or 2, True


def _stages(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ZeRO stages such as 0,2") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
