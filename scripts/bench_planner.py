"""How good the plans are, and how long planning takes.

    python scripts/bench_planner.py                        device table, simulated
    python scripts/bench_planner.py --latencies FILE       measured per-layer times of real GPUs
    python scripts/bench_planner.py --only scale --plot growth.png

Three parts: `quality` compares the optimum with every rival on all mixes of two to four kinds of GPU, `scale` times
the planner on one core, `clusters` simulates the clusters in configs/clusters. Step times are predicted by the
step-time model throughout; no GPU is used. Exits with 1 if any rival is faster than the optimum, or a time limit is
missed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from accelerate_poplar.cephalo import simulate_cephalo
from accelerate_poplar.cluster import cluster_from_dict, load_cluster
from accelerate_poplar.devices import DEVICES, find_device
from accelerate_poplar.errors import InsufficientMemoryError
from accelerate_poplar.latencies import LatencyTable
from accelerate_poplar.model_shape import ModelShape, find_model
from accelerate_poplar.profiles import ClusterProfile, Measurement, RankProfile, StageProfile
from accelerate_poplar.search import STRATEGIES, find_plan
from accelerate_poplar.simulate import Workload, compare, simulated_profile
from accelerate_poplar.text_table import format_table

RIVALS = [name for name in STRATEGIES if name != "optimal"]
CLUSTERS = Path(__file__).resolve().parent.parent / "configs" / "clusters"
BATCHES = (64, 1000)
LINKS_GBYTES_PER_S = (1.0, 20.0)
RANKS_PER_KIND = 2
SLOWER = 1.0 + 1e-9

SCALES = (
    # ranks, kinds, global batch, limit in seconds (None: shown only)
    (8, 2, 2_048, 0.020),
    (1_024, 8, 65_536, 1.0),
    (10_000, 8, 65_536, 3.0),
    (10_000, 8, 640_001, 3.0),
    (64, 64, 65_536, None),
    (8, 2, 1_000_000, None),
)


# Quality


@dataclass
class Gains:
    """Ratios of a rival's step time over the optimum's."""

    ratios: list[float] = field(default_factory=list)
    not_possible: int = 0

    def row(self, name: str) -> tuple[str, ...]:
        if not self.ratios:
            return (name, "0", "-", "-", "-", "-", str(self.not_possible))
        behind = sum(ratio > 1.0001 for ratio in self.ratios) / len(self.ratios)
        figures = (statistics.mean(self.ratios), statistics.median(self.ratios), max(self.ratios))
        return (
            name,
            str(len(self.ratios)),
            f"{100 * behind:.0f}%",
            *(f"{x:.3f}x" for x in figures),
            str(self.not_possible),
        )


Curves = dict[str, tuple[Measurement, ...]]


def measured_workloads(path: str) -> Iterator[tuple[ModelShape, Curves]]:
    """Every model, length and dtype of a latency table that at least two GPUs were measured with."""
    table = LatencyTable.load(path)
    for key in sorted({(curve.model, curve.seq_len, curve.dtype) for curve in table.curves}):
        model, seq_len, dtype = key
        found = table.select(model=model, seq_len=seq_len, dtype=dtype)
        if len(found) < 2:
            continue
        if model in table.shapes:
            shape = table.shape(model, seq_len=seq_len)
        else:
            # The table times this model without giving its figures.
            shape = find_model(model.replace("_", "-"), seq_len=seq_len)
        yield shape, {gpu: curve.points(shape.num_layers) for gpu, curve in sorted(found.items())}


def simulated_workloads() -> Iterator[tuple[ModelShape, Curves]]:
    """The named models on the kinds of device whose efficiency was fitted."""
    fitted = [device for device in DEVICES.values() if device.table_name and device.fit_error is not None]
    for name in ("llama-0.5b", "llama-1.1b", "bert-large"):
        shape = find_model(name, seq_len=512)
        curves = {}
        for device in fitted[:8]:
            one = cluster_from_dict({"hosts": [{"device": device.name, "count": 1}]})
            profile = simulated_profile(one, Workload(model=shape), zero_stage=3)
            curves[device.name] = profile.ranks[0].points
        yield shape, curves


def mix_profile(shape: ModelShape, curves: Curves, kinds: Sequence[str], stage: int, link: float) -> ClusterProfile:
    """Two ranks of each kind on links of `link` gigabytes per second; micro-batches as large as was measured."""
    names = [kind for kind in kinds for _ in range(RANKS_PER_KIND)]
    count = len(names)
    once = 2.0 * shape.num_parameters * (count - 1) / count / (link * 1e9)
    per_micro_step, per_step = {0: (0.0, 2.0), 1: (0.0, 2.0), 2: (1.0, 1.0), 3: (3.0, 0.0)}[stage]
    updated = shape.num_parameters if stage == 0 else shape.num_parameters / count
    ranks = []
    for number, name in enumerate(names):
        device = find_device(name)
        ranks.append(
            RankProfile(
                rank=number,
                host="",
                device=device.name,
                memory_bytes=int(device.memory_gib * 2**30),
                peak_flops=device.peak_tflops * 1e12,
                step_overhead_s=28.0 * updated / (device.bandwidth_gbytes_per_s * 1e9),
                points=curves[name],
            )
        )
    caps = tuple(curves[name][-1].micro_batch_size for name in names)
    figures = StageProfile(
        max_micro_batch_size=caps,
        per_micro_step_s=per_micro_step * once,
        per_step_s=per_step * once,
        overlap=0.5,
    )
    return ClusterProfile(
        model=shape.name,
        num_parameters=shape.num_parameters,
        seq_len=shape.seq_len,
        dtype="fp16",
        ranks=tuple(ranks),
        zero_stages={stage: figures},
    )


def quality(latencies: str | None, every: int) -> bool:
    """Print the gains over every rival; True when no rival was ever faster."""
    gains = {(stage, rival): Gains() for stage in range(4) for rival in RIVALS}
    worst = 1.0
    mixes = 0
    workloads = measured_workloads(latencies) if latencies else simulated_workloads()
    for shape, curves in workloads:
        kinds = [mix for size in (2, 3, 4) for mix in itertools.combinations(curves, size)][::every]
        mixes += len(kinds)
        for mix, stage, link in itertools.product(kinds, range(4), LINKS_GBYTES_PER_S):
            profile = mix_profile(shape, curves, mix, stage, link)
            for batch in BATCHES:
                best, *others = compare(profile, global_batch_size=batch, zero_stage=stage)
                for other in others:
                    seen = gains[stage, other.strategy]
                    if best.breakdown is None or other.breakdown is None:
                        seen.not_possible += 1
                        continue
                    ratio = other.breakdown.step_time_s / best.breakdown.step_time_s
                    seen.ratios.append(ratio)
                    worst = min(worst, ratio)
    source = "measured per-layer times" if latencies else "the device table (simulated)"
    print(f"Gain of `optimal` over each rival, curves from {source}: {mixes} mixes of 2 to 4 kinds of GPU,")
    print(f"{RANKS_PER_KIND} ranks of each, global batches {BATCHES}, links {LINKS_GBYTES_PER_S} x 10^9 bytes/s.")
    header = ("rival", "cases", "behind", "mean", "median", "largest", "no plan")
    for stage in (*range(4), None):
        print(f"\n{'all stages' if stage is None else f'ZeRO stage {stage}'}")
        rows = []
        for rival in RIVALS:
            parts = [gains[s, rival] for s in range(4) if stage is None or s == stage]
            merged = Gains([r for part in parts for r in part.ratios], sum(part.not_possible for part in parts))
            rows.append(merged.row(rival))
        print(format_table(header, rows))
    verdict = "never slower than a rival" if worst * SLOWER >= 1.0 else f"SLOWER than a rival by {1 / worst:.6f}x"
    print(f"\n`optimal` was {verdict}.\n")
    return worst * SLOWER >= 1.0


# Scale


def random_cluster(ranks: int, kinds: int, *, largest: int = 64, seed: int = 0) -> ClusterProfile:
    """Noisy curves with launch cost, unequal speeds and caps, in random order."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(kinds):
        speed, launch, cap = rng.uniform(1, 6), rng.uniform(0.01, 0.05), int(rng.integers(largest // 4, largest + 1))
        sizes = sorted({1, 2, 4, 8, 12, cap // 2, cap})
        points = tuple(
            Measurement(
                micro_batch_size=size,
                step_time_s=float((launch + 0.02 * size) * speed * (1 + 0.02 * rng.random())),
                peak_memory_bytes=0,
            )
            for size in sizes
            if size <= cap
        )
        made.append((points, cap, float(rng.uniform(0, 0.05))))
    which = [*range(kinds), *rng.integers(0, kinds, ranks - kinds)]
    figures = StageProfile(
        max_micro_batch_size=tuple(made[kind][1] for kind in which),
        per_micro_step_s=0.05,
        per_step_s=0.1,
        overlap=0.3,
    )
    return ClusterProfile(
        model="random",
        num_parameters=10**9,
        seq_len=512,
        dtype="bf16",
        ranks=tuple(
            RankProfile(
                rank=number,
                host="h",
                device=str(kind),
                memory_bytes=0,
                peak_flops=1e12,
                step_overhead_s=made[kind][2],
                points=made[kind][0],
            )
            for number, kind in enumerate(which)
        ),
        zero_stages=dict.fromkeys(range(4), figures),
    )


def plan_seconds(profile: ClusterProfile, batch: int, stage: int, *, repeats: int = 3) -> float:
    """Median seconds of planning, after one run to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        find_plan(profile, global_batch_size=batch, zero_stage=stage)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def scale(plot: str | None) -> bool:
    """Print planning times; True when all are within their limits."""
    rows, good = [], True
    for ranks, kinds, batch, limit in SCALES:
        profile = random_cluster(ranks, kinds)
        times = [plan_seconds(profile, batch, stage) for stage in (1, 3)]
        good &= limit is None or max(times) < limit
        rows.append(
            (
                f"{ranks:,}",
                str(kinds),
                f"{batch:,}",
                *(f"{1e3 * seconds:.1f} ms" for seconds in times),
                "-" if limit is None else f"{1e3 * limit:.0f} ms",
            )
        )
    print("Planning time, one core")
    print(format_table(("ranks", "kinds", "global batch", "ZeRO-0/1", "ZeRO-2/3", "limit"), rows, left=()))
    print(f"\n{'all within their limits' if good else 'A LIMIT WAS MISSED'}\n")
    if plot:
        draw_growth(plot)
    return good


def draw_growth(path: str) -> None:
    """Planning time over the number of ranks and over the global batch."""
    from matplotlib.figure import Figure

    ranks = [8, 32, 128, 512, 2_048, 8_192]
    batches = [2**power for power in range(10, 21, 2)]
    by_ranks = {s: [plan_seconds(random_cluster(n, 8), 64 * n, s, repeats=1) for n in ranks] for s in (1, 3)}
    by_batch = {s: [plan_seconds(random_cluster(64, 8), b, s, repeats=1) for b in batches] for s in (1, 3)}
    figure = Figure(figsize=(9.5, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    panels = (
        (left, ranks, by_ranks, "ranks (64 samples each, 8 kinds)"),
        (right, batches, by_batch, "global batch, samples (64 ranks of 8 kinds)"),
    )
    for axes, values, times, label in panels:
        for stage, marker, dash in ((1, "o", "-"), (3, "s", "--")):
            name = "ZeRO-0/1" if stage == 1 else "ZeRO-2/3"
            axes.loglog(values, times[stage], marker=marker, linestyle=dash, label=name)
        linear = [max(t[-1] for t in times.values()) * value / values[-1] for value in values]
        axes.loglog(values, linear, color="0.6", linestyle=":", label="linear")
        axes.set_xlabel(label)
        axes.set_ylabel("seconds to plan, one core")
        axes.grid(True, which="major", color="0.9")
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}\n")


# Clusters


def clusters() -> bool:
    """Print the simulated gains on the shipped clusters as a Markdown table; always True."""
    print("Clusters of the Poplar paper, simulated: gain in throughput of `optimal`, global batch of 2^21 tokens\n")
    print("| cluster | model | ZeRO | step s | MFU | over even | over flops | over proportional | over poplar |")
    print("|---|---|---|---|---|---|---|---|---|")
    for path in sorted(CLUSTERS.glob("*.yaml")):
        described = load_cluster(path)
        for name, stage in itertools.product(("llama-0.5b", "llama-1.1b", "bert-large"), range(4)):
            work = Workload(model=find_model(name))
            results = compare(
                simulated_profile(described, work, zero_stage=stage),
                global_batch_size=2**21 // work.model.seq_len,
                zero_stage=stage,
                token_flops=work.token_flops,
            )
            speeds = {result.strategy: result.samples_per_s for result in results}
            best = results[0]
            start = f"| {described.name} | {name} | {stage} "
            if best.breakdown is None or best.mfu is None:
                print(start + "| does not fit | | | | | |")
                continue
            gains = [f"{best.samples_per_s / speeds[r]:.2f}x" for r in ("even", "flops", "proportional", "poplar")]
            print(start + f"| {best.breakdown.step_time_s:.2f} | {100 * best.mfu:.0f}% | {' | '.join(gains)} |")
    print("\nUneven training state at ZeRO-3, simulated with Cephalo's cost model on both sides\n")
    print("| cluster | model | even state, step s | uneven state, step s | gain |")
    print("|---|---|---|---|---|")
    for path, name in itertools.product(sorted(CLUSTERS.glob("*.yaml")), ("llama-0.5b", "llama-1.1b", "llama-7b")):
        described, work = load_cluster(path), Workload(model=find_model(name), checkpointing=name == "llama-7b")
        try:
            result = simulate_cephalo(described, work, global_batch_size=2**21 // work.model.seq_len)
        except InsufficientMemoryError:
            print(f"| {described.name} | {name} | does not fit | does not fit | |")
            continue
        fits = result.even_state_step_time_s != float("inf")
        even = f"{result.even_state_step_time_s:.2f}" if fits else "does not fit"
        gain = f"{result.gain:.2f}x" if fits else ""
        print(f"| {described.name} | {name} | {even} | {result.step_time_s:.2f} | {gain} |")
    print()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latencies", metavar="FILE", help="measured per-layer times (JSON)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth mix of GPUs (default: 1)")
    parser.add_argument("--only", choices=("quality", "scale", "clusters"), help="one part instead of all")
    parser.add_argument("--plot", metavar="FILE", help="with scale: draw the growth of the planning time")
    args = parser.parse_args()
    if args.every < 1:
        parser.error(f"--every is {args.every}; it must be at least 1")
    good = True
    if args.only in (None, "scale"):
        good &= scale(args.plot)
    if args.only in (None, "clusters"):
        good &= clusters()
    if args.only in (None, "quality"):
        good &= quality(args.latencies, args.every)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
