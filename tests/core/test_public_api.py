"""The public names, pinned: a change here is a change for users and belongs in the changelog."""

from __future__ import annotations

import inspect

import accelerate_poplar

PUBLIC = [
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


def test_the_public_names_are_these() -> None:
    assert sorted(accelerate_poplar.__all__) == PUBLIC
    assert dir(accelerate_poplar) == sorted(accelerate_poplar.__all__)


def test_every_public_name_exists_and_is_documented() -> None:
    for name in PUBLIC:
        if name != "__version__":
            assert inspect.getdoc(getattr(accelerate_poplar, name)), name


def test_all_errors_of_ours_have_one_root() -> None:
    errors = [getattr(accelerate_poplar, name) for name in PUBLIC if name.endswith("Error")]
    assert all(issubclass(error, accelerate_poplar.PoplarError) for error in errors)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(accelerate_poplar, "PoplarTrainers")
