"""Train a tiny Llama twice on two CPU ranks, one emulated slower: an even split, then Poplar's plan. Compare.

Both runs have the same seed, the same samples in every optimizer step and the same global batch, so their losses agree
and only their speeds differ. They take turns, since the speed of a machine that others share drifts from minute to
minute. The last line printed is one JSON object.
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

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from text_data import text_files

REPOSITORY = Path(__file__).resolve().parents[1]
SLOWDOWN = (3.0, 9.0)
"""How many times slower each rank is made, in rank order. Both are, so that a busy machine slows neither further."""
LOGGING_STEPS = 3
WARM_UP_STRETCHES = 2
"""First stretches of `LOGGING_STEPS` steps of a run whose speed does not count, where it has more."""
KINDS = {"even": "even split", "poplar": "Poplar"}
STRATEGIES = {"even": "even", "poplar": "optimal"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one training run left behind."""

    losses: dict[int, float]
    """Logged loss by optimizer step."""
    samples_per_s: float
    """Samples per second, the median over stretches of `LOGGING_STEPS` steps after the first few."""
    zero_stage: int
    """ZeRO stage of its plan."""
    micro_batch_sizes: list[list[int]]
    """Micro-batches of one optimizer step, by rank."""


def main() -> int:
    """Run both trainings, in turns, and print the comparison.

    Raises:
        SystemExit: The text is not where it should be, or a training failed.
    """
    args = parse_arguments()
    data_dir = os.environ.get("POPLAR_DATA_DIR")
    if data_dir:
        text_files(Path(data_dir))
    folder = Path(args.output_dir).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    turns = [
        (kind, folder / (kind if turn == 0 else f"{kind}-{turn + 1}")) for turn in range(args.turns) for kind in KINDS
    ]
    train(turns, folder, args)
    even, poplar = (read_run([output for other, output in turns if other == kind]) for kind in KINDS)
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
    parser.add_argument("--steps", type=int, default=18, help="optimizer steps of each run (default 18)")
    parser.add_argument("--turns", type=int, default=2, help="how often each training is run (default 2)")
    parser.add_argument(
        "--output_dir", default=REPOSITORY / "outputs" / "quickstart", help="folder of both runs; emptied first"
    )
    return parser.parse_args()


def train(turns: list[tuple[str, Path]], folder: Path, args: argparse.Namespace) -> None:
    """Run the Llama example once for each turn, on two ranks of their own.

    Raises:
        SystemExit: The training failed; its own output says why.
    """
    data_dir = os.environ.get("POPLAR_DATA_DIR")
    common = [
        *("--size", "tiny", "--max_steps", str(args.steps), "--per_device_train_batch_size", "16"),
        *(("--data_dir", data_dir) if data_dir else ()),
        *(
            "--learning_rate",
            "1e-3",
            "--max_eval_rows",
            "64",
            "--logging_steps",
            str(LOGGING_STEPS),
            "--save_strategy",
            "no",
        ),
        *("--report_to", "none", "--seed", "1", "--disable_tqdm", "true"),
        *("--poplar_cache_dir", str(folder / "profile_cache")),
    ]
    runs = [
        (
            f"{KINDS[kind]}: two CPU ranks, rank 1 emulated {SLOWDOWN[1] / SLOWDOWN[0]:g} times slower than rank 0",
            [*common, "--output_dir", str(output), "--poplar_strategy", STRATEGIES[kind]],
        )
        for kind, output in turns
    ]
    command = [
        str(Path(sys.executable).with_name("accelerate")),
        *("launch", "--config_file", "configs/cpu_two_ranks.yaml", "--zero_stage", str(args.zero_stage)),
        *("scripts/quickstart_rank.py", json.dumps(runs)),
    ]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "POPLAR_CONFIG"},
        "POPLAR_EMULATE_SLOWDOWN": ",".join(f"{factor:g}" for factor in SLOWDOWN),
        "OMP_NUM_THREADS": "1",
    }
    code = subprocess.run(command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        raise SystemExit(f"quickstart: the training failed (exit code {code}); see its output above.")


def read_run(folders: list[Path]) -> Run:
    """What is compared, from the files that all turns of one training wrote."""
    logs = [
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"] for folder in folders
    ]
    losses = [{entry["step"]: entry["loss"] for entry in log if "loss" in entry} for log in logs]
    if any(other != losses[0] for other in losses):
        raise SystemExit(f"quickstart: the same training gave other losses when it was repeated: {losses}")
    plan = json.loads((folders[0] / "poplar_plan.json").read_text(encoding="utf-8"))
    stretches = [(folder / HISTORY_FILE_NAME).read_text("utf-8").splitlines() for folder in folders]
    seconds = [
        json.loads(line)["step_time_s"] for lines in stretches for line in lines[WARM_UP_STRETCHES:] or lines[-1:]
    ]
    return Run(
        losses=losses[0],
        samples_per_s=plan["global_batch_size"] / statistics.median(seconds),
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
    table = Table(title="emulated: rank 1 is made three times slower than rank 0", title_justify="left")
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
