"""What each way of sharing out the batch brings, measured side by side on unequal ranks, in one run.

    python scripts/bench_throughput.py                       on CPUs: one rank emulated three times slower, then two ranks
                                                             that share a core beside one with a core of its own; hours
    python scripts/bench_throughput.py --zero_stages 0 --models llama --steps 4       a quick look
    python scripts/bench_throughput.py                       on a host with two or more GPUs: its GPUs as they are

For every model and ZeRO stage: the stock Trainer with DeepSpeed (an even split), then PoplarTrainer with the plans of the
strategies flops (Whale's idea), proportional, poplar (as published) and optimal, and the bound: the sum of the ranks' own
speeds without any communication. The plans take turns step by step, the bound is measured again after every step, and a step
is set against what the ranks did on their own right before and after it, so that a machine whose speed drifts disturbs
little. While the median share of `optimal`, or how it compares with a rival, is within three standard errors of what it is
judged by, on either side, or within 5% after fewer than 12 steps, these plans are run again, up to --rounds times in all. The
share of the bound is the median over the steps but the first ones, and speeds are that share of the median bound. All runs
see the same samples in every step, so their losses can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_throughput_judge import EVEN, shortfalls

HERE = Path(__file__).resolve().parent
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Makes glibc keep freed memory, as a GPU's allocator does; else a CPU gets slower with the micro-batch, since memory of large
tensors comes from the system anew in every pass."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One kind of inequality between ranks."""

    title: str
    """What it is, in words; says so where it is emulated."""
    slowdown: tuple[float, ...] = ()
    """Emulated factor per rank; empty = nothing is emulated."""
    cores: tuple[int, ...] = ()
    """Core each rank is bound to; empty = none."""
    ranks: int = 2
    """Number of ranks."""
    per_rank_samples: int = 512
    """Global batch over number of ranks, where --per_rank_samples does not say it. An emulated rank is slowed so much that what
    is not slowed, such as the optimizer, counts for little already with few rows; two ranks on one core need many."""


def main() -> int:
    """Run all settings, print the tables."""
    args = parse_arguments()
    results, broken_off = read(args.show), ""
    for setting in [] if args.show else settings_of(args):
        found, broken_off = measure(setting, args)
        results += found
        if broken_off:
            break
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    tables = [table_of(result, markdown=args.markdown) for result in results]
    tables += [summary_of(own, markdown=args.markdown) for own in by_title(results)]
    print("\n\n".join(tables))
    if broken_off:
        raise SystemExit(f"bench_throughput: {broken_off}; what was measured until then is above.")
    missed = [problem for result in results for problem in shortfalls(result)]
    for problem in missed:
        print(f"missed: {problem}")
    return 1 if missed and args.check else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--imbalance", nargs="+", choices=("emulated", "affinity", "gpus"), help="default: what is here"
    )
    parser.add_argument(
        "--slowdown",
        default="8,24",
        help="emulated factors, one per rank; all well above 1, so that a busy machine slows none further and what is not slowed "
        "counts for little (default 8,24)",
    )
    parser.add_argument("--models", nargs="+", default=["llama", "bert"], choices=("llama", "bert"))
    parser.add_argument(
        "--size",
        default="tiny",
        choices=("narrow", "tiny", "base"),
        help="narrow: 4 layers of 128; tiny: 2 of 256; base: 12 of 768, for GPUs (default tiny)",
    )
    parser.add_argument(
        "--seq_len",
        type=int,
        default=32,
        help="tokens per sample; a CPU is no faster with more samples at once where they are long (default 32)",
    )
    parser.add_argument("--zero_stages", nargs="+", type=int, default=[0, 1, 2, 3], choices=range(4))
    parser.add_argument(
        "--per_rank_samples",
        type=int,
        help="global batch over number of ranks; on a CPU also the largest micro-batch (default: 64 where ranks are emulated, "
        "1536 where they share a core, 512 on GPUs)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=8,
        help="optimizer steps measured of every strategy (default 8)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="how many times --steps are measured at most, of `optimal` and of plans that cannot be told from it; the others "
        "are measured once (default 3)",
    )
    parser.add_argument(
        "--own_speed_s", type=float, default=2.0, help="of measuring the bound, after every step (default 2)"
    )
    parser.add_argument(
        "--profile_budget_s",
        type=float,
        default=240.0,
        help="for one model; a pass of the largest micro-batch takes about 10 s here (default 240)",
    )
    parser.add_argument("--timeout_s", type=float, default=14400.0, help="for one setting (default 14400)")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--show", nargs="+", metavar="FILE", help="print the tables of figures written with --json; measures nothing"
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    parser.add_argument("--check", action="store_true", help="exit with 1 when `optimal` misses its goal")
    args = parser.parse_args()
    if args.per_rank_samples is not None and args.per_rank_samples < 1:
        parser.error("--per_rank_samples must be at least 1.")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1.")
    if args.steps < 2:
        parser.error("--steps must be at least 2, so that the even split's run has a step of every plan to compare.")
    return args


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """What to measure on this machine."""
    import torch

    gpus = torch.cuda.device_count()
    chosen = args.imbalance or (["gpus"] if gpus > 1 else ["emulated", "affinity"])
    factors = tuple(float(part) for part in args.slowdown.split(","))
    cores = sorted(os.sched_getaffinity(0))
    found = []
    for kind in chosen:
        if kind == "gpus":
            found.append(Setting(title=f"{gpus} GPUs of this host", ranks=gpus))
        elif kind == "emulated":
            bound = tuple(cores[rank % len(cores)] for rank in range(len(factors)))
            title = f"emulated: ranks slowed {' : '.join(f'{factor:g}' for factor in factors)}"
            found.append(Setting(title=title, slowdown=factors, cores=bound, ranks=len(factors), per_rank_samples=64))
        elif len(cores) > 1:
            title = "real imbalance: rank 0 has a core of its own, ranks 1 and 2 share one"
            found.append(Setting(title=title, cores=(cores[0], cores[1], cores[1]), ranks=3, per_rank_samples=1536))
        else:
            raise SystemExit("bench_throughput: --imbalance affinity needs two cores.")
    return found


