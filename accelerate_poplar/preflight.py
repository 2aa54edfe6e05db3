"""What is checked before anything expensive starts: versions, devices, a small all-reduce, the dtype."""

from __future__ import annotations

import importlib.metadata
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .comm import Ranks
from .device import DeviceFacts, device_facts, synchronize
from .errors import CompatibilityError, ConfigError, RankError, raise_together

CHECKED_PACKAGES = ("torch", "deepspeed", "accelerate", "transformers", "accelerate-poplar")
_BF16_CAPABILITY = (8, 0)
_ALL_REDUCE_ELEMENTS = 1024


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What the ranks found out about each other."""

    facts: tuple[DeviceFacts, ...]
    """Every rank's device, in rank order."""
    all_reduce_s: float
    """Seconds of a small all-reduce, connections set up already; 0 with one rank."""


def preflight(
    ranks: Ranks,
    *,
    device: torch.device,
    timeout_s: float,
    facts: DeviceFacts | None = None,
    versions: Mapping[str, str] | None = None,
    all_reduce: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PreflightReport:
    """Check that the ranks can work together; every rank must call it at the same point.

    Args:
        ranks: The other ranks.
        device: This rank's device.
        timeout_s: Longest wait for the all-reduce, in seconds.
        facts: This rank's device facts; None = asked.
        versions: Package -> version on this rank; None = what is installed.
        all_reduce: The all-reduce to time; None = a small one on the default process group.
        clock: Seconds of real time.

    Returns:
        Every rank's device and the time of the all-reduce.

    Raises:
        CompatibilityError: The ranks run different versions; names them.
        ConfigError: Two ranks share one device.
        RankError: The all-reduce does not finish or fails; names hosts, devices and the variables to try.
    """
    mine = facts or device_facts(device)
    everyone = ranks.gather((mine, dict(versions if versions is not None else installed_versions())))
    all_facts = tuple(entry[0] for entry in everyone)
    raise_together(different_versions([entry[1] for entry in everyone]), CompatibilityError)
    raise_together(shared_devices(all_facts), ConfigError)
    if ranks.world_size == 1 or (all_reduce is None and not dist.is_initialized()):
        return PreflightReport(facts=all_facts, all_reduce_s=0.0)
    call = all_reduce or _small_all_reduce(device)
    seconds = [_within(call, timeout_s, ranks, all_facts, clock) for _ in range(2)]
    return PreflightReport(facts=all_facts, all_reduce_s=seconds[-1])


def installed_versions() -> dict[str, str]:
    """Versions of the packages that must be equal on all ranks; `missing` where one is not installed."""
    found = {}
    for name in CHECKED_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def different_versions(versions: Sequence[Mapping[str, str]]) -> list[str]:
    """One sentence per package that is not the same everywhere."""
    problems = []
    for name in sorted({package for entry in versions for package in entry}):
        by_rank = [entry.get(name, "missing") for entry in versions]
        if len(set(by_rank)) > 1:
            listing = ", ".join(f"rank {rank} has {version}" for rank, version in enumerate(by_rank))
            problems.append(f"the ranks run different versions of {name}: {listing}. Install the same one everywhere.")
    return problems


def shared_devices(facts: Sequence[DeviceFacts]) -> list[str]:
    """One sentence per device that more than one rank uses."""
    users: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        if fact.device_id:
            users.setdefault(fact.device_id, []).append(rank)
    return [
        f"ranks {', '.join(map(str, ranks))} are all on one device ({facts[ranks[0]].device}, {device_id}, host "
        f"{facts[ranks[0]].host}): NCCL refuses that, and each would be profiled with the other's load. Start one "
        "process per device (--num_processes), or make more devices visible (CUDA_VISIBLE_DEVICES)."
        for device_id, ranks in users.items()
        if len(ranks) > 1
    ]


def agree_on_dtype(facts: Sequence[DeviceFacts], wanted: torch.dtype, *, allow_fp16: bool) -> torch.dtype:
    """The dtype all ranks compute in; the same answer on every rank as it depends on all devices alone.

    Args:
        facts: Every rank's device, in rank order.
        wanted: What the user asked for.
        allow_fp16: Fall back to fp16 where a device has no bf16.

    Raises:
        CompatibilityError: bf16 is wanted, a device lacks it, and fp16 is not allowed; names the ranks.
    """
    if wanted is not torch.bfloat16:
        return wanted
    lacking = [
        f"rank {rank} ({fact.device}, compute capability {fact.capability[0]}.{fact.capability[1]})"
        for rank, fact in enumerate(facts)
        if fact.capability is not None and fact.capability < _BF16_CAPABILITY
    ]
    if not lacking:
        return wanted
    if allow_fp16:
        return torch.float16
    raise CompatibilityError(
        f"bf16 was asked for, but {', '.join(lacking)} cannot compute in it (capability 8.0 or newer is needed), and "
        "all ranks must use the same dtype. Ask for fp16 (fp16: true), allow the fall-back (allow_fp16: true in the "
        "Poplar settings), or leave these ranks out."
    )


def _small_all_reduce(device: torch.device) -> Callable[[], None]:
    def call() -> None:
        dist.all_reduce(torch.ones(_ALL_REDUCE_ELEMENTS, device=device))
        synchronize(device)

    return call


def _within(
    call: Callable[[], None],
    timeout_s: float,
    ranks: Ranks,
    facts: Sequence[DeviceFacts],
    clock: Callable[[], float],
) -> float:
    """Seconds of `call`, run in a thread of its own because a hanging communicator cannot be interrupted."""
    problems: list[RuntimeError] = []

    def run() -> None:
        try:
            call()
        except RuntimeError as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, daemon=True, name="poplar-preflight")
    start = clock()
    thread.start()
    thread.join(timeout_s)
    if not thread.is_alive() and not problems:
        return clock() - start
    what = f"failed ({problems[0]})" if problems else f"did not finish within {timeout_s:.0f} s"
    members = "; ".join(f"rank {rank}: host {fact.host}, {fact.device}" for rank, fact in enumerate(facts))
    raise RankError(
        f"rank {ranks.rank} of {ranks.world_size}: a small all-reduce {what}. Taking part: {members}. "
        "Usual causes: a firewall, the wrong network interface, or cards without a direct path to each other. Try "
        "NCCL_DEBUG=INFO to see where it waits, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME=<interface>, "
        "NCCL_IB_DISABLE=1, NCCL_P2P_DISABLE=1."
    )
