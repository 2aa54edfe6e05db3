"""Clusters that need not exist: hosts, devices and links from a YAML file.

name: two cards
hosts:
  - {name: a, device: A100-80GB, count: 4, link_gbytes_per_s: 20}
  - {name: b, device: V100S-PCIe-32GB, count: 4, link_gbytes_per_s: 10}
inter_host_gbytes_per_s: 5
overlap: 0.5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from .devices import Device, find_device
from .errors import ConfigError, raise_together


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine with devices of one kind."""

    name: str
    """Label."""
    device: Device
    """Kind of its devices."""
    count: int
    """Devices, each one rank; at least 1."""
    link_gbytes_per_s: float
    """Bandwidth between its devices as a ring collective sees it, 10^9 bytes/s; greater than 0."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts and what connects them. Everything computed from it is simulated."""

    name: str
    """Label."""
    hosts: tuple[Host, ...]
    """At least one host."""
    inter_host_gbytes_per_s: float
    """Bandwidth between hosts as a ring collective sees it, 10^9 bytes/s; greater than 0."""
    latency_us: float
    """Microseconds a ring collective loses per hop; at least 0 (20 unless the file says otherwise)."""
    overlap: float
    """Seconds of per-micro-step communication hidden by one second of compute, 0 to 1 (0.5 unless stated)."""
    memory_fraction: float
    """Share of each device's memory that may be used, above 0 to 1 (0.9 unless stated)."""
    reserved_gib: float
    """GiB of it taken by the CUDA context and communication buffers; at least 0 (2 unless stated)."""
    placement: tuple[int, ...] = field(default=())
    """Host index of every rank; filled from the hosts' counts when empty."""

    def __post_init__(self) -> None:
        if not self.placement:
            ranks = [index for index, host in enumerate(self.hosts) for _ in range(host.count)]
            object.__setattr__(self, "placement", tuple(ranks))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.placement)

    def host_of(self, rank: int) -> Host:
        """The host of a rank."""
        return self.hosts[self.placement[rank]]

    def ring_time_s(self, payload_bytes: float, *, pieces: int = 1) -> float:
        """Seconds of one ring reduce-scatter or all-gather of `payload_bytes` in total over all ranks.

        (W - 1)/W of the payload over the slowest link in the ring, and W - 1 hops per piece (Thakur et al. 2005).
        An all-reduce is two of these.

        Args:
            payload_bytes: Bytes before scattering or after gathering.
            pieces: Messages the payload is cut into, each paying the latency.
        """
        used = sorted(set(self.placement))
        links = [self.hosts[i].link_gbytes_per_s for i in used if self.placement.count(i) > 1]
        if len(used) > 1:
            links.append(self.inter_host_gbytes_per_s)
        if not links:
            return 0.0
        hops = self.world_size - 1
        return payload_bytes * hops / self.world_size / (min(links) * 1e9) + pieces * hops * self.latency_us * 1e-6


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises:
        ConfigError: The file is missing, not YAML, or has a wrong or unknown entry; names all of them.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        raise ConfigError(f"{path}: cannot be read as YAML: {problem}") from None
    return cluster_from_dict(data, source=str(path))


