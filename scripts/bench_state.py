"""What uneven shares of the training state bring and cost, measured on two CPU ranks and simulated on clusters.

    python scripts/bench_state.py                    everything, some minutes
    python scripts/bench_state.py --only memory      one part: memory, exchange, gain or simulation

- memory: a model of about 100 million parameters at ZeRO stage 3; what each rank holds and its resident memory, with even
  shares and with 75/25.
- exchange: the same bytes gathered and reduced with even and with uneven shares; the ratio is the planner's cost factor.
- gain: ranks emulated to have unequal memory, a model whose even shard leaves the small one little room: the best plan with
  even shares and with free ones, simulated and measured in one run, and the largest model that either can hold.
- simulation: clusters B and C of the Poplar paper, and a host with small cards next to one with large ones.

Figures of emulated ranks and of simulated clusters say so.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from accelerate_poplar.cluster import Cluster, cluster_from_dict, load_cluster
from accelerate_poplar.model_shape import find_model
from accelerate_poplar.simulate import Workload
from accelerate_poplar.state_simulation import compare_shares, largest_model

HERE = Path(__file__).resolve().parent
PARTS = ("memory", "exchange", "gain", "simulation")
SHARES = (0.75, 0.25)
BATCH = 16
"""Global batch of the gain part."""
MOST_LAYERS = 40
"""Larger models are not looked for."""
SMALL_AND_LARGE = {
    "name": "V100-16 and A100-80",
    "hosts": [
        {"device": "V100-SXM2-16GB", "count": 4, "link_gbytes_per_s": 20},
        {"device": "A100-80GB", "count": 4, "link_gbytes_per_s": 20},
    ],
    "inter_host_gbytes_per_s": 10,
}
console = Console(width=150)


def main() -> int:
    """Run the parts that were asked for and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part instead of all")
    parser.add_argument("--layers", type=int, default=24, help="layers of the memory part's model (default 24)")
    parser.add_argument(
        "--hidden", type=int, default=512, help="its hidden size (default 512: 101 million parameters)"
    )
    parser.add_argument("--mib", type=int, default=64, help="MiB exchanged (default 64)")
    parser.add_argument("--rounds", type=int, default=7, help="exchanges of each kind (default 7)")
    parser.add_argument("--steps", type=int, default=6, help="measured optimizer steps of the gain part (default 6)")
    parser.add_argument("--timeout_s", type=float, default=1200.0, help="for one launch (default 1200)")
    args = parser.parse_args()
    for part in (args.only,) if args.only else PARTS:
        {"memory": show_memory, "exchange": show_exchange, "gain": show_gain, "simulation": show_simulation}[part](
            args
        )
    return 0


