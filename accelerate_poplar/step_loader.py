"""The loader of a planned run, whose items are one rank's micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .length_setup import index_cutter, stream_cutter
from .loader import HostOrder, PoplarDataLoader, build_loader
from .run import PoplarRun
from .streaming import StreamHead, StreamLoader


def step_loader(
    run: PoplarRun,
    dataset: Any,
    *,
    head: StreamHead | None,
    order: Callable[[], HostOrder],
    collate_fn: Callable[[list[Any]], Any],
    drop_last: bool,
    length_column: str,
    loader_kwargs: Mapping[str, Any],
) -> PoplarDataLoader | StreamLoader:
    """A training loader by the plan of a run, which cuts steps by predicted time where the run's settings say so.

    Args:
        run: The run, planned.
        dataset: Map-style, or a stream.
        head: The rows read off a stream to plan with; None: `dataset` is map-style.
        order: Called for a map-style dataset: the order of its rows.
        collate_fn: The run's collate function.
        drop_last: Whether rows that make no whole optimizer step are left out.
        length_column: Column of a map-style dataset that holds its rows' lengths, where it has one.
        loader_kwargs: Further arguments of the `DataLoader`.
    """
    if head is not None:
        stream = StreamLoader(
            dataset,
            head=head,
            plan=run.plan,
            ranks=run.ranks,
            collate_fn=collate_fn,
            drop_last=drop_last,
            loader_kwargs=loader_kwargs,
        )
        stream.plan_sampler.cutter = stream_cutter(run, rows=head.rows, collate=collate_fn)
        return stream
    loader = build_loader(
        dataset,
        plan=run.plan,
        rank=run.ranks.rank,
        order=order(),
        collate_fn=collate_fn,
        drop_last=drop_last,
        loader_kwargs=loader_kwargs,
    )
    loader.plan_sampler.cutter = index_cutter(run, dataset=dataset, collate=collate_fn, column=length_column)
    return loader
