"""Settings, where they come from, and the only place that reads the environment."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .config_checks import SHARE_TOLERANCE, out_of_range
from .errors import ConfigError, raise_together

CONFIG_VARIABLE = "POPLAR_CONFIG"
SLOWDOWN_VARIABLE = "POPLAR_EMULATE_SLOWDOWN"
MEMORY_VARIABLE = "POPLAR_EMULATE_MEMORY_GIB"
DEEPSPEED_SWITCH = "ACCELERATE_USE_DEEPSPEED"


@dataclass(frozen=True, kw_only=True)
class PoplarConfig:
    """All settings of a run. Every field is also a key of the `"poplar"` object and a `--poplar_<name>` flag.

    Raises:
        ConfigError: A value is out of range; all such values are reported together.
    """

    enabled: bool = True
    """False: an even split through the same code."""
    zero_stage: int | str | None = None
    """0 to 3, `"auto"`, or None: what the DeepSpeed config says (auto where there is none)."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks; None: what the run would have had without Poplar."""
    per_rank_micro_batch_sizes: tuple[int, ...] | Mapping[int, int] | None = None
    """Micro-batch sizes by hand, in rank order or as a mapping rank -> size; nothing is profiled then."""
    max_micro_batch_size: int | tuple[int, ...] | None = None
    """A cap on the micro-batch, one for all ranks or one per rank."""
    memory_fraction: float | tuple[float, ...] = 0.9
    """Share of each device's memory that may be used, above 0 up to 1; one for all ranks or one per rank."""
    state_shards: str | tuple[float, ...] = "even"
    """Shares of the sharded training state: `even`, `auto` (uneven where that makes the step shorter, or possible), or one
    fraction per rank, each above 0 and together 1."""
    state_offload: str = "off"
    """`auto`: where shares of the training state alone do not make room, the ranks that need it keep their optimizer on the
    host; the plan says which. `off`: none does."""
    strategy: str = "optimal"
    """How the plan is searched: `optimal`, `poplar`, `proportional`, `flops` or `even`."""
    profile_budget_s: float = 30.0
    """Seconds after which profiling stops adding measurements; above 0."""
    profile_relative_error: float = 0.03
    """Relative error of the step-time curve at which profiling stops; above 0, below 1."""
    reprofile: bool = False
    """True: measure again even if the cache knows this device and model."""
    cache_dir: str | None = None
    """Folder of the profile cache; None: the user's cache folder."""
    allow_fp16: bool = False
    """True: all ranks use fp16 where bf16 was asked for and a device lacks it."""
    replan: str = "warn"
    """`off`, `warn` (say when another plan would be faster) or `on` (change to it)."""
    replan_every: int = 50
    """Optimizer steps between two looks at the measured step time; at least 1."""
    replan_threshold: float = 0.05
    """Predicted relative gain that makes another plan worth it; above 0, below 1."""
    timeout_s: float = 600.0
    """Longest wait for the other ranks in pre-flight and agreement, in seconds; above 0."""
    report: bool = True
    """True: write `poplar_report.html` to the output directory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_rank_micro_batch_sizes", _sizes(self.per_rank_micro_batch_sizes))
        object.__setattr__(self, "max_micro_batch_size", _tuple_if_sequence(self.max_micro_batch_size))
        object.__setattr__(self, "memory_fraction", _tuple_if_sequence(self.memory_fraction))
        object.__setattr__(self, "state_shards", _tuple_if_sequence(self.state_shards))
        if isinstance(self.zero_stage, str) and self.zero_stage.isdigit():
            object.__setattr__(self, "zero_stage", int(self.zero_stage))
        if isinstance(self.replan, bool):
            # YAML reads a bare `off` and `on` as truth values.
            object.__setattr__(self, "replan", "on" if self.replan else "off")
        raise_together(out_of_range(self))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; fields at their default are left out."""
        default = PoplarConfig()
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            for name, value in values.items()
            if value != getattr(default, name)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "Poplar settings") -> PoplarConfig:
        """Build from a mapping.

        Args:
            data: Field name -> value, as read from JSON or YAML.
            source: Name of the file or object, for messages.

        Raises:
            ConfigError: Unknown keys (with the likeliest right one) and values out of range, all together.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"{source}: must be a mapping of settings, not {type(data).__name__}.")
        known = [f.name for f in dataclasses.fields(cls)]
        problems = [f"{source}: {_unknown_key(str(key), known)}" for key in data if key not in known]
        try:
            config = cls(**{str(key): value for key, value in data.items() if key in known})
        except ConfigError as error:
            problems += [f"{source}: {problem}" for problem in error.problems]
        raise_together(problems)
        return config

    @classmethod
    def load(cls, path: str | Path) -> PoplarConfig:
        """Read a JSON or YAML file; a file that holds a `poplar` object next to other keys works too.

        Raises:
            ConfigError: The file is missing or broken, or holds a wrong setting.
        """
        data = load_mapping(path)
        if isinstance(data.get("poplar"), Mapping):
            data = data["poplar"]
        return cls.from_dict(data, source=str(path))

    def sizes_by_rank(self, world_size: int) -> tuple[int, ...] | None:
        """`per_rank_micro_batch_sizes` in rank order, or None.

        Raises:
            ConfigError: Not one size per rank; names both counts.
        """
        given = self.per_rank_micro_batch_sizes
        if given is None:
            return None
        if isinstance(given, Mapping):
            if sorted(given) != list(range(world_size)):
                raise ConfigError(
                    f"per_rank_micro_batch_sizes names ranks {sorted(given)}, but the run has {world_size} ranks "
                    f"(0 to {world_size - 1}). Give one size per rank."
                )
            return tuple(given[rank] for rank in range(world_size))
        if len(given) != world_size:
            raise ConfigError(
                f"per_rank_micro_batch_sizes has {len(given)} values {list(given)}, but the run has {world_size} "
                "ranks. Give one size per rank, or start as many processes as there are sizes."
            )
        return given

    def check_world(self, world_size: int) -> list[str]:
        """What in these settings does not fit a run with `world_size` ranks, one sentence each."""
        problems = []
        sizes = None
        try:
            sizes = self.sizes_by_rank(world_size)
        except ConfigError as error:
            problems.append(str(error))
        for name in ("max_micro_batch_size", "memory_fraction"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != world_size:
                problems.append(
                    f"{name} has {len(value)} values {list(value)}, but the run has {world_size} ranks. "
                    "Give one value per rank, or a single one for all."
                )
            elif name == "max_micro_batch_size" and sizes is not None and value is not None:
                caps = value if isinstance(value, tuple) else (value,) * world_size
                problems += [
                    f"rank {rank}: per_rank_micro_batch_sizes asks for {size}, above max_micro_batch_size {cap}. "
                    "Lower the size or raise the cap."
                    for rank, (size, cap) in enumerate(zip(sizes, caps, strict=True))
                    if size > cap
                ]
        if isinstance(self.state_shards, tuple) and len(self.state_shards) != world_size:
            problems.append(
                f"state_shards has {len(self.state_shards)} shares {list(self.state_shards)}, but the run has "
                f"{world_size} ranks. Give one share per rank."
            )
        return problems

    @property
    def plans_state(self) -> bool:
        """True where a rank that has no room for an even share of the training state may have room for its own."""
        return self.state_shards != "even" or self.state_offload != "off"

    def fractions_by_rank(self) -> tuple[float, ...] | None:
        """The shares of the training state given by hand, in rank order; None: even ones, or the planner's choice."""
        given = self.state_shards
        return given if isinstance(given, tuple) and max(given) - min(given) > SHARE_TOLERANCE else None

    def caps_by_rank(self, world_size: int) -> tuple[int, ...] | None:
        """`max_micro_batch_size` in rank order, or None."""
        value = self.max_micro_batch_size
        return value if isinstance(value, tuple) or value is None else (value,) * world_size

    def memory_fraction_of(self, rank: int) -> float:
        """The memory fraction of one rank."""
        return self.memory_fraction[rank] if isinstance(self.memory_fraction, tuple) else self.memory_fraction


