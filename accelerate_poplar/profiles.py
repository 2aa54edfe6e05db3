"""What was measured: one `RankProfile` per rank and one `StageProfile` per ZeRO stage, with their JSON form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ProfileError, raise_together

PROFILE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured point of a rank's step-time and memory curves."""

    micro_batch_size: int
    """Samples in the micro-batch; at least 1."""
    step_time_s: float
    """Seconds of one forward and backward pass, without collectives; greater than 0."""
    peak_memory_bytes: int
    """Highest memory in use during that pass, in bytes; 0 when it was not measured."""


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """What is known of one rank whatever the ZeRO stage."""

    rank: int
    """Global rank, counted from 0."""
    host: str
    """Name of the machine the rank runs on."""
    device: str
    """Device name as NVML gives it, or the processor's name on a CPU rank."""
    memory_bytes: int
    """Total memory of the device, in bytes."""
    peak_flops: float
    """Dense peak in FLOP/s at the profile's dtype; 0 when unknown."""
    step_overhead_s: float = 0.0
    """Seconds a step costs this rank once, whatever its batch (the optimizer)."""
    points: tuple[Measurement, ...] = ()
    """Measurements in increasing order of micro_batch_size."""

    def samples_per_s(self) -> float:
        """Best measured samples per second, over all points; 0 without points."""
        return max((p.micro_batch_size / p.step_time_s for p in self.points), default=0.0)


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """What depends on the ZeRO stage."""

    max_micro_batch_size: tuple[int, ...]
    """Largest micro-batch that fits, indexed by rank; 0 = not even one sample fits."""
    per_micro_step_s: float = 0.0
    """Seconds of communication in every micro-step (m of the step-time model)."""
    per_step_s: float = 0.0
    """Seconds of communication once per optimizer step (s of the step-time model)."""
    overlap: float = 0.0
    """Seconds of per-micro-step communication hidden by one second of compute (w of the model), 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """Everything the planner needs to know of a cluster and a model."""

    model: str
    """Name of the model; a label, not looked up."""
    num_parameters: int
    """Number of parameters of the model."""
    seq_len: int
    """Tokens per sample that was profiled; 0 when samples are not token rows."""
    dtype: str
    """Compute dtype: `fp32`, `bf16` or `fp16`."""
    ranks: tuple[RankProfile, ...]
    """One profile per rank, in rank order."""
    zero_stages: Mapping[int, StageProfile] = field(default_factory=dict)
    """Profiled ZeRO stages."""
    emulated: bool = False
    """True when any figure was taken under emulation (see `emulation.py`)."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def stage(self, zero_stage: int) -> StageProfile:
        """The figures of one ZeRO stage.

        Raises:
            ProfileError: The stage was not profiled.
        """
        try:
            return self.zero_stages[zero_stage]
        except KeyError:
            known = ", ".join(str(stage) for stage in sorted(self.zero_stages)) or "none"
            raise ProfileError(
                f"ZeRO stage {zero_stage} was not profiled (profiled stages: {known}). "
                "Profile it, or ask for one of those stages."
            ) from None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, version 1."""
        data: dict[str, Any] = {
            "version": PROFILE_VERSION,
            "model": self.model,
            "num_parameters": self.num_parameters,
            "seq_len": self.seq_len,
            "dtype": self.dtype,
            "ranks": [_rank_to_dict(rank) for rank in self.ranks],
            "zero_stages": {str(stage): _stage_to_dict(s) for stage, s in sorted(self.zero_stages.items())},
        }
        if self.emulated:
            data["emulated"] = True
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "profile") -> ClusterProfile:
        """Read the JSON form and check every figure.

        Args:
            data: The parsed JSON object.
            source: Name of the file (or whatever it came from), used in messages.

        Raises:
            ProfileError: Names the source, the rank and the field of everything that is wrong.
        """
        if not isinstance(data, Mapping):
            raise ProfileError(f"{source}: a profile is a JSON object, not {type(data).__name__}.")
        if data.get("version") != PROFILE_VERSION:
            raise ProfileError(
                f"{source}: version is {data.get('version')!r}, this release reads version {PROFILE_VERSION}. "
                "Profile again with `accelerate-poplar profile`."
            )
        reader = _Reader(source)
        ranks = tuple(_read_rank(reader, i, item) for i, item in enumerate(reader.items(data, "ranks")))
        stages = _read_stages(reader, data.get("zero_stages"), len(ranks))
        profile = cls(
            model=str(data.get("model", "")),
            num_parameters=reader.whole(data, "num_parameters", "", minimum=0),
            seq_len=reader.whole(data, "seq_len", "", minimum=0),
            dtype=str(data.get("dtype", "fp32")),
            ranks=tuple(sorted(ranks, key=lambda r: r.rank)),
            zero_stages=stages,
            emulated=bool(data.get("emulated", False)),
        )
        _check_rank_numbers(reader, ranks)
        raise_together(reader.problems, ProfileError)
        return profile

    def save(self, path: str | Path) -> None:
        """Write the JSON form to `path`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ClusterProfile:
        """Read a profile file.

        Raises:
            ProfileError: The file is missing, is not JSON, or holds a wrong figure.
        """
        return cls.from_dict(read_json(path, ProfileError), source=str(path))


