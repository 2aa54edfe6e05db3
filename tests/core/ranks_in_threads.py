"""Several ranks in one process: threads that meet in `gather` and `broadcast`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_PATIENCE_S = 60.0


class _Meeting:
    def __init__(self, world_size: int) -> None:
        self.values: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size)
        self.arrived: set[int] = set()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait(_PATIENCE_S)
        result = list(self.values)
        self.barrier.wait(_PATIENCE_S)
        return result


class ThreadRanks:
    """One of several ranks; satisfies `comm.Ranks`."""

    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        self.rank, self.world_size, self._meeting = rank, world_size, meeting

    def gather(self, value: T) -> list[T]:
        """Every rank's value."""
        return self._meeting.exchange(self.rank, value)

    def broadcast(self, value: T | None, source: int = 0) -> T:
        """The value of rank `source`."""
        return self._meeting.exchange(self.rank, value)[source]

    def meet(self, meanwhile: Callable[[], bool]) -> None:
        """Wait for every rank, calling `meanwhile`."""
        arrived = self._meeting.arrived
        arrived.add(self.rank)
        while len(arrived) < self.world_size and meanwhile():
            pass
        self._meeting.barrier.wait(_PATIENCE_S)
        arrived.discard(self.rank)
        self._meeting.barrier.wait(_PATIENCE_S)


def run_ranks(world_size: int, work: Callable[[ThreadRanks], T], *, errors: bool = False) -> list[Any]:
    """Run `work` on every rank at once.

    Args:
        world_size: Number of ranks.
        work: Called with this rank's view.
        errors: True: every rank is expected to fail, and its exception is the result.

    Returns:
        Results in rank order.
    """
    meeting = _Meeting(world_size)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, world_size, meeting))
        except Exception as problem:  # noqa: BLE001 - handed to the test
            results[rank] = problem
            if not errors:
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
    if not errors:
        for result in results:
            if isinstance(result, Exception):
                raise result
    return results
