"""Noise does not choose the micro-batch, and what is not noise stays."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerate_poplar.steady import steady_times

SIZES = (1, 2, 4, 8, 16, 32, 64)


def repeats_of(per_sample: dict[int, float], noise: float, seed: int = 0) -> dict[int, list[float]]:
    """Five repeats of each size, with normal noise."""
    generator = np.random.default_rng(seed)
    return {size: [size * s * (1.0 + noise * generator.normal()) for _ in range(5)] for size, s in per_sample.items()}


def steadied(repeats: dict[int, list[float]]) -> dict[int, float]:
    """Per sample, by size."""
    seconds = {size: statistics.median(own) for size, own in repeats.items()}
    return {size: time / size for size, time in steady_times(seconds, repeats).items()}


def test_sizes_that_are_equally_fast_are_not_told_apart() -> None:
    curves = [steadied(repeats_of(dict.fromkeys(SIZES, 2.0), 0.04, seed)) for seed in range(100)]
    level = [list(found.values()) == sorted(found.values(), reverse=True) for found in curves]
    assert sum(level) >= 90, "three standard errors are exceeded now and then"
    largest = [found[64] for found in curves]
    assert statistics.fmean(largest) == pytest.approx(2.0, rel=0.02)
    raw = [repeats_of({64: 2.0}, 0.04, seed)[64] for seed in range(100)]
    assert statistics.pstdev(largest) < 0.8 * statistics.pstdev(statistics.median(own) / 64 for own in raw)


def test_of_sizes_that_are_not_told_apart_the_largest_is_the_fastest() -> None:
    found = steady_times({1: 1.0, 2: 2.0, 4: 4.0}, {1: [0.99, 1.01], 2: [1.98, 2.02], 4: [3.99, 4.1]})
    assert found == {1: 1.0, 2: 2.0, 4: 4.0}, "equal times are no violation"
    found = steady_times({1: 1.0, 2: 2.004, 4: 4.0}, {1: [0.99, 1.01], 2: [1.984, 2.024], 4: [3.96, 4.04]})
    per_sample = [time / size for size, time in found.items()]
    assert per_sample == sorted(per_sample, reverse=True)
    assert 1.0 < per_sample[0] / per_sample[1] < 1.02


def test_first_repeats_that_take_far_too_long_do_not_make_the_largest_size_faster() -> None:
    repeats = repeats_of(dict.fromkeys(SIZES, 2.0), 0.005)
    for own in repeats.values():
        own[0] *= 6.0
    assert steadied(repeats) == pytest.approx(dict.fromkeys(SIZES, 2.0), rel=0.01)


def test_a_device_that_gets_slower_beyond_its_cache_is_believed() -> None:
    found = steadied(repeats_of({size: 2.0 if size <= 16 else 2.6 for size in SIZES}, 0.02))
    assert found[16] == pytest.approx(2.0, rel=0.03)
    assert found[32] == pytest.approx(2.6, rel=0.03)
    assert found[64] == pytest.approx(2.6, rel=0.03)


def test_a_device_that_gets_faster_keeps_its_curve() -> None:
    repeats = repeats_of({size: 2.0 + 4.0 / size for size in SIZES}, 0.001)
    assert steadied(repeats) == pytest.approx({size: statistics.median(own) / size for size, own in repeats.items()})


@pytest.mark.parametrize("count", [1, 3])
def test_exact_times_stay_as_they_are(count: int) -> None:
    seconds = {4: 9.0, 1: 2.0, 2: 4.5}
    repeats = {size: [time] * count for size, time in seconds.items()}
    assert list(steady_times(seconds, repeats).items()) == [(1, 2.0), (2, 4.5), (4, 9.0)]
    assert steady_times({}, {}) == {}


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=5), min_size=1, max_size=7))
def test_all_sizes_remain_and_stay_about_the_measured_range(noise: list[list[float]]) -> None:
    repeats = {size: [size * factor for factor in factors] for size, factors in zip(SIZES, noise, strict=False)}
    found = steadied(repeats)
    assert list(found) == sorted(repeats)
    medians = [statistics.median(own) / size for size, own in repeats.items()]
    # Beyond it by half a standard error of equal sizes at most.
    assert all(0.5 * min(medians) <= value <= 1.5 * max(medians) for value in found.values())