def read_json(path: str | Path, error: type[ProfileError] | type[ValueError]) -> Any:
    """Parse a JSON file, turning a missing or broken file into `error` with its name in the message."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path}: no such file.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise error(f"{path}: cannot be read as JSON: {problem}") from None


def _rank_to_dict(rank: RankProfile) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": rank.host,
        "device": rank.device,
        "memory_bytes": rank.memory_bytes,
        "peak_flops": rank.peak_flops,
        "step_overhead_s": rank.step_overhead_s,
        "points": [
            {
                "micro_batch_size": p.micro_batch_size,
                "step_time_s": p.step_time_s,
                "peak_memory_bytes": p.peak_memory_bytes,
            }
            for p in rank.points
        ],
    }


def _stage_to_dict(stage: StageProfile) -> dict[str, Any]:
    return {
        "max_micro_batch_size": list(stage.max_micro_batch_size),
        "per_micro_step_s": stage.per_micro_step_s,
        "per_step_s": stage.per_step_s,
        "overlap": stage.overlap,
    }


class _Reader:
    """Reads fields and collects what is wrong with them, so that one message can name everything."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[str] = []

    def complain(self, where: str, text: str) -> None:
        self.problems.append(f"{self.source}: {where}{text}")

    def items(self, data: Mapping[str, Any], key: str) -> Sequence[Any]:
        value = data.get(key)
        if not isinstance(value, list) or not value:
            self.complain("", f"`{key}` must be a list with at least one entry, not {value!r}.")
            return []
        return value

    def number(self, data: Mapping[str, Any], key: str, where: str, *, default: float | None = None) -> float:
        """A finite number of at least 0."""
        value = data.get(key, default)
        if value is None:
            self.complain(where, f"`{key}` is missing.")
            return 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            self.complain(where, f"`{key}` is {value!r}; it must be a finite number of at least 0.")
            return 0.0
        return float(value)

    def whole(
        self, data: Mapping[str, Any], key: str, where: str, *, minimum: int = 0, default: int | None = None
    ) -> int:
        value = data.get(key, default)
        if value is None:
            self.complain(where, f"`{key}` is missing.")
            return minimum
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.complain(where, f"`{key}` is {value!r}; it must be a whole number of at least {minimum}.")
            return minimum
        return value


