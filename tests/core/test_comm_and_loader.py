"""What ranks say to each other, and the loader, with fakes for the other ranks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accelerate_poplar import ConfigError, DataError, RankError
from accelerate_poplar.comm import SingleRank, agree, decide, fail_together, together
from accelerate_poplar.loader import HostOrder, StepBatch, build_loader
from accelerate_poplar.probe_data import ProbeData, row_length, sequence_length

from .ranks_in_threads import ThreadRanks, run_ranks
from .test_sampler import make_plan


class Others:
    """Rank 0 of three; the others answer what they are told to."""

    rank = 0
    world_size = 3

    def __init__(self, *answers: Any) -> None:
        self.answers = answers

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.answers]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return value


def test_a_failure_elsewhere_is_named() -> None:
    with pytest.raises(RankError, match="rank 2 failed: MemoryError: gone"):
        together(Others(None, "MemoryError: gone"), lambda: 1)
    with pytest.raises(RankError, match="all 3 ranks failed alike: no"):
        fail_together(Others(), ["no"] * 3)
    assert together(Others(None, None), lambda: 7) == 7


def test_an_own_failure_keeps_its_type() -> None:
    def fail() -> None:
        raise ConfigError("mine")

    with pytest.raises(ConfigError, match="mine"):
        together(Others(None, None), fail)
    with pytest.raises(ConfigError, match="mine"):
        decide(Others(), fail)
    assert decide(SingleRank(), lambda: 3) == 3


def test_a_rank_that_is_done_goes_on_until_all_are() -> None:
    calls = threading.Semaphore(0)

    def work(ranks: ThreadRanks) -> int:
        # Rank 1 is done once rank 0 has gone on twice.
        return 7 if ranks.rank == 0 else int(calls.acquire(timeout=30)) + int(calls.acquire(timeout=30))

    def again(found: int) -> bool:
        calls.release()
        return found == 7

    assert run_ranks(2, lambda ranks: together(ranks, lambda: work(ranks), again)) == [7, 2]


def test_what_fails_meanwhile_fails_everywhere() -> None:
    failed = threading.Event()

    def again(found: bool) -> bool:
        failed.set()
        raise ConfigError("mine")

    def work(ranks: ThreadRanks) -> bool:
        return ranks.rank == 0 or failed.wait(30)

    mine, theirs = run_ranks(2, lambda ranks: together(ranks, lambda: work(ranks), again), errors=True)
    assert isinstance(mine, ConfigError)
    assert isinstance(theirs, RankError)


def test_a_disagreement_lists_every_rank() -> None:
    with pytest.raises(RankError, match="do not agree on the plan: rank 0: 'a', rank 1: 'a', rank 2: 'b'"):
        agree(Others("a", "b"), "a", "the plan")
    assert agree(Others("a", "a"), "a", "the plan") == "a"


def test_the_hosts_random_order() -> None:
    torch.manual_seed(42)
    order = HostOrder(RandomSampler(range(20)), ranks=SingleRank())
    first, second = order(0).tolist(), order(1).tolist()
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert order(0).tolist() == first
    generator = torch.Generator().manual_seed(42 + 1)
    assert second == torch.randperm(20, generator=generator).tolist()
    assert HostOrder(RandomSampler(range(20)), ranks=SingleRank(), data_seed=9)(0).tolist() != first


def test_other_orders() -> None:
    assert HostOrder(SequentialSampler(range(4)), ranks=SingleRank())(3).tolist() == [0, 1, 2, 3]
    assert HostOrder([3, 1, 2], ranks=SingleRank())(0).tolist() == [3, 1, 2]  # type: ignore[arg-type]
    with pytest.raises(DataError, match="batch sampler"):
        HostOrder(BatchSampler(SequentialSampler(range(4)), 2, False), ranks=SingleRank())


class Rows(torch.utils.data.Dataset):
    """Fetches many at once, as `datasets` does."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index * 1 for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [list(range(10)), Rows()], ids=["list", "getitems"])
@pytest.mark.scenario(20)
def test_the_loader_gives_each_rank_its_part(workers: int, dataset: Any) -> None:
    plan = make_plan(2, [[3, 1], [1, 0]])
    seen: list[list[StepBatch]] = []
    for rank in range(2):
        order = HostOrder(SequentialSampler(dataset), ranks=SingleRank())
        loader = build_loader(
            dataset, plan=plan, rank=rank, order=order, collate_fn=list, loader_kwargs={"num_workers": workers}
        )
        assert len(loader) == 2
        seen.append(list(loader))
    assert [batch.micro_batches for batch in seen[0]] == [[[0, 1, 2], [3]], [[5, 6, 7], [8]]]
    assert [batch.micro_batches for batch in seen[1]] == [[[4], None], [[9], None]]
    assert [batch.sizes for batch in seen[1]] == [(1, 0), (1, 0)]


def test_pinning_passes_over_empty_micro_steps() -> None:
    batch = StepBatch(0, 1, (1, 0), [{"x": "text"}, None])
    assert batch.pin_memory().micro_batches == [{"x": "text"}, None]


def test_probe_data_leaves_no_trace() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()

    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": list(range(index + 1)), "noise": torch.rand(()).item() + np.random.rand()}

    data = ProbeData(Noisy(), lambda rows: {"n": torch.tensor([len(row["input_ids"]) for row in rows])})
    state = np.random.get_state()[1].copy()
    assert data.rows(6)["n"].tolist() == [1, 2, 3, 4, 1, 2]
    assert data.longest(3)["n"].tolist() == [4, 4, 4]
    assert data.ghost(lambda batch: int(batch["n"].sum() > 2))["n"].tolist() == [3]
    assert torch.equal(before, torch.get_rng_state())
    assert (np.random.get_state()[1] == state).all()
    with pytest.raises(DataError, match="empty"):
        ProbeData([], list)


def test_the_shortest_row_is_found_where_the_collate_function_leaves_it_short() -> None:
    rows = [{"input_ids": list(range(length))} for length in (3, 0, 2, 5, 4)]

    def padded(rows: list[dict[str, Any]], length: int = 0) -> dict[str, torch.Tensor]:
        longest = max(length, *(len(row["input_ids"]) for row in rows), 1)
        assert any(row["input_ids"] for row in rows), "an empty row alone is nothing to run"
        return {
            "input_ids": torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
        }

    assert ProbeData(rows, padded).shortest()["input_ids"].tolist() == [[0, 1]]
    assert ProbeData(rows, padded).longest(2)["input_ids"].shape == (2, 5)
    assert ProbeData(rows, lambda found: padded(found, 8)).shortest() is None
    assert ProbeData(rows[:2], padded).shortest() is None
    assert ProbeData(rows[1:], padded).shortest()["input_ids"].tolist() == [[0, 1]]
    assert ProbeData([torch.zeros(3), torch.zeros(2)], list).shortest() is None


def test_lengths() -> None:
    assert row_length({"a": [1, 2, 3], "b": "a long text", "c": torch.zeros(5)}) == 5
    assert row_length(3) == 0
    assert sequence_length({"input_ids": torch.zeros(2, 7)}) == 7
    assert sequence_length(torch.zeros(2, 7)) == 0
