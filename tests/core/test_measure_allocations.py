"""The allocation counter against torch's own bookkeeping, and the limit it enforces."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from accelerate_poplar.allocations import AllocationCounter


def test_live_and_peak_bytes_of_plain_tensors() -> None:
    counter = AllocationCounter()
    with counter:
        first = torch.zeros(256)
        second = first + 1
        del first
        third = second.view(16, 16)
    assert counter.live_bytes == 1024
    assert counter.peak_bytes == 2048
    del second, third
    gc.collect()
    assert counter.live_bytes == 0, "tensors freed outside are taken off"


def test_views_of_tensors_made_before_cost_nothing() -> None:
    before = torch.zeros(1000)
    counter = AllocationCounter()
    with counter:
        kept = [before.t(), before.view(10, 100), before.detach()]
        before.add_(1.0)
    assert counter.live_bytes == counter.peak_bytes == 0
    assert len(kept) == 3


def test_known_tensors_are_counted_once() -> None:
    weight = torch.zeros(256)
    counter = AllocationCounter()
    counter.know([weight, weight.view(16, 16)], count=True)
    assert counter.live_bytes == 1024


def test_goes_beyond_a_limit_with_the_error_of_a_device() -> None:
    counter = AllocationCounter(limit_bytes=4096, base_bytes=2048)
    with counter:
        kept = torch.zeros(256)
        with pytest.raises(torch.OutOfMemoryError, match="4096 bytes"):
            torch.zeros(512)
        again = torch.zeros(256)
    assert counter.live_bytes == 2048, "what failed is not counted, what fits still works"
    del kept, again


def test_other_devices_do_not_count() -> None:
    counter = AllocationCounter(device_type="cuda")
    with counter:
        kept = torch.zeros(1000)
    assert counter.live_bytes == 0
    del kept


def test_agrees_with_the_allocations_torch_reports() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    x = torch.randn(128, 64)
    model(x).pow(2).mean().backward()
    model.zero_grad(set_to_none=True)
    counter = AllocationCounter()
    with counter:
        model(x).pow(2).mean().backward()
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        model(x).pow(2).mean().backward()
    events = [e.extra_fields for e in _memory_events(trace.profiler.kineto_results.experimental_event_tree())]
    before = events[0].total_allocated - events[0].alloc_size
    peak = max(event.total_allocated for event in events) - before
    assert counter.peak_bytes == pytest.approx(peak, rel=0.01)


def _memory_events(nodes: list) -> list:
    found = []
    for node in nodes:
        if node.name == "[memory]":
            found.append(node)
        found += _memory_events(node.children)
    return sorted(found, key=lambda event: event.start_time_ns)
