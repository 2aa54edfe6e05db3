"""Steps of unequal rows: every sample once, within every rank's memory, in predicted time, the same for every rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_poplar import PlanError
from accelerate_poplar.lengths import Cut, LengthCutter, TokenCost, predicted_ns, token_cost


def cost_of(speed: float, rows: int, *, reference_length: int = 64, fixed_s: float = 0.001) -> TokenCost:
    """A rank with a fixed cost per micro-step and a time in proportion to its tokens."""
    times = [0.0] + [(fixed_s + 0.01 * size) / speed for size in range(1, rows + 1)]
    return token_cost(times, max_micro_batch_size=rows, reference_length=reference_length)


@st.composite
def cutters(draw: st.DrawFn) -> LengthCutter:
    costs = [
        cost_of(
            draw(st.sampled_from([0.5, 1.0, 3.0])),
            draw(st.integers(1 if rank == 0 else 0, 6)),
            fixed_s=draw(st.sampled_from([0.0, 0.005])),
        )
        for rank in range(draw(st.integers(1, 4)))
    ]
    return LengthCutter(costs, zero_stage=draw(st.integers(0, 3)), per_micro_step_ns=draw(st.sampled_from([0, 10**6])))


row_lengths = st.lists(st.integers(1, 64), min_size=1, max_size=40)


def tokens_of(lengths: list[int], cut: Cut) -> list[list[int]]:
    """Tokens with padding, by rank and micro-step."""
    return [[len(rows) * max(lengths[i] for i in rows) if rows else 0 for rows in own] for own in cut]


@settings(max_examples=300, deadline=None)
@given(cutter=cutters(), lengths=row_lengths)
def test_every_sample_once_and_within_memory(cutter: LengthCutter, lengths: list[int]) -> None:
    cut = cutter.cut(lengths)
    assert sorted(i for own in cut for rows in own for i in rows) == list(range(len(lengths)))
    assert len(cut) == len(cutter.costs)
    for cost, own in zip(cutter.costs, tokens_of(lengths, cut), strict=True):
        assert max(own) <= cost.max_tokens
    if cutter.zero_stage > 1:
        assert len({len(own) for own in cut}) == 1


@settings(max_examples=60, deadline=None)
@given(cutter=cutters(), lengths=row_lengths)
def test_the_cut_is_the_same_wherever_it_is_made(cutter: LengthCutter, lengths: list[int]) -> None:
    twin = LengthCutter(
        [TokenCost(c.times_ns, c.reference_length, c.overhead_ns) for c in cutter.costs],
        zero_stage=cutter.zero_stage,
        per_micro_step_ns=cutter.per_micro_step_ns,
    )
    assert cutter.cut(lengths) == twin.cut(np.asarray(lengths, dtype=np.int32))


def step_ns(cutter: LengthCutter, lengths: list[int], cut: Cut) -> int:
    if cutter.zero_stage < 2:
        return max(predicted_ns(cutter, lengths, cut))
    columns = zip(*tokens_of(lengths, cut), strict=True)
    return sum(
        max(cost.one_time_ns(count) for cost, count in zip(cutter.costs, column, strict=True))
        + cutter.per_micro_step_ns
        for column in columns
    )


def in_proportion(cutter: LengthCutter, lengths: list[int]) -> Cut:
    """Shares by speed in rows, in the order they come: what a plan of full-length rows does."""
    order = sorted(range(len(cutter.costs)), key=lambda rank: -cutter.costs[rank].max_tokens)
    caps = [cost.max_tokens // 64 for cost in cutter.costs]
    pieces: list[list[tuple[int, ...]]] = [[] for _ in caps]
    left = list(range(len(lengths)))
    while left:
        for rank in order:
            pieces[rank].append(tuple(left[: caps[rank]]))
            left = left[caps[rank] :]
    return tuple(tuple(own) for own in pieces)


@settings(max_examples=200, deadline=None)
@given(cutter=cutters(), lengths=st.lists(st.integers(1, 64), min_size=12, max_size=40))
def test_never_much_slower_than_cutting_by_rows(cutter: LengthCutter, lengths: list[int]) -> None:
    by_rows = step_ns(cutter, lengths, in_proportion(cutter, lengths))
    assert step_ns(cutter, lengths, cutter.cut(lengths)) <= 1.1 * by_rows


def partitions(items: list[int]) -> list[list[list[int]]]:
    """Every way to put items into groups."""
    if not items:
        return [[]]
    found = []
    for rest in partitions(items[1:]):
        found.append([[items[0]], *rest])
        found += [[*rest[:i], [items[0], *group], *rest[i + 1 :]] for i, group in enumerate(rest)]
    return found


@pytest.mark.parametrize("seed", range(6))
def test_close_to_the_best_of_all_cuts(seed: int) -> None:
    """Seven rows on two ranks of speeds 3 and 1, against every way to group and share them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 64, size=7).tolist()
    cutter = LengthCutter([cost_of(3.0, 4), cost_of(1.0, 2)], zero_stage=0)
    best = None
    for groups in partitions(list(range(7))):
        for ranks in itertools.product((0, 1), repeat=len(groups)):
            cut = tuple(tuple(tuple(g) for g, r in zip(groups, ranks, strict=True) if r == rank) for rank in (0, 1))
            sizes = tokens_of(lengths, cut)
            if all(max(own, default=0) <= c.max_tokens for c, own in zip(cutter.costs, sizes, strict=True)):
                time_ns = max(predicted_ns(cutter, lengths, cut))
                best = time_ns if best is None else min(best, time_ns)
    assert best is not None
    assert step_ns(cutter, lengths, cutter.cut(lengths)) <= 1.25 * best


