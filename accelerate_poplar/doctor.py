"""What this machine has for training on unequal devices, and what would go wrong, in plain words."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ._compat import known_faults
from .config import EmulationConfig, default_cache_dir, resolve_config
from .device import DeviceFacts, device_facts
from .errors import PoplarError
from .preflight import installed_versions, shared_devices
from .units import GIB

SMALLEST_SHARED_MEMORY = GIB
GOOD, ADVICE, FAULT = "ok", "advice", "fault"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at."""

    kind: str
    """`ok`, `advice` (works, but) or `fault` (training would fail)."""
    text: str
    """What was found and, where it is not well, what to do."""


def examine(
    *,
    versions: dict[str, str] | None = None,
    devices: Sequence[DeviceFacts] | None = None,
    which: Callable[[str], str | None] = shutil.which,
    shared_memory_bytes: int | None = None,
    cache: Path | None = None,
) -> list[Finding]:
    """Look at versions, devices, the compiler, shared memory, the cache and the settings.

    Every argument stands in for what would be found on this machine.
    """
    versions = installed_versions() if versions is None else versions
    devices = visible_devices() if devices is None else devices
    return [
        *_versions(versions),
        *_devices(devices),
        *_compiler(which),
        *_shared_memory(_shm_bytes() if shared_memory_bytes is None else shared_memory_bytes),
        *_cache(default_cache_dir() if cache is None else cache),
        *_settings(),
    ]


def visible_devices() -> list[DeviceFacts]:
    """Facts of every visible GPU, or of the processor where there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    return [device_facts(device) for device in names]


def _versions(versions: dict[str, str]) -> list[Finding]:
    listing = ", ".join(f"{name} {number}" for name, number in versions.items())
    faults = [Finding(kind=FAULT, text=text) for text in known_faults(versions.get("deepspeed", "0"))]
    return [Finding(kind=GOOD, text=f"versions: {listing}"), *faults]


def _devices(devices: Sequence[DeviceFacts]) -> list[Finding]:
    found = [
        Finding(
            kind=GOOD,
            text=f"device {index}: {fact.device}, {fact.memory_bytes / GIB:.1f} GiB, {fact.free_bytes / GIB:.1f} GiB "
            f"free (from {fact.source})",
        )
        for index, fact in enumerate(devices)
    ]
    found += [Finding(kind=FAULT, text=text) for text in shared_devices(devices)]
    if all(fact.capability is None for fact in devices):
        found.append(
            Finding(kind=ADVICE, text="no GPU is visible: training runs on the processor, over gloo; fine for trials.")
        )
    lacking = [fact.device for fact in devices if fact.capability is not None and fact.capability < (8, 0)]
    if lacking and len(lacking) < len(devices):
        found.append(
            Finding(
                kind=ADVICE,
                text=f"{', '.join(lacking)} cannot compute in bf16 and the others can: use fp16 for all, or set "
                "allow_fp16: true in the Poplar settings.",
            )
        )
    busy = [fact for fact in devices if fact.capability is not None and fact.free_bytes < 0.8 * fact.memory_bytes]
    found += [
        Finding(
            kind=ADVICE,
            text=f"{fact.device}: other programs hold {(fact.memory_bytes - fact.free_bytes) / GIB:.1f} GiB; a profile "
            "taken now plans for what is left.",
        )
        for fact in busy
    ]
    return found


def _compiler(which: Callable[[str], str | None]) -> list[Finding]:
    missing = [name for name, found in (("c++", which("c++") or which("g++")), ("ninja", which("ninja"))) if not found]
    if not missing:
        return [Finding(kind=GOOD, text="a C++ compiler and ninja are there, for DeepSpeed's own operators.")]
    return [
        Finding(
            kind=ADVICE,
            text=f"{' and '.join(missing)} not found: DeepSpeed builds operators at first use (on a CPU always, for "
            "optimizer offload on a GPU). Install a C++ compiler, and ninja with pip.",
        )
    ]


def _shared_memory(size: int) -> list[Finding]:
    if size >= SMALLEST_SHARED_MEMORY or size < 0:
        return []
    return [
        Finding(
            kind=ADVICE,
            text=f"/dev/shm has {size / GIB:.2f} GiB: loader processes and NCCL pass tensors through it. In a container, "
            "start it with --shm-size=8g or --ipc=host.",
        )
    ]


def _cache(folder: Path) -> list[Finding]:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(existing, os.W_OK):
        return [Finding(kind=GOOD, text="profiles can be kept in the cache folder.")]
    return [
        Finding(
            kind=ADVICE,
            text=f"{folder} cannot be written to: every start profiles again. Set cache_dir in the Poplar settings.",
        )
    ]


def _settings() -> list[Finding]:
    try:
        config, emulation = resolve_config(), EmulationConfig.from_environment()
    except PoplarError as error:
        return [Finding(kind=FAULT, text=f"settings: {error}")]
    found = [Finding(kind=GOOD, text=f"settings: {config.to_dict() or 'the defaults'}")]
    if emulation.active:
        found.append(Finding(kind=ADVICE, text="ranks are emulated (POPLAR_EMULATE_*): figures are not real ones."))
    return found


def _shm_bytes() -> int:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return -1
    return stat.f_bsize * stat.f_blocks
