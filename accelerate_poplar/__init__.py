"""The same training run, on unequal GPUs, at the speed the whole cluster is worth."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import PoplarConfig
from .errors import (
    CompatibilityError,
    ConfigError,
    DataError,
    InsufficientMemoryError,
    PlanError,
    PoplarError,
    ProfileError,
    RankError,
)
from .plan import Plan, RankPlan
from .profiles import ClusterProfile, Measurement, RankProfile, StageProfile
from .search import find_plan

if TYPE_CHECKING:
    from .accelerator import PoplarAccelerator
    from .arguments import PoplarTrainingArguments
    from .plugin import PoplarPlugin
    from .trainer import PoplarTrainer, PoplarTrainerMixin

__version__ = "0.1.0"

_LAZY = {
    "PoplarAccelerator": ".accelerator",
    "PoplarPlugin": ".plugin",
    "PoplarTrainer": ".trainer",
    "PoplarTrainerMixin": ".trainer",
    "PoplarTrainingArguments": ".arguments",
}

__all__ = [
    "ClusterProfile",
    "CompatibilityError",
    "ConfigError",
    "DataError",
    "InsufficientMemoryError",
    "Measurement",
    "Plan",
    "PlanError",
    "PoplarAccelerator",
    "PoplarConfig",
    "PoplarError",
    "PoplarPlugin",
    "PoplarTrainer",
    "PoplarTrainerMixin",
    "PoplarTrainingArguments",
    "ProfileError",
    "RankError",
    "RankPlan",
    "RankProfile",
    "StageProfile",
    "__version__",
    "find_plan",
]


def __getattr__(name: str) -> Any:
    # torch and the host libraries are imported only when a name that needs them is asked for.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
