"""What device a rank runs on: name, memory, peak speed."""

from __future__ import annotations

import platform
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

_PEAK_FLOPS: tuple[tuple[str, float, float], ...] = (
    ("H200", 989e12, 67e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100", 989e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("A800", 312e12, 19.5e12),
    ("L40S", 362e12, 91.6e12),
    ("L40", 181e12, 90.5e12),
    ("L4", 121e12, 30.3e12),
    ("A40", 149.7e12, 37.4e12),
    ("A10G", 70e12, 31.5e12),
    ("A10", 125e12, 31.2e12),
    ("V100", 125e12, 15.7e12),
    ("T4", 65e12, 8.1e12),
    ("RTX 4090", 165e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12),
)
"""Part of a device name, dense peak in 16-bit and in fp32 FLOP/s, from the makers' data sheets; first match wins."""


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What one rank says of its device."""

    host: str
    """Name of the machine."""
    device: str
    """Device name, or the processor's on a CPU rank."""
    memory_bytes: int
    """Total memory, in bytes; on a CPU rank all of the host's."""
    free_bytes: int
    """Memory not in use by anybody, in bytes."""
    device_id: str
    """Identifies the device among all of all hosts; empty on CPU ranks, which may share."""


def device_facts(device: torch.device) -> DeviceFacts:
    """Ask the device; see `DeviceFacts`."""
    host = socket.gethostname()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        properties = torch.cuda.get_device_properties(device)
        identity = str(getattr(properties, "uuid", device.index))
        return DeviceFacts(
            host=host, device=properties.name, memory_bytes=total, free_bytes=free, device_id=f"{host}/{identity}"
        )
    memory = psutil.virtual_memory()
    total = min(memory.total, _container_limit() or memory.total)
    return DeviceFacts(
        host=host,
        device=_processor_name(),
        memory_bytes=total,
        free_bytes=min(total, memory.available),
        device_id="",
    )


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_flops(device_name: str, dtype: torch.dtype) -> float:
    """Dense peak in FLOP/s from a table of data-sheet figures; 0 when the device is not in it."""
    for part, half, single in _PEAK_FLOPS:
        if part in device_name:
            return single if dtype is torch.float32 else half
    return 0.0


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _container_limit() -> int | None:
    """Memory limit of the control group, in bytes; the host's total does not know it."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None
