"""What ranks say to each other: gather profiles, share the plan, compare digests, fail together.

Objects travel over a gloo group on the host, so that nothing here allocates device memory and an NCCL
communicator is never the first thing to be created. Every wait has a time limit.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from .errors import PoplarError, RankError

T = TypeVar("T")


class Ranks(Protocol):
    """The seam to the other ranks; `SingleRank` and the tests' fakes satisfy it too."""

    rank: int
    world_size: int

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""

    def broadcast(self, value: T | None, source: int = 0) -> T:
        """The value of rank `source`, on every rank."""

    def meet(self, meanwhile: Callable[[], bool]) -> None:
        """Wait for all ranks to be here; until they are, call `meanwhile` again and again, as long as it returns True."""


class SingleRank:
    """One process alone."""

    rank = 0
    world_size = 1

    def gather(self, value: T) -> list[T]:
        """A list with the one value."""
        return [value]

    def broadcast(self, value: T | None, source: int = 0) -> T:
        """The value itself."""
        return value  # type: ignore[return-value]

    def meet(self, meanwhile: Callable[[], bool]) -> None:
        """Nobody to wait for."""


class ProcessRanks:
    """All processes of the default torch.distributed group.

    Args:
        timeout_s: Longest wait for the other ranks, in seconds.

    Raises:
        RankError: From `gather`, `broadcast` and `meet`, when a rank is gone or does not answer in time.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        values: list[Any] = [None] * self.world_size
        self._guard(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def broadcast(self, value: T | None, source: int = 0) -> T:
        """The value of rank `source`, on every rank."""
        box: list[Any] = [value if self.rank == source else None]
        self._guard(lambda: dist.broadcast_object_list(box, src=source, group=self._group))
        return box[0]  # type: ignore[no-any-return]

    def meet(self, meanwhile: Callable[[], bool]) -> None:
        """Wait for all ranks to be here, and call `meanwhile` until then, as long as it returns True."""

        def wait() -> None:
            arrival = dist.barrier(group=self._group, async_op=True)
            while not arrival.is_completed() and meanwhile():
                pass
            arrival.wait()

        self._guard(wait)

    def _guard(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as problem:
            raise RankError(
                f"rank {self.rank} of {self.world_size}: another rank is gone or did not answer within "
                f"{self.timeout_s:.0f} s ({problem}). Look at the other ranks' output for the first error; raise "
                "timeout_s in the Poplar settings if a rank is only slow to start."
            ) from problem


def connect(timeout_s: float = 600.0) -> Ranks:
    """The other ranks if torch.distributed runs, else `SingleRank`."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return ProcessRanks(timeout_s)
    return SingleRank()


def together(ranks: Ranks, work: Callable[[], T], meanwhile: Callable[[T], bool] | None = None) -> T:
    """Run local work on every rank; if it fails anywhere, fail everywhere with the same message.

    `work` must not communicate: a rank that failed half-way would leave its peers waiting.

    Args:
        ranks: The other ranks.
        work: Called once on this rank.
        meanwhile: Called with what `work` returned, again and again until the other ranks are done too, as long as it
            returns True; None = wait idly. It must not communicate either.

    Returns:
        What `work` returned on this rank.

    Raises:
        PoplarError: `work` failed on this rank: its own error. On the other ranks: `RankError` that names the
            ranks that failed and why.
    """
    result: T | None = None
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - any failure must reach the other ranks before it is raised
        problem = error
    if meanwhile is not None:

        def go_on() -> bool:
            nonlocal problem
            try:
                return problem is None and meanwhile(result)  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - as above
                problem = error
            return False

        ranks.meet(go_on)
    reports = ranks.gather(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    fail_together(ranks, reports)
    return result  # type: ignore[return-value]


def decide(ranks: Ranks, work: Callable[[], T]) -> T:
    """Let rank 0 alone decide something, and give every rank the answer.

    Args:
        ranks: The other ranks.
        work: Called on rank 0 only; must not communicate.

    Returns:
        What `work` returned on rank 0.

    Raises:
        PoplarError: `work` failed; the same error on every rank. Any other error of rank 0 is a `RankError` elsewhere.
    """
    answer: tuple[str, Any] = ("value", None)
    problem: Exception | None = None
    if ranks.rank == 0:
        try:
            answer = ("value", work())
        except PoplarError as error:
            answer = ("error", error)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer and must get one
            problem = error
            answer = ("error", RankError(f"rank 0 failed: {type(error).__name__}: {error}"))
    kind, content = ranks.broadcast(answer)
    if problem is not None:
        raise problem
    if kind == "error":
        raise content
    return content  # type: ignore[no-any-return]


def fail_together(ranks: Ranks, reports: Sequence[str | None]) -> None:
    """Raise when any rank reported a problem.

    Args:
        ranks: The other ranks.
        reports: One entry per rank, None where all is well.

    Raises:
        RankError: Names each rank that reported, and what.
    """
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if not failed:
        return
    if len(failed) == ranks.world_size and len(set(failed.values())) == 1:
        raise RankError(f"all {ranks.world_size} ranks failed alike: {next(iter(failed.values()))}")
    raise RankError("; ".join(f"rank {rank} failed: {report}" for rank, report in failed.items()))


def agree(ranks: Ranks, value: T, what: str) -> T:
    """Check that every rank holds the same value.

    Args:
        ranks: The other ranks.
        value: This rank's value; compared with `==`.
        what: Name of the value, for the message.

    Returns:
        The value.

    Raises:
        RankError: Lists every rank's value.
    """
    values = ranks.gather(value)
    if any(other != values[0] for other in values):
        listing = ", ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(values))
        raise RankError(
            f"the ranks do not agree on {what}: {listing}. All ranks must run the same script and settings."
        )
    return value
