"""Equal ranks share one curve; a straggler among them is found and named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_poplar.equals import share_curves
from accelerate_poplar.profiles import Measurement


def curve(*seconds: float) -> tuple[Measurement, ...]:
    """Points at 1, 2, 4, ... samples."""
    return tuple(
        Measurement(micro_batch_size=2**i, step_time_s=t, peak_memory_bytes=100 * 2**i) for i, t in enumerate(seconds)
    )


def test_ranks_that_agree_share_their_median() -> None:
    points, stragglers = share_curves([curve(1.0, 2.0), curve(1.02, 2.02), curve(0.99, 1.98)], ["a"] * 3)
    assert points[0] == points[1] == points[2]
    assert [p.step_time_s for p in points[0]] == [1.0, 2.0]
    assert stragglers == []


def test_different_devices_keep_their_own() -> None:
    own = [curve(1.0, 2.0), curve(1.01, 2.01)]
    assert share_curves(own, ["a", "b"]) == (own, [])


def test_emulated_ranks_of_one_device_differ_by_their_slowdown_only() -> None:
    noisy = [curve(1.0, 2.2), curve(3.6, 5.4)]
    points, stragglers = share_curves(noisy, ["a", "a"], [1.0, 3.0])
    assert [p.step_time_s for p in points[0]] == pytest.approx([1.1, 2.0])
    assert [p.step_time_s for p in points[1]] == pytest.approx([3.3, 6.0])
    assert stragglers == []


def test_real_imbalance_below_an_emulated_one_stays() -> None:
    own = [curve(1.0, 2.0), curve(6.0, 12.0)]
    points, stragglers = share_curves(own, ["a", "a"], [1.0, 3.0])
    assert points == own
    assert stragglers == []


def test_a_size_that_one_rank_alone_looked_at_is_kept_only_beyond_the_others() -> None:
    more = (*curve(1.0, 2.0), Measurement(micro_batch_size=3, step_time_s=2.7, peak_memory_bytes=300))
    wider = curve(1.0, 2.0, 4.0)
    points, _ = share_curves([more, wider], ["a", "a"])
    assert [p.micro_batch_size for p in points[0]] == [1, 2, 4]
    points, _ = share_curves([(*more, *curve(1.0, 2.0, 4.0)[2:]), wider], ["a", "a"])
    assert [p.micro_batch_size for p in points[0]] == [1, 2, 4]


def test_ranks_without_points_are_left_alone() -> None:
    assert share_curves([(), ()], ["a", "a"]) == ([(), ()], [])


@pytest.mark.scenario(30)
def test_200_ms_more_on_one_rank_blame_that_rank() -> None:
    fast = curve(0.5, 0.9, 1.7)
    slow = curve(0.7, 1.1, 1.9)
    points, stragglers = share_curves([fast, slow, fast, fast], ["a"] * 4)
    (straggler,) = stragglers
    assert straggler.rank == 1
    assert straggler.equals == (0, 2, 3)
    assert straggler.extra_s == pytest.approx(0.2, rel=0.1)
    assert "rank 1" in str(straggler)
    assert "200 ms" in str(straggler)
    assert points[1] == slow, "the straggler is planned for as it is"
    assert points[0] == fast


def test_of_two_ranks_the_slower_one_is_named() -> None:
    _, stragglers = share_curves([curve(1.5), curve(1.0)], ["a", "a"])
    assert [s.rank for s in stragglers] == [0]
    assert stragglers[0].factor == pytest.approx(1.5)


def test_two_ranks_that_take_turns_at_being_slow_are_alike() -> None:
    points, stragglers = share_curves([curve(1.0, 2.4, 4.0, 9.6), curve(1.2, 2.0, 4.8, 8.0)], ["a", "a"])
    assert points[0] == points[1]
    assert [p.step_time_s for p in points[0]] == pytest.approx([1.1, 2.2, 4.4, 8.8])
    assert stragglers == []


@given(
    st.lists(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), min_size=1, max_size=5),
    st.sampled_from([None, 1.0, 2.0]),
)
@settings(max_examples=200, deadline=None)
def test_any_noise_leaves_every_rank_its_sizes_and_someone_to_compare_with(
    noise: list[list[float]], slowdown: float | None
) -> None:
    own = [curve(*(factor * 2**i for i, factor in enumerate(factors))) for factors in noise]
    slowdowns = None if slowdown is None else [slowdown] * len(own)
    points, stragglers = share_curves(own, ["a"] * len(own), slowdowns)
    assert [[p.micro_batch_size for p in rank] for rank in points] == [[1, 2, 4, 8]] * len(own)
    for straggler in stragglers:
        assert straggler.equals
        assert straggler.rank not in straggler.equals
