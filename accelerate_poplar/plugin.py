"""`PoplarPlugin`: Accelerate's `DeepSpeedPlugin` with the ZeRO stage and the batch keys left to the plan."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig

from .config import LaunchEnvironment
from .ds_config import stage_of
from .errors import ConfigError, raise_together

_PLACEHOLDER_STAGE = 2
"""Stands in the DeepSpeed config until the plan has chosen a stage."""


@dataclass
class PoplarPlugin(DeepSpeedPlugin):
    """A `DeepSpeedPlugin` for unequal ranks; give it to `PoplarAccelerator(deepspeed_plugin=...)`.

    It takes the arguments of `DeepSpeedPlugin` and `poplar`. Three things differ: `zero_stage` may be `"auto"` (the
    fastest stage that fits, found by profiling), and is so where neither an argument, nor a DeepSpeed config, nor the
    launcher names one; the three batch keys are filled from the plan; and gradients are clipped only where clipping is
    asked for (`gradient_clipping`, the DeepSpeed config, the launcher, or `accelerator.clip_grad_norm_` in the loop),
    while Accelerate clips at 1.0 by itself.

    Raises:
        ConfigError: The ZeRO stage is out of range or contradicts the one of the DeepSpeed config.
    """

    poplar: Any = field(
        default=None, metadata={"help": "Poplar settings: a PoplarConfig, a mapping, or the path of a file."}
    )

    def __post_init__(self) -> None:
        asked = self.zero_stage
        given = self.hf_ds_config is not None
        written = _as_written(self.hf_ds_config) if given else None
        raise_together(_stage_problems(asked, stage_of(written)))
        if asked == "auto":
            self.zero_stage = _PLACEHOLDER_STAGE
        if written is not None:
            self.hf_ds_config = _with_stage(written, self.zero_stage)
        super().__post_init__()
        raise_together(_stage_problems(asked, stage_of(self.deepspeed_config) if asked != "auto" else None))
        self.written_config = copy.deepcopy(self.deepspeed_config) if written is None else written
        from_launcher = LaunchEnvironment.from_environment().deepspeed
        if asked == "auto" or (asked is None and not given and not from_launcher):
            self.written_config["zero_optimization"]["stage"] = "auto"
        if self.deepspeed_config.get("gradient_clipping") == "auto":
            # Accelerate would fill in 1.0: a clip nobody asked for.
            self.deepspeed_config["gradient_clipping"] = 0.0
        self.deepspeed_config.pop("poplar", None)


def _as_written(config: Any) -> dict[str, Any]:
    wrapped = config if isinstance(config, HfDeepSpeedConfig) else HfDeepSpeedConfig(config)
    return copy.deepcopy(wrapped.config)


def _with_stage(written: dict[str, Any], asked: Any) -> dict[str, Any]:
    """A copy that DeepSpeed can read although the stage is still open."""
    settings = copy.deepcopy(written)
    zero = settings.setdefault("zero_optimization", {})
    if stage_of(settings) is None:
        zero["stage"] = asked if isinstance(asked, int) else _PLACEHOLDER_STAGE
    return settings


def _stage_problems(asked: Any, fixed: int | None) -> list[str]:
    whole = isinstance(asked, int) and not isinstance(asked, bool)
    if asked is not None and asked != "auto" and not (whole and 0 <= asked <= 3):
        return [f'zero_stage is {asked!r}; it must be 0, 1, 2, 3 or "auto".']
    if asked is not None and fixed is not None and asked != fixed:
        return [
            f"zero_stage is {asked!r}, but the DeepSpeed config fixes zero_optimization.stage to {fixed}. "
            'Remove one of the two, or set the stage to "auto" in the DeepSpeed config.'
        ]
    return []


__all__ = ["ConfigError", "PoplarPlugin"]
