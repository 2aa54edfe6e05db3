"""What cutting optimizer steps by length brings on unequal ranks, against the stock ways of batching rows of unequal length.

    python scripts/bench_lengths.py --data_dir shared/data/wikitext-2         one rank emulated three times slower
    python scripts/bench_lengths.py --rounds 1 --steps 2 --checked_steps 1 --per_rank_samples 8       a quick look

Rows are cut from real text (wikitext-2, or a folder with valid.txt and test.txt) with log-normal lengths of 16 to 512
tokens. A tiny Llama is trained with the stock Trainer and DeepSpeed on an even split, the same with group_by_length and
with batch_rebalance, and with PoplarTrainer, which profiles and then cuts every step by predicted time. Runs take turns.
Each way draws its own batches, so its first steps are run again by one process with the same samples, and the losses
compared. The last line is one JSON object. All speeds are emulated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
EVEN, GROUPED, REBALANCED, OURS = "even split", "group_by_length", "batch_rebalance", "PoplarTrainer"
WAYS = (EVEN, GROUPED, REBALANCED, OURS)
VOCABULARY = 1024
SHORTEST, LONGEST, MEDIAN, SPREAD = 16, 512, 96.0, 0.9
"""Tokens of a row; its logarithm is normal with the median's and a standard deviation of SPREAD, cut off at the ends."""


def main() -> int:
    """Measure, print the table and the JSON line."""
    args = parse_arguments()
    results = [measure(stage, args) for stage in args.zero_stages]
    print("\n\n".join(table_of(result) for result in results))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps([summary_of(result) for result in results]))
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", help="folder with valid.txt and test.txt; else the hub, else generated text")
    parser.add_argument(
        "--slowdown",
        default="2,6",
        help="emulated factors, one per rank; all above 1, so that a busy machine slows none further (default 2,6)",
    )
    parser.add_argument("--zero_stages", nargs="+", type=int, default=[1], choices=range(4))
    parser.add_argument(
        "--per_rank_samples", type=int, default=32, help="global batch over number of ranks (default 32)"
    )
    parser.add_argument(
        "--accumulation", type=int, default=4, help="micro-batches of a rank in the stock ways (default 4)"
    )
    parser.add_argument("--steps", type=int, default=12, help="measured optimizer steps of a run (default 12)")
    parser.add_argument(
        "--checked_steps", type=int, default=3, help="first steps compared with one process (default 3)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of every way (default 2)")
    parser.add_argument("--profile_budget_s", type=float, default=20.0)
    parser.add_argument("--timeout_s", type=float, default=3600.0, help="for one ZeRO stage")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    args = parser.parse_args()
    if args.per_rank_samples % args.accumulation:
        parser.error(
            f"--per_rank_samples {args.per_rank_samples} is no multiple of --accumulation {args.accumulation}."
        )
    return args


def row_lengths(count: int, *, seed: int = 3) -> list[int]:
    """Log-normal lengths within the limits; values beyond are drawn again."""
    generator = np.random.default_rng(seed)
    found: list[int] = []
    while len(found) < count:
        drawn = np.exp(generator.normal(math.log(MEDIAN), SPREAD, size=count)).round().astype(int)
        found += [int(length) for length in drawn if SHORTEST <= length <= LONGEST]
    return found[:count]


def make_rows(data_dir: str | None, count: int) -> tuple[list[list[int]], str]:
    """Rows of tokens, cut from the text one after the other, and what text it is.

    The text begins again where it is at its end.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    sys.path.append(str(HERE.parent / "examples"))
    from text_data import load_text

    lines, _, source = load_text(data_dir)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokens = [token for line in tokenizer.encode_batch(lines) for token in line.ids]
    rows, start = [], 0
    for length in row_lengths(count):
        if start + length > len(tokens):
            start = 0
        rows.append(tokens[start : start + length])
        start += length
    return rows, source


def measure(zero_stage: int, args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks and read what rank 0 wrote.

    Raises:
        SystemExit: A rank failed; its own output says why.
    """
    factors = [float(part) for part in args.slowdown.split(",")]
    cores = sorted(os.sched_getaffinity(0))
    job = {
        "zero_stage": zero_stage,
        "slowdown": factors,
        "cores": [cores[rank % len(cores)] for rank in range(len(factors))],
        "per_rank_samples": args.per_rank_samples,
        "accumulation": args.accumulation,
        "steps": args.steps,
        "checked_steps": args.checked_steps,
        "rounds": args.rounds,
        "profile_budget_s": args.profile_budget_s,
        "ways": WAYS,
    }
    unwanted = ("POPLAR_CONFIG", "POPLAR_EMULATE_MEMORY_GIB")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "POPLAR_EMULATE_SLOWDOWN": args.slowdown,
    }
    with tempfile.TemporaryDirectory() as folder:
        rows, source = make_rows(args.data_dir, (args.steps + 4) * args.per_rank_samples * len(factors))
        (Path(folder) / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        (Path(folder) / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(factors)}"),
            *(str(HERE / "bench_lengths_rank.py"), folder),
        ]
        code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=args.timeout_s).returncode
        if code != 0:
            raise SystemExit(
                f"bench_lengths: the ranks failed at ZeRO stage {zero_stage} (exit code {code}); see above."
            )
        result: dict[str, Any] = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
    return {**result, "text": source, "mean_length": sum(map(len, rows)) / len(rows)}


def table_of(result: dict[str, Any]) -> str:
    """A row per way."""
    from accelerate_poplar.text_table import format_table

    header = ("batches", "tokens/s", "to even", "to rebalanced", "padding", "idle", "loss difference")
    ways = result["ways"]
    even, rebalanced = ways[EVEN]["tokens_per_s"], ways[REBALANCED]["tokens_per_s"]
    rows = [
        (
            name,
            f"{found['tokens_per_s']:.0f}",
            f"{found['tokens_per_s'] / even:.2f}x",
            f"{found['tokens_per_s'] / rebalanced:.2f}x",
            f"{found['padding_share']:.1%}",
            f"{found['idle_share']:.1%}",
            f"{found['loss_difference']:.1e}",
        )
        for name, found in ways.items()
    ]
    slowed = " : ".join(f"{factor:g}" for factor in result["slowdown"])
    title = (
        f"emulated: ranks slowed {slowed}; tiny llama, ZeRO stage {result['zero_stage']}, {result['global_batch_size']} rows "
        f"of {SHORTEST} to {LONGEST} tokens ({result['mean_length']:.0f} on average) a step\n{result['text']}"
    )
    return f"{title}\n{format_table(header, rows, left=(0,))}"


def summary_of(result: dict[str, Any]) -> dict[str, Any]:
    """What the last line says of one ZeRO stage."""
    ways = result["ways"]
    factors = result["slowdown"]
    return {
        "emulated": True,
        "zero_stage": result["zero_stage"],
        "speedup_to_batch_rebalance": ways[OURS]["tokens_per_s"] / ways[REBALANCED]["tokens_per_s"],
        "ideal": sum(1 / factor for factor in factors) / (len(factors) / max(factors)),
        **{name: {key: value for key, value in found.items() if key != "rounds"} for name, found in ways.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