@pytest.mark.parametrize(("stage", "most_idle", "most_padding"), [(1, 0.03, 0.1), (2, 0.08, 0.16)])
def test_a_lognormal_step_is_balanced_with_little_padding(stage: int, most_idle: float, most_padding: float) -> None:
    rng = np.random.default_rng(1)
    cutter = LengthCutter(
        [cost_of(3.0, 16, reference_length=512), cost_of(1.0, 16, reference_length=512)], zero_stage=stage
    )
    idle, padding = [], []
    for _ in range(10):
        lengths = np.clip(np.exp(rng.normal(4.6, 0.8, 128)), 16, 512).astype(int).tolist()
        cut = cutter.cut(lengths)
        times = predicted_ns(cutter, lengths, cut)
        idle.append(1 - sum(times) / len(times) / max(times))
        padding.append(1 - sum(lengths) / sum(map(sum, tokens_of(lengths, cut))))
    assert np.mean(idle) < most_idle
    assert np.mean(padding) < most_padding


def test_tokens_cost_what_the_curve_says() -> None:
    cost = token_cost([0.0, 0.3, 0.4, 0.6], max_micro_batch_size=3, reference_length=10)
    assert cost.max_tokens == 30
    assert [cost.one_time_ns(tokens) for tokens in (0, 10, 15, 20, 30)] == [
        0,
        3 * 10**8,
        35 * 10**7,
        4 * 10**8,
        6 * 10**8,
    ]
    assert cost.one_time_ns(5) == 25 * 10**7  # halfway between the cost of a micro-step as such (0.2 s) and one row
    assert cost.time_ns(np.asarray([0, 5, 30])).tolist() == [0, 25 * 10**7, 6 * 10**8]
    assert cost.most_rows(10, 4 * 10**8) == 2
    assert cost.most_rows(40, 10**12) == 0


@pytest.mark.parametrize(
    ("shortest", "as_such_s"),
    [
        ((10, 0.28), 0.2),  # 0.2 s and 0.008 s a token, as 100 tokens in 1.0 s
        ((10, 0.05), 0.0),  # faster than its share of a long row: nothing is fixed
        ((10, 1.50), 1.0),  # never more than a long row takes
        ((100, 0.3), 0.0),  # no shorter than the others: the first two sizes must do
        (None, 0.0),
    ],
)
def test_the_cost_of_a_micro_step_as_such_is_what_a_short_row_takes(
    shortest: tuple[int, float] | None, as_such_s: float
) -> None:
    straight = [0.0, 1.0, 2.0, 3.0]
    cost = token_cost(straight, max_micro_batch_size=3, reference_length=100, shortest=shortest)
    assert cost.times_ns[0] == pytest.approx(as_such_s * 1e9, abs=1.0)
    assert cost.one_time_ns(50) == pytest.approx((as_such_s + 1.0) / 2.0 * 1e9, abs=1.0)


def test_short_rows_share_a_micro_batch_also_where_noise_hides_its_fixed_cost_between_one_and_two_long_rows() -> None:
    lengths = [10, 12, 11, 13, 10, 12, 11, 13]
    packed = []
    for shortest in (None, (10, 0.28)):
        cost = token_cost([0.0, 1.0, 2.0, 3.0], max_micro_batch_size=3, reference_length=100, shortest=shortest)
        ((*micro_batches,),) = LengthCutter([cost], zero_stage=0).cut(lengths)
        packed.append(len(micro_batches))
    alone, together = packed
    assert alone >= 4
    assert together == 1


def test_a_sample_that_fits_nowhere_is_named() -> None:
    cutter = LengthCutter([cost_of(1.0, 2), cost_of(1.0, 1)], zero_stage=2)
    with pytest.raises(PlanError, match=r"a sample of 200 tokens fits no rank: .* 128 tokens"):
        cutter.cut([5, 200])


def test_long_rows_go_where_they_fit() -> None:
    """Rank 1 holds 64 tokens at most; the row of 100 must go to rank 0."""
    cutter = LengthCutter([cost_of(1.0, 4), cost_of(9.0, 1)], zero_stage=1)
    cut = cutter.cut([10, 100, 20])
    assert any(1 in rows for rows in cut[0])
