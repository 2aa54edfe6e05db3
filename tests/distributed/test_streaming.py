"""Streams: every sample once under any plan, ends that come unevenly, a position that is a number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate_poplar import DataError, Plan, RankPlan
from accelerate_poplar.streaming import StreamHead, StreamLoader, fingerprint

from .launch import run_suite
from .streaming_cases import CASES, cases

WORLD_SIZES = (2, 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}

    def of(world_size: int) -> dict[str, Any]:
        if world_size not in found:
            folder = tmp_path_factory.mktemp(f"streaming{world_size}")
            found[world_size] = run_suite("streaming", world_size=world_size, folder=folder, timeout_s=600)
        return found[world_size]

    return of


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        pytest.param(n, name, id=f"{n}ranks-{name}", marks=[pytest.mark.scenario(s) for s in CASES[name]])
        for n in WORLD_SIZES
        for name in cases(n)
    ],
)
def test_on_real_ranks(results: Callable[[int], dict[str, Any]], world_size: int, name: str) -> None:
    assert results(world_size)[name] == ""


class SameEverywhere:
    """Ranks that all say what this one says, which is what reading one shared stream looks like."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return value


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    stage = draw(st.integers(0, 3))
    world_size = draw(st.integers(1, 4))
    micro_steps = draw(st.integers(1, 3))
    sizes = [
        [draw(st.integers(0, 4)) for _ in range(micro_steps if stage > 1 else draw(st.integers(1, 3)))]
        for _ in range(world_size)
    ]
    sizes[draw(st.integers(0, world_size - 1))][0] += 1
    return Plan(
        zero_stage=stage,
        global_batch_size=sum(map(sum, sizes)),
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=tuple(RankPlan(rank=i, micro_batch_sizes=tuple(own)) for i, own in enumerate(sizes)),
    )


def loader_of(plan: Plan, rank: int, rows: Any, *, drop_last: bool = False) -> StreamLoader:
    ranks = SameEverywhere(rank, plan.world_size)
    return StreamLoader(
        rows, head=StreamHead(rows, ranks), plan=plan, ranks=ranks, collate_fn=list, drop_last=drop_last
    )


def parts(plan: Plan, rows: Any, **kwargs: Any) -> list[list[list[int]]]:
    """By rank and step: the samples."""
    found = []
    for rank in range(plan.world_size):
        steps = list(loader_of(plan, rank, rows, **kwargs))
        found.append([[row for batch in step.micro_batches if batch is not None for row in batch] for step in steps])
    return found


class Rows:
    """A stream of whole numbers; `once`: an iterator, which can be read only once."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


@settings(max_examples=150, deadline=None)
@given(plan=plans(), count=st.integers(1, 60), drop_last=st.booleans())
def test_every_sample_is_in_its_step_once(plan: Plan, count: int, drop_last: bool) -> None:
    by_rank = parts(plan, Rows(count), drop_last=drop_last)
    size = plan.global_batch_size
    steps = count // size if drop_last else -(-count // size)
    assert {len(own) for own in by_rank} == {steps}
    for step in range(steps):
        found = sorted(row for own in by_rank for row in own[step])
        assert found == list(range(step * size, min(count, (step + 1) * size)))


@settings(max_examples=50, deadline=None)
@given(first=plans(), second=plans(), count=st.integers(1, 60), data=st.data())
def test_a_position_does_not_depend_on_the_plan(first: Plan, second: Plan, count: int, data: st.DataObject) -> None:
    """Continued after k steps, under any other plan of the same global batch, a stream goes on with sample k G."""
    size = first.global_batch_size
    done = data.draw(st.integers(0, count // size))
    again = Plan(
        zero_stage=first.zero_stage,
        global_batch_size=size,
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=tuple(RankPlan(rank=i, micro_batch_sizes=(size if i == 0 else 0,)) for i in range(second.world_size)),
    )
    loader = loader_of(again, 0, Rows(count))
    loader.begin_at(done)
    found = [row for step in loader for batch in step.micro_batches if batch is not None for row in batch]
    assert found == list(range(done * size, count))


def test_an_iterator_loses_nothing_to_the_first_look() -> None:
    rows = iter(range(100))
    plan = Plan(
        zero_stage=0,
        global_batch_size=7,
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=(RankPlan(rank=0, micro_batch_sizes=(4, 3)),),
    )
    assert [row for step in parts(plan, rows)[0] for row in step] == list(range(100))


class Consumed:
    """Every iterator continues where the last one was."""

    def __init__(self, count: int) -> None:
        self.rows = iter(range(count))

    def __iter__(self) -> Iterator[int]:
        yield from self.rows


def test_a_stream_that_is_used_up_loses_nothing_to_the_first_look() -> None:
    plan = Plan(
        zero_stage=0,
        global_batch_size=5,
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=(RankPlan(rank=0, micro_batch_sizes=(5,)),),
    )
    assert [row for step in parts(plan, Consumed(100))[0] for row in step] == list(range(100))


def test_a_stream_shorter_than_its_position_begins_again() -> None:
    plan = Plan(
        zero_stage=0,
        global_batch_size=4,
        predicted_step_time_s=0.0,
        strategy="manual",
        ranks=(RankPlan(rank=0, micro_batch_sizes=(4,)),),
    )
    loader = loader_of(plan, 0, Rows(10))
    loader.begin_at(7)
    assert [row for step in loader for batch in step.micro_batches for row in batch] == list(range(4, 10))


def test_an_empty_stream_is_an_error() -> None:
    with pytest.raises(DataError, match="stream is empty"):
        StreamHead(Rows(0), SameEverywhere(0, 2))


def test_fingerprints_tell_rows_apart() -> None:
    import torch

    rows = [{"a": torch.tensor([1, 2]), "b": "x"}]
    assert fingerprint(rows) == fingerprint([{"a": torch.tensor([1, 2]), "b": "x"}])
    assert fingerprint(rows) != fingerprint([{"a": torch.tensor([1, 3]), "b": "x"}])
    assert fingerprint([[1], [2]]) != fingerprint([[1, 2]])