@dataclass(frozen=True, kw_only=True)
class EmulationConfig:
    """Ranks made to look slower or smaller; empty unless asked for."""

    slowdown: tuple[float, ...] = field(default=())
    """Factor of each rank's own compute time, at least 1; empty = none."""
    memory_gib: tuple[float, ...] = field(default=())
    """Memory each rank pretends to have, in GiB, above 0; empty = the real memory."""

    @property
    def active(self) -> bool:
        """True when any rank is emulated."""
        return bool(self.slowdown or self.memory_gib)

    def check_world(self, world_size: int) -> list[str]:
        """What does not fit a run with `world_size` ranks, one sentence each."""
        pairs = ((SLOWDOWN_VARIABLE, self.slowdown), (MEMORY_VARIABLE, self.memory_gib))
        return [
            f"{name} has {len(values)} values {list(values)}, but the run has {world_size} ranks. "
            "Give one value per rank."
            for name, values in pairs
            if values and len(values) != world_size
        ]

    @classmethod
    def from_environment(cls) -> EmulationConfig:
        """Read `POPLAR_EMULATE_SLOWDOWN` and `POPLAR_EMULATE_MEMORY_GIB`, one value per rank.

        Raises:
            ConfigError: A value is not a number or out of range.
        """
        return cls(
            slowdown=_numbers_from(SLOWDOWN_VARIABLE, minimum=1.0),
            memory_gib=_numbers_from(MEMORY_VARIABLE, minimum=1e-6),
        )


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """What the launcher told this process."""

    rank: int = 0
    """Global rank."""
    local_rank: int = -1
    """Rank within the host; -1: the process was not launched as one of several."""
    world_size: int = 1
    """Number of ranks."""
    deepspeed: bool = False
    """True: `accelerate launch` was told to use DeepSpeed."""

    @classmethod
    def from_environment(cls) -> LaunchEnvironment:
        """Read what torchrun and `accelerate launch` set."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "-1")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            deepspeed=os.environ.get(DEEPSPEED_SWITCH, "false").lower() == "true",
        )


@contextmanager
def deepspeed_switch() -> Iterator[None]:
    """Tell Accelerate, for the time being, that DeepSpeed is to be used; its own code does the same."""
    before = os.environ.get(DEEPSPEED_SWITCH)
    os.environ[DEEPSPEED_SWITCH] = "true"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(DEEPSPEED_SWITCH, None)
        else:
            os.environ[DEEPSPEED_SWITCH] = before


def resolve_config(
    argument: PoplarConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    deepspeed_config: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> PoplarConfig:
    """Find the settings of a run: first match wins.

    The order is: `argument`; the file named by `POPLAR_CONFIG`; the `"poplar"` object of the DeepSpeed config; the
    defaults. Single `overrides` (command-line flags) are laid over whichever of them was found.

    Args:
        argument: Settings, a mapping, or a path to YAML or JSON.
        deepspeed_config: The parsed DeepSpeed config.
        overrides: Field name -> value; None values are ignored.

    Raises:
        ConfigError: A file is missing, a key unknown, a value out of range.
    """
    base = _find_config(argument, deepspeed_config)
    changes = {name: value for name, value in (overrides or {}).items() if value is not None}
    if not changes:
        return base
    values = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    return PoplarConfig.from_dict({**values, **changes}, source="--poplar_* flags")


def load_mapping(path: str | Path) -> dict[str, Any]:
    """Parse a YAML or JSON file that holds a mapping.

    Raises:
        ConfigError: The file is missing, cannot be parsed, or holds something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = json.loads(text) if str(path).endswith(".json") else yaml.safe_load(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as problem:
        raise ConfigError(f"{path}: cannot be read: {problem}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a mapping of settings, not {type(data).__name__}.")
    return data


def default_cache_dir() -> Path:
    """The user's cache folder: `$XDG_CACHE_HOME` or `~/.cache`, then `accelerate_poplar`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "accelerate_poplar"


def _find_config(
    argument: PoplarConfig | Mapping[str, Any] | str | Path | None, deepspeed_config: Mapping[str, Any] | None
) -> PoplarConfig:
    if isinstance(argument, PoplarConfig):
        return argument
    if isinstance(argument, Mapping):
        return PoplarConfig.from_dict(argument)
    if argument is not None:
        return PoplarConfig.load(argument)
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        return PoplarConfig.load(named)
    section = (deepspeed_config or {}).get("poplar")
    if section is not None:
        return PoplarConfig.from_dict(section, source='the "poplar" object of the DeepSpeed config')
    return PoplarConfig()


def _unknown_key(key: str, known: Sequence[str]) -> str:
    bare = key.removeprefix("poplar_")
    close = difflib.get_close_matches(bare, known, n=1, cutoff=0.5)
    hint = f"Did you mean `{close[0]}`?" if close else f"Known settings: {', '.join(known)}."
    return f"unknown setting `{key}`. {hint}"


def _sizes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {int(rank) if str(rank).lstrip("-").isdigit() else rank: size for rank, size in value.items()}
    return _tuple_if_sequence(value)


def _tuple_if_sequence(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _numbers_from(variable: str, *, minimum: float) -> tuple[float, ...]:
    text = os.environ.get(variable, "").strip()
    if not text:
        return ()
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{variable}={text!r}: must be numbers separated by commas, one per rank.") from None
    if any(not minimum <= value < float("inf") for value in values):
        raise ConfigError(f"{variable}={text!r}: every value must be a finite number of at least {minimum:g}.")
    return values
