"""Small clusters and exhaustive searches for the planner's tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from accelerate_poplar.curve import StepTimeCurve
from accelerate_poplar.profiles import ClusterProfile, Measurement, RankProfile, StageProfile

INFINITE = float("inf")


def measurements(times: Sequence[float]) -> tuple[Measurement, ...]:
    """Points for the sizes 1, 2, 3, ... with the given seconds."""
    return tuple(
        Measurement(micro_batch_size=size, step_time_s=seconds, peak_memory_bytes=0)
        for size, seconds in enumerate(times, start=1)
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cluster with a point for every micro-batch size, and what is asked of it."""

    times: tuple[tuple[float, ...], ...]
    """Per rank, seconds for 1, 2, 3, ... samples."""
    caps: tuple[int, ...]
    """Largest micro-batch per rank."""
    global_batch_size: int
    """Samples per optimizer step."""
    zero_stage: int = 0
    """ZeRO stage."""
    overheads: tuple[float, ...] = ()
    """Per-step overhead per rank; empty = none."""
    per_micro_step_s: float = 0.0
    """m of the step-time model."""
    per_step_s: float = 0.0
    """s of the step-time model."""
    overlap: float = 0.0
    """w of the step-time model."""
    peaks: tuple[float, ...] = field(default=())
    """Peak FLOP/s per rank; empty = 1e12 each."""

    def profile(self) -> ClusterProfile:
        """The case as a profile of one stage."""
        count = len(self.times)
        overheads, peaks = self.overheads or (0.0,) * count, self.peaks or (1e12,) * count
        ranks = tuple(
            RankProfile(
                rank=rank,
                host="h",
                device="d",
                memory_bytes=2**34,
                peak_flops=peaks[rank],
                step_overhead_s=overheads[rank],
                points=measurements(self.times[rank]),
            )
            for rank in range(count)
        )
        stage = StageProfile(
            max_micro_batch_size=self.caps,
            per_micro_step_s=self.per_micro_step_s,
            per_step_s=self.per_step_s,
            overlap=self.overlap,
        )
        return ClusterProfile(
            model="m",
            num_parameters=1000,
            seq_len=16,
            dtype="fp32",
            ranks=ranks,
            zero_stages={self.zero_stage: stage},
        )

    def curves(self) -> list[list[float]]:
        """Per rank, seconds for 0, 1, ..., cap samples, made non-decreasing as the model says."""
        return [
            [float(t) for t in StepTimeCurve.fit(measurements(own), max_micro_batch_size=cap).times()]
            for own, cap in zip(self.times, self.caps, strict=True)
        ]


def random_case(rng: random.Random, zero_stage: int) -> Case:
    """Up to 4 ranks and 24 samples: noisy, flat and repeated curves, caps of 0, overheads, overlap."""
    times: list[tuple[float, ...]] = []
    for _ in range(rng.randint(1, 4)):
        if times and rng.random() < 0.3:
            times.append(rng.choice(times))
            continue
        clock, own = rng.choice((0.1, 1.0, 0.01 + 2.0 * rng.random())), []
        for _ in range(rng.randint(1, 7)):
            # Now and then a larger micro-batch is measured as faster than a smaller one.
            own.append(clock * rng.choice((1.0, 1.0, 0.7 + 0.6 * rng.random())))
            clock += rng.choice((0.0, 0.5, 1.0, rng.random()))
        times.append(tuple(own))
    caps = tuple(rng.randint(0, len(own)) for own in times)
    if not any(caps):
        caps = (1, *caps[1:])
    return Case(
        times=tuple(times),
        caps=caps,
        global_batch_size=rng.randint(1, 24),
        zero_stage=zero_stage,
        overheads=tuple(rng.choice((0.0, 0.0, 2.0 * rng.random())) for _ in times),
        per_micro_step_s=rng.choice((0.0, 3.0 * rng.random())),
        per_step_s=rng.choice((0.0, rng.random())),
        overlap=rng.choice((0.0, 1.0, rng.random())),
    )


def exhaustive_step_time(case: Case) -> float:
    """The least step time over all assignments, by trying every micro-batch of every rank."""
    overheads = case.overheads or (0.0,) * len(case.times)
    if case.zero_stage < 2:
        return _exhaustive_local(case.curves(), overheads, case.global_batch_size) + case.per_step_s
    return _exhaustive_lockstep(case) + max(overheads) + case.per_step_s


def _exhaustive_local(curves: list[list[float]], overheads: Sequence[float], total: int) -> float:
    reachable = {0: 0.0}
    for times, overhead in zip(curves, overheads, strict=True):
        least = [0.0] + [INFINITE] * total
        for samples in range(1, total + 1):
            for size in range(1, min(samples, len(times) - 1) + 1):
                least[samples] = min(least[samples], times[size] + least[samples - size])
        extended: dict[int, float] = {}
        for before, finish in reachable.items():
            for own in range(total - before + 1):
                if least[own] < INFINITE:
                    later = max(finish, least[own] + overhead)
                    extended[before + own] = min(later, extended.get(before + own, INFINITE))
        reachable = extended
    return reachable[total]


def _exhaustive_lockstep(case: Case) -> float:
    curves, total = case.curves(), case.global_batch_size
    cheapest: dict[int, float] = {}
    for sizes in itertools.product(*(range(len(times)) for times in curves)):
        samples = sum(sizes)
        if 0 < samples <= total:
            slowest = max(times[size] for times, size in zip(curves, sizes, strict=True))
            cost = slowest + max(0.0, case.per_micro_step_s - case.overlap * slowest)
            cheapest[samples] = min(cost, cheapest.get(samples, INFINITE))
    least = [0.0] + [INFINITE] * total
    for samples in range(1, total + 1):
        for step, cost in cheapest.items():
            if step <= samples:
                least[samples] = min(least[samples], cost + least[samples - step])
    return least[total]


def all_assignments(case: Case) -> Iterator[list[tuple[int, ...]]]:
    """Literally every plan of a tiny case, as micro-batch sizes per rank.

    Up to the order of micro-steps, and without micro-steps in which nobody has samples.
    """
    if case.zero_stage < 2:
        for split in _splits(case.global_batch_size, len(case.caps)):
            options = [list(_partitions(own, cap)) for own, cap in zip(split, case.caps, strict=True)]
            for sizes in itertools.product(*options):
                yield list(sizes)
        return
    steps = [s for s in itertools.product(*(range(cap + 1) for cap in case.caps)) if any(s)]
    for chosen in _multisets(steps, case.global_batch_size):
        yield [tuple(step[rank] for step in chosen) for rank in range(len(case.caps))]


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _splits(total - first, parts - 1):
            yield (first, *rest)


def _partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield (0,)
        return
    for first in range(min(total, largest), 0, -1):
        if first == total:
            yield (first,)
        else:
            for rest in _partitions(total - first, first):
                yield (first, *rest)


def _multisets(steps: Sequence[tuple[int, ...]], total: int) -> Iterator[list[tuple[int, ...]]]:
    if total == 0:
        yield []
        return
    for index, step in enumerate(steps):
        if sum(step) <= total:
            for rest in _multisets(steps[index:], total - sum(step)):
                yield [step, *rest]