def cluster_from_dict(data: Any, *, source: str = "cluster") -> Cluster:
    """Build a cluster from the content of a cluster file.

    Raises:
        ConfigError: Names the source and everything that is wrong.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: a cluster file holds a mapping with `hosts`, not {type(data).__name__}.")
    reader = _Reader(source)
    known = {"name", "description", "hosts", "devices", *_OPTIONAL, "inter_host_gbytes_per_s"}
    reader.refuse_unknown(data, known, "")
    devices = _read_devices(reader, data.get("devices", {}))
    hosts = _read_hosts(reader, data.get("hosts"), devices)
    inter = float("inf")
    if len(hosts) > 1 or "inter_host_gbytes_per_s" in data:
        inter = reader.number(data, "inter_host_gbytes_per_s", "", above=0.0)
    optional = {
        key: reader.number(data, key, "", above=above, at_least=low, at_most=high) if key in data else default
        for key, (default, above, low, high) in _OPTIONAL.items()
    }
    raise_together(reader.problems, ConfigError)
    return Cluster(
        name=str(data.get("name", Path(source).stem)),
        hosts=hosts,
        inter_host_gbytes_per_s=inter,
        latency_us=optional["latency_us"],
        overlap=optional["overlap"],
        memory_fraction=optional["memory_fraction"],
        reserved_gib=optional["reserved_gib"],
    )


_OPTIONAL: dict[str, tuple[float, float | None, float | None, float | None]] = {
    "latency_us": (20.0, None, 0.0, None),
    "overlap": (0.5, None, 0.0, 1.0),
    "memory_fraction": (0.9, 0.0, None, 1.0),
    "reserved_gib": (2.0, None, 0.0, None),
}
"""Optional keys with their default and bounds: above, at least, at most."""


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[str] = []

    def complain(self, where: str, text: str) -> None:
        self.problems.append(f"{self.source}: {where}{text}")

    def refuse_unknown(self, data: Mapping[Any, Any], known: set[str], where: str) -> None:
        for key in data:
            if key not in known:
                self.complain(where, f"the key `{key}` is unknown. Known: {', '.join(sorted(known))}.")

    def number(
        self,
        data: Mapping[str, Any],
        key: str,
        where: str,
        *,
        above: float | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> float:
        value = data.get(key)
        rule = ", ".join(
            f"{words} {bound:g}"
            for words, bound in (("above", above), ("at least", at_least), ("at most", at_most))
            if bound is not None
        )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not _within(float(value or 0.0), above, at_least, at_most):
            self.complain(where, f"`{key}` is {value!r}; it must be a number {rule}.")
            return 1.0
        return float(value or 0.0)


def _within(value: float, above: float | None, at_least: float | None, at_most: float | None) -> bool:
    return (
        value == value
        and (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (at_most is None or value <= at_most)
    )


def _read_devices(reader: _Reader, raw: Any) -> dict[str, Device]:
    if not isinstance(raw, Mapping):
        reader.complain("", "`devices` maps names to figures.")
        return {}
    devices: dict[str, Device] = {}
    optional = {f.name for f in fields(Device) if f.default is not MISSING}
    required = ("peak_tflops", "memory_gib", "bandwidth_gbytes_per_s")
    for name, item in raw.items():
        where = f"devices[{name!r}]: "
        if not isinstance(item, Mapping):
            reader.complain(where, "must be a mapping.")
            continue
        reader.refuse_unknown(item, {*required, *optional, "source"} - {"fit_error"}, where)
        figures = {key: reader.number(item, key, where, above=0.0) for key in required}
        for key in ("efficiency", "weight_passes", "activation_passes"):
            if key in item:
                figures[key] = reader.number(
                    item, key, where, at_least=0.0, above=0.0 if key == "efficiency" else None
                )
        devices[str(name)] = Device(
            name=str(name),
            source=str(item.get("source", reader.source)),
            table_name=str(item.get("table_name", "")),
            **figures,
        )
    return devices


def _read_hosts(reader: _Reader, raw: Any, devices: Mapping[str, Device]) -> tuple[Host, ...]:
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        reader.complain("", f"`hosts` must be a list with at least one host, not {raw!r}.")
        return ()
    hosts: list[Host] = []
    for index, item in enumerate(raw):
        where = f"hosts[{index}]: "
        if not isinstance(item, Mapping):
            reader.complain(where, "must be a mapping with device, count and link_gbytes_per_s.")
            continue
        reader.refuse_unknown(item, {"name", "device", "count", "link_gbytes_per_s"}, where)
        count = item.get("count", 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            reader.complain(where, f"`count` is {count!r}; it must be a whole number of at least 1.")
            count = 1
        link = 1.0
        if count > 1 or "link_gbytes_per_s" in item:
            link = reader.number(item, "link_gbytes_per_s", where, above=0.0)
        name = str(item.get("device", ""))
        try:
            device = devices[name] if name in devices else find_device(name)
        except ConfigError as problem:
            reader.complain(where, str(problem))
            continue
        hosts.append(Host(name=str(item.get("name", index)), device=device, count=count, link_gbytes_per_s=link))
    return tuple(hosts)