def launch(name: str, request: dict[str, Any], timeout_s: float, ranks: int = 2) -> list[dict[str, Any]]:
    """Run one measurement on fresh ranks; returns every rank's findings."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        output = Path(folder) / "found.json"
        probe.close()
        command = [sys.executable, str(HERE / "bench_state_rank.py"), name, json.dumps(request), str(output)]
        processes = []
        for rank in range(ranks):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
            }
            log = (Path(folder) / f"{rank}.log").open("w")
            processes.append(
                subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT)
            )
        codes = [process.wait(timeout=timeout_s) for process in processes]
        if any(codes):
            failed = codes.index(next(code for code in codes if code))
            raise SystemExit(f"rank {failed} failed:\n{(Path(folder) / f'{failed}.log').read_text()[-4000:]}")
        found: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
        return found


def show_memory(args: argparse.Namespace) -> None:
    """What ranks hold, even and 75/25."""
    table = Table(title="ZeRO stage 3, bf16, Adam: MiB of state held, and resident memory of the process")
    for column in ("shares", "rank", "held MiB", "resident MiB", "step s"):
        table.add_column(column, justify="right")
    resident: dict[tuple[str, int], float] = {}
    parameters = 0
    for label, fractions in (("even", ()), ("75/25", SHARES)):
        request = {"layers": args.layers, "hidden": args.hidden, "zero_stage": 3, "fractions": fractions}
        for rank, found in enumerate(launch("memory", request, args.timeout_s)):
            parameters = found["parameters"]
            resident[label, rank] = found["resident_mib"]
            cells = (found["held_mib"], found["resident_mib"])
            table.add_row(label, str(rank), *(f"{value:.0f}" for value in cells), f"{found['step_s']:.2f}")
    console.print(table)
    fall = 1.0 - resident["75/25", 1] / resident["even", 1]
    console.print(
        f"{parameters / 1e6:.0f} million parameters; the small rank's resident memory falls by {fall:.0%}.\n"
    )


def show_exchange(args: argparse.Namespace) -> None:
    """Even against uneven exchanges."""
    request = {"mib": args.mib, "rounds": args.rounds, "fractions": SHARES}
    found = launch("exchange", request, args.timeout_s)
    slowest = {name: max(own[name] for own in found) for name in found[0]}
    table = Table(title=f"{args.mib} MiB over gloo on two ranks of one host, shares 75/25: milliseconds")
    for column in ("exchange", "even", "uneven", "ratio"):
        table.add_column(column, justify="right")
    for kind in ("gather", "reduce"):
        even, uneven = slowest[f"{kind}_even"], slowest[f"{kind}_uneven"]
        table.add_row(kind, f"{1e3 * even:.0f}", f"{1e3 * uneven:.0f}", f"{uneven / even:.2f}")
    console.print(table, "\n")


def show_gain(args: argparse.Namespace) -> None:
    """Emulated ranks: the largest model and its speed, even against free shares, predicted and measured."""
    table = Table(
        title=f"Two CPU ranks, memory and speed emulated, ZeRO stage 3, global batch {BATCH}: the largest model of either "
        "kind; seconds per step simulated from the profile, and measured"
    )
    for column in (
        "memory",
        "speed",
        "model",
        "shares",
        "micro-batches",
        "simulated s",
        "measured s",
        "samples/s",
    ):
        table.add_column(column, justify="right")
    for memory_mib, slowdown, label in (((128, 64), (4.0, 4.0), "2:1"), ((192, 64), (4.0, 8.0), "3:1")):
        request = {
            "hidden": 256,
            "length": 64,
            "zero_stage": 3,
            "memory_mib": memory_mib,
            "slowdown": slowdown,
            "global_batch_size": BATCH,
            "most_layers": MOST_LAYERS,
            "budget_s": 20.0,
            "steps": args.steps,
        }
        reports = launch("gain", request, args.timeout_s)
        for own in zip(*reports, strict=True):
            speeds = f"{slowdown[1] / slowdown[0]:g}:1"
            for cells in gain_rows(own):
                table.add_row(label, speeds, *cells)
    console.print(table, "\n")


def gain_rows(own: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Table rows of one model: even shares, free ones.

    Args:
        own: What every rank reports of it.
    """
    first = own[0]
    model = f"{first['layers']} layers, {first['parameters'] / 1e6:.1f} M"
    for name, plan in first["plans"].items():
        largest = " (largest)" if first["largest"][name] == first["layers"] else ""
        if plan is None:
            yield model, f"{name}: does not fit", "", "", "", ""
            continue
        shares = "50%/50%" if plan["fractions"] is None else "/".join(f"{f:.0%}" for f in plan["fractions"])
        seconds = max(report["measured_s"][name] for report in own)
        sizes = " | ".join(str(sizes) for sizes in plan["micro_batch_sizes"])
        figures = (f"{plan['predicted_s']:.2f}", f"{seconds:.2f}", f"{BATCH / seconds:.1f}")
        yield model + largest, f"{name}: {shares}", sizes, *figures


def show_simulation(_: argparse.Namespace) -> None:
    """Simulated clusters: the largest model and the throughput."""
    clusters = HERE.parent / "configs" / "clusters"
    table = Table(title="Simulated, gradient checkpointing, 2048 tokens, global batch 256: even against free shares")
    for column in (
        "cluster",
        "model",
        "stage",
        "even samples/s",
        "free samples/s",
        "gain",
        "layers that fit: even, free",
    ):
        table.add_column(column, justify="right")
    for cluster in (
        load_cluster(clusters / "b.yaml"),
        load_cluster(clusters / "c.yaml"),
        cluster_from_dict(SMALL_AND_LARGE),
    ):
        for model in ("llama-1.1b", "llama-7b"):
            for stage in (1, 2, 3):
                table.add_row(*simulated_row(cluster, model, stage))
    console.print(table, "\n")


def simulated_row(cluster: Cluster, model: str, stage: int) -> tuple[str, ...]:
    """One line of the table."""
    work = Workload(model=find_model(model, seq_len=2048), checkpointing=True)
    found = compare_shares(cluster, work, zero_stage=stage, global_batch_size=256)
    speeds = [
        "does not fit" if plan is None else f"{256 / plan.plan.predicted_step_time_s:.2f}"
        for plan in (found.even, found.free)
    ]
    layers = [largest_model(cluster, work, zero_stage=stage, uneven=uneven) for uneven in (False, True)]
    counts = ", ".join("none" if shape is None else str(shape.num_layers) for shape in layers)
    gain = "" if found.speedup is None else f"{found.speedup:.2f}x"
    return cluster.name, model, str(stage), *speeds, gain, counts


if __name__ == "__main__":
    sys.exit(main())
