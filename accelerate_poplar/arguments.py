"""`PoplarTrainingArguments`: the stock arguments plus one `--poplar_<name>` flag per setting."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Optional

import yaml
from transformers import TrainingArguments

from .config import LaunchEnvironment, PoplarConfig
from .errors import ConfigError, raise_together
from .host import needs_gloo, start_gloo_state

PREFIX = "poplar_"
_HELP = {
    "enabled": "false: an even split through the same code (default true).",
    "zero_stage": "ZeRO stage 0-3, or 'auto' for the fastest that fits; default: what the DeepSpeed config says.",
    "global_batch_size": "Samples per optimizer step over all ranks; default: what the run would have had anyway.",
    "per_rank_micro_batch_sizes": "Micro-batch sizes by hand, '3,1' or '{0: 3, 1: 1}'; nothing is profiled then.",
    "max_micro_batch_size": "A cap on the micro-batch, one number for all ranks or one per rank ('24,8').",
    "memory_fraction": "Share of each device's memory that may be used, one for all or one per rank (default 0.9).",
    "state_shards": "Shares of the training state: even (default), auto, or one fraction per rank ('0.75,0.25').",
    "state_offload": "auto: ranks that need it keep their optimizer on the host; off (default): none does.",
    "strategy": "optimal (default), poplar, proportional, flops or even.",
    "profile_budget_s": "Seconds after which profiling stops adding measurements (default 30).",
    "profile_relative_error": "Relative error of the step-time curve at which profiling stops (default 0.03).",
    "reprofile": "true: measure again even if the profile cache knows this device and model.",
    "cache_dir": "Folder of the profile cache.",
    "allow_fp16": "true: all ranks use fp16 where bf16 was asked for and a device lacks it.",
    "replan": "off, warn (default) or on: what to do when another plan would be faster.",
    "replan_every": "Optimizer steps between two looks at the measured step time (default 50).",
    "replan_threshold": "Predicted relative gain that makes another plan worth it (default 0.05).",
    "timeout_s": "Longest wait for the other ranks in pre-flight and agreement, in seconds (default 600).",
    "report": "false: write no poplar_report.html.",
}


class _PoplarFlags:
    """What the flags do; the fields themselves are generated from `PoplarConfig` below."""

    def __post_init__(self) -> None:
        environment = LaunchEnvironment.from_environment()
        configured = getattr(self, "accelerator_config", None)
        if needs_gloo(environment) and (configured is None or isinstance(configured, dict)):
            start_gloo_state()
            self.accelerator_config = {**(configured or {}), "use_configured_state": True}
        super().__post_init__()  # type: ignore[misc]
        overrides = self.poplar_overrides()
        checked = PoplarConfig.from_dict(overrides, source="--poplar_* flags")
        raise_together(checked.check_world(max(environment.world_size, 1)), ConfigError)

    def poplar_overrides(self) -> dict[str, Any]:
        """The settings that were given as flags, parsed."""
        given = {name: getattr(self, PREFIX + name) for name in _HELP}
        return {name: _parse(name, value) for name, value in given.items() if value is not None}


def _parse(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.strip()
    if "," in text and text[:1] not in "[{":
        text = f"[{text}]"
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--{PREFIX}{name} {value!r}: cannot be read. {_HELP[name]}") from None


def _flag(name: str) -> tuple[str, Any, Any]:
    return PREFIX + name, Optional[str], dataclasses.field(default=None, metadata={"help": _HELP[name]})  # noqa: UP045


_Generated = dataclasses.make_dataclass(
    "_Generated",
    [
        (
            "poplar_config",
            Optional[str],  # noqa: UP045 - HfArgumentParser reads this form on every Python version
            dataclasses.field(default=None, metadata={"help": "YAML or JSON file with Poplar settings."}),
        ),
        *(_flag(f.name) for f in dataclasses.fields(PoplarConfig)),
    ],
    bases=(_PoplarFlags, TrainingArguments),
)


@dataclass
class PoplarTrainingArguments(_Generated):  # type: ignore[misc, valid-type]
    """`TrainingArguments` with a `--poplar_<name>` flag for every field of `PoplarConfig` and `--poplar_config FILE`.

    No stock default is changed.

    Raises:
        ConfigError: A flag is out of range or does not fit the number of ranks.
    """
