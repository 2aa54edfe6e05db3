"""Which sizes are timed: few, and where they matter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator

from accelerate_poplar.points import PointPicker, interpolation_errors


def asked(picker: PointPicker, seconds, *, noise: float = 0.0, limit: int = 200) -> list[int]:
    """Every size the picker asks for when the device answers with `seconds(size)`."""
    sizes = []
    while (size := picker.ask()) is not None:
        sizes.append(size)
        picker.tell(size, seconds(size), noise)
        assert len(sizes) < limit, "the picker never stops"
    return sizes


def test_doubles_up_to_the_cap_and_stops_on_a_line() -> None:
    assert asked(PointPicker(largest=24, relative_error=0.03), lambda b: 0.1 + 0.01 * b) == [1, 2, 4, 8, 16, 24]


@pytest.mark.parametrize(("largest", "sizes"), [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4])])
def test_small_caps(largest: int, sizes: list[int]) -> None:
    assert asked(PointPicker(largest=largest, relative_error=0.03), lambda b: float(b)) == sizes


def test_looks_closer_where_the_curve_bends() -> None:
    sizes = asked(PointPicker(largest=64, relative_error=0.03), lambda b: 0.1 if b <= 20 else 0.1 + 0.05 * (b - 20))
    extra = [b for b in sizes if b not in (1, 2, 4, 8, 16, 32, 64)]
    assert extra
    assert all(8 < b < 64 for b in extra)


def test_noise_is_not_mistaken_for_a_bend() -> None:
    wobble = {1: 1.0, 2: 2.3, 4: 3.8, 8: 8.9, 16: 15.0}
    assert len(asked(PointPicker(largest=16, relative_error=0.01), wobble.__getitem__, noise=0.2)) == 5


def test_an_unfit_size_lowers_the_cap() -> None:
    picker = PointPicker(largest=16, relative_error=0.03)
    for size in (1, 2, 4, 8):
        assert picker.ask() == size
        picker.tell(size, float(size))
    assert picker.ask() == 16
    picker.lower_cap(12)
    assert picker.ask() == 12


def test_a_skipped_size_is_not_asked_again() -> None:
    picker = PointPicker(largest=8, relative_error=0.03)
    picker.skip(2)
    assert asked(picker, lambda b: float(b)) == [1, 4, 8]


@given(
    largest=st.integers(1, 96),
    fixed=st.floats(0.01, 1.0),
    slope=st.floats(0.001, 0.1),
    knee=st.integers(1, 96),
    scale=st.sampled_from([0.25, 4.0, 1024.0]),
)
def test_asks_within_the_cap_and_knows_no_unit_of_time(
    largest: int, fixed: float, slope: float, knee: int, scale: float
) -> None:
    def seconds(b: int) -> float:
        return fixed + slope * b + slope * max(0, b - knee)

    sizes = asked(PointPicker(largest=largest, relative_error=0.03), seconds)
    assert len(sizes) == len(set(sizes)) <= largest
    assert set(sizes) >= {1, largest}
    assert all(1 <= b <= largest for b in sizes)
    scaled = asked(PointPicker(largest=largest, relative_error=0.03), lambda b: scale * seconds(b))
    assert scaled == sizes


@given(knee=st.integers(2, 100), fixed=st.floats(0.05, 0.5))
def test_the_curve_is_as_good_as_was_asked_for(knee: int, fixed: float) -> None:
    def seconds(b: int) -> float:
        return fixed + 0.002 * b + 0.01 * max(0, b - knee)

    sizes = sorted(asked(PointPicker(largest=128, relative_error=0.01), seconds))
    every = np.arange(1, 129)
    exact = np.array([seconds(b) for b in every])
    fitted = PchipInterpolator(sizes, [seconds(b) for b in sizes])(every)
    assert len(sizes) <= 20
    assert np.max(np.abs(fitted / exact - 1)) < 0.015


def test_interpolation_errors() -> None:
    line = interpolation_errors({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, {})
    assert all(error == pytest.approx(0.0, abs=1e-12) for error in line.values())
    assert interpolation_errors({1: 1.0, 2: 2.0}, {}) == {(1, 2): 0.0}
    # A kink from slope 0 to slope 1 at 3, between points at 2 and 4: the chord is 0.5 above it.
    kink = interpolation_errors({1: 1.0, 2: 1.0, 4: 2.0, 5: 3.0}, {})
    assert kink[2, 4] == pytest.approx(0.5 / 1.5)
