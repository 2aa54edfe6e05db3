"""Train a tiny Llama twice on two CPU ranks, one emulated slower: an even split, then Poplar's plan. Compare.

Both runs have the same seed, the same samples in every optimizer step and the same global batch, so their losses agree
and only their speeds differ. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from accelerate_poplar.watch import HISTORY_FILE_NAME

REPOSITORY = Path(__file__).resolve().parents[1]
SLOWDOWN = (1.0, 3.0)
"""How many times slower each rank is made, in rank order."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one training run left behind."""

    losses: dict[int, float]
    """Logged loss by optimizer step."""
    samples_per_s: float
    """Samples per second at the median step time: a spell of other load on the machine does not count."""
    zero_stage: int
    """ZeRO stage of its plan."""
    micro_batch_sizes: list[list[int]]
    """Micro-batches of one optimizer step, by rank."""


def main() -> int:
    """Run both trainings and print the comparison."""
    args = parse_arguments()
    folder = Path(args.output_dir).resolve()
    even = train("even split", folder / "even", args, ["--poplar_enabled", "false"])
    poplar = train("Poplar", folder / "poplar", args, [])
    print_comparison(even, poplar)
    print(
        json.dumps(
            {
                "even_samples_per_s": round(even.samples_per_s, 3),
                "poplar_samples_per_s": round(poplar.samples_per_s, 3),
                "speedup": round(poplar.samples_per_s / even.samples_per_s, 3),
                "ideal_speedup": round(ideal_speedup(SLOWDOWN), 3),
                "max_loss_difference": loss_difference(even, poplar),
                "zero_stage": poplar.zero_stage,
                "emulated": True,
            }
        )
    )
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart.sh",
        description="Compare an even split with Poplar on two CPU ranks, one emulated three times slower.",
        epilog="Text: the folder named by POPLAR_DATA_DIR (valid.txt, test.txt), else wikitext-2 from the hub, else "
        "generated.",
    )
    parser.add_argument("--zero_stage", type=int, default=1, choices=range(4), help="ZeRO stage (default 1)")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run (default 30)")
    parser.add_argument(
        "--output_dir", default=REPOSITORY / "outputs" / "quickstart", help="folder of both runs; emptied first"
    )
    return parser.parse_args()


def train(title: str, output_dir: Path, args: argparse.Namespace, flags: list[str]) -> Run:
    """Train once in processes of its own.

    Raises:
        SystemExit: The training failed; its own output says why.
    """
    print(f"\n=== {title}: two CPU ranks, rank 1 emulated {SLOWDOWN[1]:g} times slower ===", flush=True)
    shutil.rmtree(output_dir, ignore_errors=True)
    data_dir = os.environ.get("POPLAR_DATA_DIR")
    command = [
        str(Path(sys.executable).with_name("accelerate")),
        *("launch", "--config_file", "configs/cpu_two_ranks.yaml", "--zero_stage", str(args.zero_stage)),
        *("examples/llama/train.py", "--size", "tiny", "--output_dir", str(output_dir)),
        *(("--data_dir", data_dir) if data_dir else ()),
        *("--max_steps", str(args.steps), "--per_device_train_batch_size", "16", "--learning_rate", "1e-3"),
        *("--max_eval_rows", "64", "--logging_steps", "3", "--save_strategy", "no", "--report_to", "none"),
        *("--seed", "1", "--disable_tqdm", "true", "--poplar_cache_dir", str(output_dir / "profile_cache")),
        *flags,
    ]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "POPLAR_CONFIG"},
        "POPLAR_EMULATE_SLOWDOWN": ",".join(f"{factor:g}" for factor in SLOWDOWN),
        "OMP_NUM_THREADS": "1",
    }
    code = subprocess.run(command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        raise SystemExit(f"quickstart: the run with the {title} failed (exit code {code}); see its output above.")
    return read_run(output_dir)


def read_run(output_dir: Path) -> Run:
    """What is compared, from the files the run wrote."""
    history = json.loads((output_dir / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    plan = json.loads((output_dir / "poplar_plan.json").read_text(encoding="utf-8"))
    with (output_dir / HISTORY_FILE_NAME).open(encoding="utf-8") as lines:
        windows = [json.loads(line) for line in lines]
    return Run(
        losses={entry["step"]: entry["loss"] for entry in history if "loss" in entry},
        samples_per_s=plan["global_batch_size"] / statistics.median(w["step_time_s"] for w in windows),
        zero_stage=plan["zero_stage"],
        micro_batch_sizes=[rank["micro_batch_sizes"] for rank in plan["ranks"]],
    )


def ideal_speedup(slowdown: tuple[float, ...]) -> float:
    """The speed of all ranks together over what an even split leaves of it, every rank waiting for the slowest."""
    speeds = [1 / factor for factor in slowdown]
    return sum(speeds) / (len(speeds) * min(speeds))


def loss_difference(even: Run, poplar: Run) -> float:
    """The largest difference of the logged losses; infinite where the runs did not log the same steps."""
    if even.losses.keys() != poplar.losses.keys() or not even.losses:
        return float("inf")
    return max(abs(even.losses[step] - poplar.losses[step]) for step in even.losses)


def print_comparison(even: Run, poplar: Run) -> None:
    """Both runs side by side."""
    table = Table(title="emulated: rank 1 is made three times slower", title_justify="left")
    for column in ("", "even split", "Poplar"):
        table.add_column(column, justify="right" if column else "left")
    for rank, pair in enumerate(zip(even.micro_batch_sizes, poplar.micro_batch_sizes, strict=True)):
        table.add_row(f"rank {rank}: micro-batches of a step", *(" + ".join(map(str, sizes)) for sizes in pair))
    for step in sorted(even.losses.keys() & poplar.losses.keys()):
        table.add_row(f"loss at step {step}", f"{even.losses[step]:.5f}", f"{poplar.losses[step]:.5f}")
    table.add_row("samples/s (emulated)", f"{even.samples_per_s:.1f}", f"{poplar.samples_per_s:.1f}")
    table.add_row("speed-up (emulated)", "1.00", f"{poplar.samples_per_s / even.samples_per_s:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