def _read_rank(reader: _Reader, position: int, item: Any) -> RankProfile:
    where = f"ranks[{position}]: "
    if not isinstance(item, Mapping):
        reader.complain(where, f"must be an object, not {item!r}.")
        item = {}
    number = reader.whole(item, "rank", where)
    where = f"rank {number}: "
    return RankProfile(
        rank=number,
        host=str(item.get("host", "")),
        device=str(item.get("device", "")),
        memory_bytes=reader.whole(item, "memory_bytes", where, default=0),
        peak_flops=reader.number(item, "peak_flops", where, default=0.0),
        step_overhead_s=reader.number(item, "step_overhead_s", where, default=0.0),
        points=_read_points(reader, where, item),
    )


def _read_points(reader: _Reader, where: str, item: Mapping[str, Any]) -> tuple[Measurement, ...]:
    points: list[Measurement] = []
    raw = item.get("points")
    if not isinstance(raw, list) or not raw:
        reader.complain(where, f"`points` must be a list with at least one measurement, not {raw!r}.")
        return ()
    for index, entry in enumerate(raw):
        here = f"{where}points[{index}]: "
        if not isinstance(entry, Mapping):
            reader.complain(here, f"must be an object, not {entry!r}.")
            continue
        size = reader.whole(entry, "micro_batch_size", here, minimum=1)
        if points and size <= points[-1].micro_batch_size:
            reader.complain(
                here,
                f"`micro_batch_size` {size} follows {points[-1].micro_batch_size}; sizes must increase.",
            )
        seconds = reader.number(entry, "step_time_s", here)
        if seconds == 0.0 and entry.get("step_time_s") == 0:
            reader.complain(here, "`step_time_s` is 0; a micro-step takes more than 0 seconds.")
        memory = reader.whole(entry, "peak_memory_bytes", here, default=0)
        points.append(Measurement(micro_batch_size=size, step_time_s=seconds, peak_memory_bytes=memory))
    return tuple(points)


def _read_stages(reader: _Reader, raw: Any, world_size: int) -> dict[int, StageProfile]:
    if not isinstance(raw, Mapping) or not raw:
        reader.complain("", f"`zero_stages` must be an object with at least one stage, not {raw!r}.")
        return {}
    stages: dict[int, StageProfile] = {}
    for key, item in raw.items():
        where = f"zero_stages[{key!r}]: "
        if str(key) not in {"0", "1", "2", "3"} or not isinstance(item, Mapping):
            reader.complain(where, "stages are named 0, 1, 2 or 3 and hold an object.")
            continue
        stages[int(key)] = _read_stage(reader, where, item, world_size)
    return stages


def _read_stage(reader: _Reader, where: str, item: Mapping[str, Any], world_size: int) -> StageProfile:
    raw = item.get("max_micro_batch_size")
    caps: list[int] = []
    if not isinstance(raw, list) or len(raw) != world_size:
        count = len(raw) if isinstance(raw, list) else repr(raw)
        reader.complain(where, f"`max_micro_batch_size` has {count} entries for {world_size} ranks.")
    else:
        for rank, cap in enumerate(raw):
            caps.append(reader.whole({"max_micro_batch_size": cap}, "max_micro_batch_size", f"{where}rank {rank}: "))
    overlap = reader.number(item, "overlap", where, default=0.0)
    if overlap > 1.0:
        reader.complain(where, f"`overlap` is {overlap}; it must be between 0 and 1.")
    return StageProfile(
        max_micro_batch_size=tuple(caps),
        per_micro_step_s=reader.number(item, "per_micro_step_s", where, default=0.0),
        per_step_s=reader.number(item, "per_step_s", where, default=0.0),
        overlap=overlap,
    )


def _check_rank_numbers(reader: _Reader, ranks: Sequence[RankProfile]) -> None:
    numbers = [rank.rank for rank in ranks]
    for number in sorted(set(numbers)):
        if numbers.count(number) > 1:
            reader.complain("", f"rank {number} appears {numbers.count(number)} times; each rank appears once.")
    if not reader.problems and sorted(numbers) != list(range(len(numbers))):
        reader.complain("", f"ranks are {sorted(numbers)}; they must be 0 to {len(numbers) - 1} without gaps.")
