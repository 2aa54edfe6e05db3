"""What device a rank runs on: name, memory, peak speed.

A CUDA device is looked up in NVML by its UUID or PCI bus id, never by its number: NVML counts devices in another
order than CUDA and does not know CUDA_VISIBLE_DEVICES. Where NVML is missing, forbids it, or speaks of a whole card
where CUDA sees a MIG slice of it, CUDA's own figures are used.
"""

from __future__ import annotations

import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
_SAME_MEMORY = 0.1
"""NVML and CUDA may differ by this share in what they call total; more means they speak of different things."""


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
    device_id: str = ""
    """Identifies the device among those of all hosts; empty on CPU ranks, which may share."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None on a CPU rank."""
    source: str = "host"
    """Where the memory figures come from: `nvml`, `cuda` or `host`."""


class Cuda(Protocol):
    """The seam to CUDA's own view of its devices, numbered as the process sees them."""

    def name(self, index: int) -> str:
        """Device name."""

    def memory(self, index: int) -> tuple[int, int]:
        """Free and total bytes."""

    def capability(self, index: int) -> tuple[int, int]:
        """Compute capability."""

    def uuid(self, index: int) -> str | None:
        """UUID without a prefix, that of the slice under MIG; None where unknown."""

    def pci_bus_id(self, index: int) -> str | None:
        """As `00000000:3B:00.0`; None where unknown."""


class TorchCuda:
    """`Cuda` through torch."""

    def name(self, index: int) -> str:
        """Device name."""
        return torch.cuda.get_device_name(index)

    def memory(self, index: int) -> tuple[int, int]:
        """Free and total bytes."""
        return torch.cuda.mem_get_info(index)

    def capability(self, index: int) -> tuple[int, int]:
        """Compute capability."""
        return torch.cuda.get_device_capability(index)

    def uuid(self, index: int) -> str | None:
        """UUID without a prefix."""
        found = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        return None if found is None else str(found)

    def pci_bus_id(self, index: int) -> str | None:
        """As `00000000:3B:00.0`."""
        properties = torch.cuda.get_device_properties(index)
        bus = getattr(properties, "pci_bus_id", None)
        if bus is None:
            return None
        domain, device = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def device_facts(device: torch.device, *, cuda: Cuda | None = None, nvml: Any = None) -> DeviceFacts:
    """Ask the device; see `DeviceFacts`.

    Args:
        device: The rank's device.
        cuda: CUDA's view; None = torch's.
        nvml: The `pynvml` module or something with its functions; None = pynvml where it is installed.
    """
    if device.type != "cuda":
        return _host_facts()
    cuda = cuda or TorchCuda()
    index = device.index if device.index is not None else torch.cuda.current_device()
    free, total = cuda.memory(index)
    name, source = cuda.name(index), "cuda"
    uuid, pci_bus_id = cuda.uuid(index), cuda.pci_bus_id(index)
    known = _ask_nvml(nvml or _pynvml(), uuid, pci_bus_id)
    if known is not None and abs(known[2] - total) <= _SAME_MEMORY * total:
        name, free, total, source = known[0], min(free, known[1]), total, "nvml"
    host = socket.gethostname()
    return DeviceFacts(
        host=host,
        device=name,
        memory_bytes=total,
        free_bytes=free,
        device_id=uuid or f"{host}/{pci_bus_id or index}",
        capability=cuda.capability(index),
        source=source,
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


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _ask_nvml(nvml: Any, uuid: str | None, pci_bus_id: str | None) -> tuple[str, int, int] | None:
    """Name, free and total bytes; None where NVML does not know the device or may not be asked."""
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    look_ups = [(nvml.nvmlDeviceGetHandleByUUID, prefix + uuid) for prefix in ("GPU-", "MIG-") if uuid]
    if pci_bus_id:
        look_ups.append((nvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id))
    for look_up, key in look_ups:
        try:
            handle = look_up(key)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name = nvml.nvmlDeviceGetName(handle)
        except nvml.NVMLError:
            continue
        return (name.decode() if isinstance(name, bytes) else str(name)), int(memory.free), int(memory.total)
    return None


def _host_facts() -> DeviceFacts:
    memory = psutil.virtual_memory()
    total = min(memory.total, _container_limit() or memory.total)
    return DeviceFacts(
        host=socket.gethostname(),
        device=_processor_name(),
        memory_bytes=total,
        free_bytes=min(total, memory.available),
    )


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
