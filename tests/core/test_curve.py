from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_poplar.curve import StepTimeCurve
from accelerate_poplar.errors import ProfileError
from accelerate_poplar.profiles import Measurement
from tests.core.planner_cases import measurements
from tests.data_folder import data_folder


def points(**seconds: float) -> list[Measurement]:
    """`points(b2=0.5)`: one measurement of 0.5 s at size 2."""
    return [
        Measurement(micro_batch_size=int(name[1:]), step_time_s=t, peak_memory_bytes=0) for name, t in seconds.items()
    ]


def pooled(values: list[float]) -> list[float]:
    """Isotonic regression by the textbook: merge neighbours that decrease into their mean."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value, 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (left, n), (right, m) = blocks[-2], blocks[-1]
            blocks[-2:] = [[(left * n + right * m) / (n + m), n + m]]
    return [mean for mean, count in blocks for _ in range(int(count))]


def test_a_point_for_every_size_that_never_decreases_is_used_unchanged() -> None:
    seconds = [0.1, 0.1, 0.30000000000000004, 0.7]
    curve = StepTimeCurve.fit(measurements(seconds), max_micro_batch_size=4)
    assert curve.times().tolist() == [0.0, *seconds]
    assert curve.max_micro_batch_size == 4


def test_a_curve_that_dips_becomes_its_isotonic_regression() -> None:
    curve = StepTimeCurve.fit(measurements([1.0, 3.0, 2.0, 4.0]), max_micro_batch_size=4)
    assert curve.times().tolist() == [0.0, 1.0, 2.5, 2.5, 4.0]


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20))
@settings(deadline=None)
def test_isotonic_regression_is_the_textbooks(seconds: list[float]) -> None:
    curve = StepTimeCurve.fit(measurements(seconds), max_micro_batch_size=len(seconds))
    np.testing.assert_allclose(curve.times()[1:], pooled(seconds), rtol=1e-9)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8, unique=True),
    st.lists(st.floats(0.01, 10.0), min_size=8, max_size=8),
    st.integers(0, 90),
)
@settings(deadline=None)
def test_a_curve_starts_at_zero_never_decreases_and_passes_through_increasing_points(
    sizes: list[int], seconds: list[float], cap: int
) -> None:
    measured = [
        Measurement(micro_batch_size=size, step_time_s=t, peak_memory_bytes=0)
        for size, t in zip(sorted(sizes), sorted(seconds), strict=False)
    ]
    times = StepTimeCurve.fit(measured, max_micro_batch_size=cap).times()
    assert times.shape == (cap + 1,)
    assert times[0] == 0.0
    assert np.all(np.diff(times) >= 0.0)
    for point in measured:
        if point.micro_batch_size <= cap:
            assert times[point.micro_batch_size] == point.step_time_s


def test_between_points_the_curve_stays_between_their_times() -> None:
    times = StepTimeCurve.fit(points(b1=0.5, b4=0.6, b16=3.0), max_micro_batch_size=16).times()
    assert np.all((times[1:5] >= 0.5) & (times[1:5] <= 0.6))
    assert np.all((times[4:] >= 0.6) & (times[4:] <= 3.0))


def test_beyond_the_last_point_the_slope_of_the_last_two_goes_on() -> None:
    times = StepTimeCurve.fit(points(b1=1.0, b2=1.5, b4=4.5), max_micro_batch_size=6).times()
    np.testing.assert_allclose(times[4:], [4.5, 6.0, 7.5])


def test_noise_at_the_end_does_not_make_more_samples_free() -> None:
    times = StepTimeCurve.fit(points(b1=1.0, b2=2.1, b3=1.9), max_micro_batch_size=5).times()
    np.testing.assert_allclose(times, [0.0, 1.0, 2.0, 2.0, 2.5, 3.0])


def test_a_single_point_means_a_time_in_proportion_to_the_size() -> None:
    times = StepTimeCurve.fit(points(b4=2.0), max_micro_batch_size=6).times()
    np.testing.assert_allclose(times, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0])


def test_below_the_first_point_the_curve_is_the_line_but_not_below_proportion() -> None:
    fixed_cost = StepTimeCurve.fit(points(b4=5.0, b6=6.0), max_micro_batch_size=6).times()
    np.testing.assert_allclose(fixed_cost[:5], [0.0, 3.5, 4.0, 4.5, 5.0])
    steep = StepTimeCurve.fit(points(b2=1.0, b3=4.0), max_micro_batch_size=3).times()
    np.testing.assert_allclose(steep, [0.0, 0.5, 1.0, 4.0])


def test_points_above_the_cap_shape_the_curve_below_it() -> None:
    times = StepTimeCurve.fit(points(b1=1.0, b8=8.0), max_micro_batch_size=3).times()
    np.testing.assert_allclose(times, [0.0, 1.0, 2.0, 3.0])


def test_reading_and_inverting_a_curve() -> None:
    curve = StepTimeCurve.fit(measurements([1.0, 1.0, 3.0]), max_micro_batch_size=3)
    assert (curve(0), curve(2), curve(3)) == (0.0, 1.0, 3.0)
    assert [curve.largest_within(t) for t in (0.5, 1.0, 2.9, 3.0, 99.0)] == [0, 2, 2, 3, 3]
    assert curve.fastest_size() == 2
    for size in (-1, 4):
        with pytest.raises(ProfileError, match=rf"size {size} is outside 0 to 3"):
            curve(size)


def test_a_rank_without_room_has_a_curve_of_nothing() -> None:
    curve = StepTimeCurve.fit(points(b1=1.0), max_micro_batch_size=0)
    assert curve.times().tolist() == [0.0]
    assert curve.largest_within(10.0) == 0
    assert curve.fastest_size() == 0


def test_a_curve_cannot_be_changed_by_accident() -> None:
    curve = StepTimeCurve.fit(points(b1=1.0), max_micro_batch_size=1)
    with pytest.raises(ValueError, match="read-only"):
        curve.times()[1] = 5.0


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ([], "`points` is empty"),
        (points(b2=1.0, b1=2.0), r"points\[1\]: `micro_batch_size` 1 follows 2"),
        (points(b0=1.0), r"points\[0\]: `micro_batch_size` 0"),
        (points(b1=0.0), r"points\[0\]: `step_time_s` is 0.0"),
        (points(b1=-1.0), r"`step_time_s` is -1.0"),
        (points(b1=float("nan")), r"`step_time_s` is nan"),
        (points(b1=float("inf")), r"`step_time_s` is inf"),
    ],
)
def test_impossible_points_are_refused(measured: list[Measurement], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        StepTimeCurve.fit(measured, max_micro_batch_size=4)


@pytest.mark.parametrize("table", [[], [1.0], [0.0, 2.0, 1.0], [0.0, float("nan")], [[0.0]]])
def test_impossible_tables_are_refused(table: list[float]) -> None:
    with pytest.raises(ProfileError, match="step-time table"):
        StepTimeCurve(table)


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(ProfileError, match="max_micro_batch_size is -1"):
        StepTimeCurve.fit(points(b1=1.0), max_micro_batch_size=-1)


GPU_LIKE = {
    # Shapes seen on real devices: fastest at small sizes, a dip at size 2, a plateau, launch-bound small sizes.
    "fastest at small sizes": [1.0, 1.9, 3.1, 4.4, 5.9, 7.6],
    "dip at size 2": [1.00, 0.96, 1.5, 2.0, 2.6],
    "plateau": [0.50, 0.50, 0.51, 0.80, 0.80, 1.2],
    "launch-bound": [0.20, 0.201, 0.203, 0.21, 0.24, 0.29],
}


@pytest.mark.parametrize("seconds", GPU_LIKE.values(), ids=GPU_LIKE.keys())
def test_half_the_points_of_a_typical_curve_tell_the_rest(seconds: list[float]) -> None:
    check_interpolation(seconds, tolerance=0.06)


def test_half_the_points_of_every_measured_gpu_curve_tell_the_rest() -> None:
    folder = data_folder()
    if folder is None:
        pytest.skip("no data folder; the typical curves above are checked instead")
    from accelerate_poplar.latencies import LatencyTable

    for curve in LatencyTable.load(folder / "gpu_latencies.json").curves:
        check_interpolation(list(curve.layer_time_s), tolerance=0.06)


def check_interpolation(seconds: list[float], *, tolerance: float) -> None:
    """Fit every other point, and compare with the isotonic version of all of them."""
    every_other = [m for i, m in enumerate(measurements(seconds)) if i % 2 == 0 or i == len(seconds) - 1]
    fitted = StepTimeCurve.fit(every_other, max_micro_batch_size=len(seconds)).times()[1:]
    # One odd measurement may be missed by much; the curve as a whole may not.
    assert np.mean(np.abs(fitted / pooled(seconds) - 1.0)) < tolerance
