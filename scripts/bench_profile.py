"""How well profiling predicts: the predicted step time against the measured median of real runs, and what it cost.

    python scripts/bench_profile.py                       two CPU ranks emulated 1 : 3, three emulated 1 : 1.5 : 4
    python scripts/bench_profile.py --slowdown 2,6 --zero_stages 2 --steps 5        a quick look
    python scripts/bench_profile.py --check               exit with 1 where a prediction is off by more than 5%

Every setting is profiled once, for all stages, and then trained at every stage under the plan found. A measured step goes
from the end of one optimizer step of PoplarTrainer to the end of the next, with everything in between. Beside it stand the
micro-steps and seconds profiling took, and what timing every size up to the cap would have taken. Figures taken on
slowed ranks are emulated, and say so: such a rank takes what its profile says for forward and backward, whatever else
the machine does, so what is tested is the rest of the prediction. Give the machine nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GOAL = 0.05
"""Relative error that a prediction may have."""


def main() -> int:
    """Run all settings and print the tables."""
    args = parse_arguments()
    results = [measure(slowdown, args) for slowdown in args.slowdown]
    print("\n\n".join(table_of(result) for result in results))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    missed = [problem for result in results for problem in shortfalls(result)]
    for problem in missed:
        print(f"missed: {problem}")
    return 1 if missed and args.check else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--slowdown",
        nargs="+",
        default=["2,6", "3,4.5,12"],
        help="emulated factors of every setting, one per rank; all above 1, so that a busy machine slows none further "
        "(default 2,6 3,4.5,12)",
    )
    parser.add_argument("--model", default="llama", choices=("llama", "bert"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seq_len", type=int, default=128, help="tokens per sample (default 128)")
    parser.add_argument("--zero_stages", nargs="+", type=int, default=[0, 1, 2, 3], choices=range(4))
    parser.add_argument(
        "--per_rank_samples", type=int, default=12, help="global batch over number of ranks (default 12)"
    )
    parser.add_argument("--steps", type=int, default=25, help="measured optimizer steps of a run (default 25)")
    parser.add_argument("--profile_budget_s", type=float, default=30.0)
    parser.add_argument("--timeout_s", type=float, default=1800.0, help="for one setting")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a prediction misses its goal")
    return parser.parse_args()


def measure(slowdown: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of one setting and read what rank 0 wrote.

    Raises:
        SystemExit: A rank failed; its own output says why.
    """
    wanted = ("model", "layers", "hidden", "seq_len", "zero_stages", "per_rank_samples", "steps", "profile_budget_s")
    job = {"slowdown": slowdown, **{name: getattr(args, name) for name in wanted}}
    unwanted = ("POPLAR_CONFIG", "POPLAR_EMULATE_SLOWDOWN", "POPLAR_EMULATE_MEMORY_GIB")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "POPLAR_EMULATE_SLOWDOWN": slowdown}
    ranks = slowdown.count(",") + 1
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
            *(str(HERE / "bench_profile_rank.py"), json.dumps(job), str(output)),
        ]
        code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=args.timeout_s).returncode
        if code != 0:
            raise SystemExit(f"bench_profile: the ranks slowed {slowdown} failed (exit code {code}); see above.")
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return result


def table_of(result: dict[str, Any]) -> str:
    """One row per stage, and what profiling cost."""
    from accelerate_poplar.text_table import format_table, short_sizes

    header = ("stage", "predicted ms", "measured ms", "error", "per micro-step", "per step", "micro-batches by rank")
    rows = [
        (
            str(run["zero_stage"]),
            f"{1e3 * run['predicted_step_time_s']:.1f}",
            f"{1e3 * run['measured_step_time_s']:.1f}",
            f"{100 * error_of(run):+.1f}%",
            f"{1e3 * run['per_micro_step_s']:.1f}",
            f"{1e3 * run['per_step_s']:.1f}",
            " / ".join(short_sizes(own) for own in run["micro_batch_sizes"]),
        )
        for run in result["runs"]
    ]
    spent, every = result["profile"], result["every_size"]
    return (
        f"emulated: ranks slowed {result['slowdown']}; {result['model']}, {result['num_parameters']:,} parameters\n"
        f"{format_table(header, rows, left=(6,))}\n"
        f"profiling: {spent['seconds']:.1f} s, {spent['micro_steps']} micro-steps on the busiest rank "
        f"(every size: {every['seconds']:.1f} s, {every['micro_steps']} micro-steps)"
    )


def error_of(run: dict[str, Any]) -> float:
    """Relative error of a prediction; below 0: faster than measured."""
    return float(run["predicted_step_time_s"] / run["measured_step_time_s"] - 1.0)


def shortfalls(result: dict[str, Any]) -> list[str]:
    """Predictions that are further off than the goal."""
    return [
        f"ranks slowed {result['slowdown']}, ZeRO stage {run['zero_stage']}: off by {100 * error_of(run):+.1f}%"
        for run in result["runs"]
        if abs(error_of(run)) > GOAL
    ]


if __name__ == "__main__":
    sys.exit(main())