def measure(setting: Setting, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Start the ranks of one setting and read what rank 0 wrote.

    Returns:
        One entry per model and stage; and why there are no more of them, empty where all were measured.
    """
    job = {
        "title": setting.title,
        "cores": setting.cores,
        "slowdown": setting.slowdown,
        "models": args.models,
        "size": args.size,
        "seq_len": args.seq_len,
        "zero_stages": args.zero_stages,
        "per_rank_samples": args.per_rank_samples or setting.per_rank_samples,
        "steps": args.steps,
        "rounds": args.rounds,
        "own_speed_s": args.own_speed_s,
        "profile_budget_s": args.profile_budget_s,
    }
    hidden = {"CUDA_VISIBLE_DEVICES": "", **KEEP_MEMORY} if setting.cores else {}
    unwanted = ("POPLAR_CONFIG", "POPLAR_EMULATE_SLOWDOWN", "POPLAR_EMULATE_MEMORY_GIB")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **hidden}
    if setting.slowdown:
        environment["POPLAR_EMULATE_SLOWDOWN"] = ",".join(f"{factor:g}" for factor in setting.slowdown)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.ranks}"),
            *(str(HERE / "bench_throughput_rank.py"), json.dumps(job), str(output)),
        ]
        broken_off = ""
        try:
            run = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=args.timeout_s)
            if run.returncode != 0:
                broken_off = (
                    f"the ranks of '{setting.title}' failed with exit code {run.returncode}, as they say above"
                )
        except subprocess.TimeoutExpired:
            broken_off = f"'{setting.title}' was not done within --timeout_s {args.timeout_s:g}"
        except KeyboardInterrupt:
            broken_off = f"'{setting.title}' was interrupted"
        results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else []
    return results, broken_off


def table_of(result: dict[str, Any], *, markdown: bool) -> str:
    """One model at one stage: a row per strategy, the bound last."""
    from accelerate_poplar.text_table import short_sizes

    even = result["strategies"][EVEN]["samples_per_s"]
    header = ("strategy", "samples/s", "to even", "of the bound", "loss difference", "micro-batches by rank")
    rows = []
    for name, found in result["strategies"].items():
        speed, bound = found["samples_per_s"], result["bound_samples_per_s"]
        sizes = " / ".join(short_sizes(own) for own in found["micro_batch_sizes"])
        note = f"{sizes} (as {found['same_as']})" if found["same_as"] else sizes
        difference = f"{found['loss_difference']:.1e}"
        share = f"{speed / bound:.3f} ± {found['standard_error'] * speed / bound:.3f}"
        rows.append((name, f"{speed:.1f}", f"{speed / even:.2f}x", share, difference, note))
    bound = result["bound_samples_per_s"]
    rows.append(("bound", f"{bound:.1f}", f"{bound / even:.2f}x", "1.000", "", "each rank on its own"))
    title = f"{result['title']}; {result['model']}, ZeRO stage {result['zero_stage']}"
    return titled_table(title, header, rows, left=(0, 5), markdown=markdown)


def summary_of(results: Sequence[dict[str, Any]], *, markdown: bool) -> str:
    """All models and stages of one setting: the share of the bound by strategy."""
    names = list(dict.fromkeys(name for result in results for name in result["strategies"]))
    header = ("model", "ZeRO stage", *names, "±", "steps", "optimal to even", "loss difference")
    rows = []
    for result in results:
        found, bound = result["strategies"], result["bound_samples_per_s"]
        shares = [f"{found[name]['samples_per_s'] / bound:.3f}" if name in found else "-" for name in names]
        error = steps = gain = "-"
        if best := found.get("optimal"):
            error = f"{best['standard_error'] * best['samples_per_s'] / bound:.3f}"
            steps = str(len(best["shares_of_bound"]))
            gain = f"{best['samples_per_s'] / found[EVEN]['samples_per_s']:.2f}x"
        difference = f"{max(strategy['loss_difference'] for strategy in found.values()):.1e}"
        rows.append((result["model"], str(result["zero_stage"]), *shares, error, steps, gain, difference))
    title = f"{results[0]['title']}; share of the bound"
    return titled_table(title, header, rows, left=(0,), markdown=markdown)


def by_title(results: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The results of each setting, in their order."""
    titles = list(dict.fromkeys(result["title"] for result in results))
    return [[result for result in results if result["title"] == title] for title in titles]


def titled_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: tuple[int, ...], markdown: bool
) -> str:
    """A table under its title, aligned or in Markdown; columns are aligned to the right but those in `left`."""
    from accelerate_poplar.text_table import format_table

    if not markdown:
        return f"{title}\n{format_table(header, rows, left=left)}"
    rule = ["---" if column in left else "---:" for column in range(len(header))]
    lines = "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))
    return f"**{title}**\n\n{lines}"


def read(files: Sequence[str] | None) -> list[dict[str, Any]]:
    """What earlier runs wrote with --json, in the order of the files.

    Raises:
        SystemExit: A file cannot be read.
    """
    results = []
    for name in files or ():
        try:
            results += json.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            raise SystemExit(f"bench_throughput: --show {name}: {problem}") from None
    return results


if __name__ == "__main__":
    sys.exit(main())
