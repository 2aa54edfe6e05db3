"""Metrics of unequal micro-batches on unequal ranks become those of the whole batch; what a trainer asks for is known."""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from accelerate_poplar import PoplarTrainingArguments
from accelerate_poplar.batch_metrics import BatchMetrics, LocalAccelerator, local_metrics, record_together
from accelerate_poplar.comm import SingleRank
from accelerate_poplar.wrapped_trainer import (
    as_wanted,
    init_signature,
    reference_conflicts,
    trainer_conflicts,
    wanted_arguments,
)


class Accelerator:
    """Gathers twice of everything."""

    step = 1

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor])

    gather_for_metrics = gather


class Recording:
    """A trainer that keeps metrics as TRL's do."""

    def __init__(self) -> None:
        self.accelerator: Any = Accelerator()
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0

    def run(self, values: list[float]) -> None:
        found = self.accelerator.gather(torch.tensor(values, dtype=torch.float64))
        self._metrics["train"]["reward"].append(found.mean().item())
        self._total_train_tokens += self.accelerator.gather_for_metrics(found).numel()
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]


class Everyone(SingleRank):
    """Plays all ranks: what one rank gathers is already everybody's."""

    def __init__(self, others: list[Any]) -> None:
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


def measured(trainer: Recording, values: list[float], share: float) -> BatchMetrics:
    with local_metrics(trainer, share=share) as found:
        trainer.run(values)
    return found


@given(
    batches=st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=6),
    first=st.integers(0, 6),
)
def test_unequal_micro_batches_on_two_ranks_give_the_mean_over_all_samples(
    batches: list[list[float]], first: int
) -> None:
    trainer, total = Recording(), sum(map(len, batches))
    found = [measured(trainer, values, len(values) / total) for values in batches]
    ghost = measured(trainer, [1e9], 0.0)
    assert trainer._metrics["train"] == {}
    record_together(trainer, "train", [*found[:first], ghost], Everyone([found[first:]]))
    samples = [value for values in batches for value in values]
    assert trainer._metrics["train"]["reward"] == [pytest.approx(sum(samples) / total, abs=1e-9)]
    assert trainer._metrics["train"]["num_tokens"] == [total]
    record_together(trainer, "train", found[:first], Everyone([found[first:]]))
    assert trainer._metrics["train"]["num_tokens"] == [2 * total]


def test_what_profiling_runs_leaves_no_metrics() -> None:
    trainer = Recording()
    accelerator = trainer.accelerator
    trainer._metrics["train"]["reward"].append(3.0)
    measured(trainer, [1.0], 0.0)
    assert trainer._metrics["train"] == {"reward": [3.0]}
    assert trainer._total_train_tokens == 0
    assert trainer.accelerator is accelerator


def test_the_local_accelerator_is_the_real_one_but_for_gathering() -> None:
    real = Accelerator()
    local = LocalAccelerator(real)
    local.step = 7
    assert real.step == 7
    assert local.step == 7
    assert local.gather(torch.ones(2)).shape == (2,)
    assert local.gather_for_metrics([1], use_gather_object=True) == [1]


def test_a_trainer_without_metrics_gathers_nothing() -> None:
    class Stock:
        accelerator = Accelerator()

    class Nobody(SingleRank):
        def gather(self, value: Any) -> list[Any]:
            raise AssertionError("a collective call")

    trainer = Stock()
    with local_metrics(trainer, share=1.0) as found:
        assert isinstance(trainer.accelerator, LocalAccelerator)
    record_together(trainer, "train", [found], Nobody())


# ---- what a trainer asks for --------------------------------------------------------------------------------------


@dataclass
class OwnConfig(TrainingArguments):
    """Arguments of some trainer."""

    num_generations: int | None = None
    logging_steps: float = 7


class GRPOTrainer:
    """A name that is refused."""

    def __init__(self, model: Any, args: OwnConfig | TrainingArguments | None = None) -> None: ...


class Mine(GRPOTrainer):
    """Refused by what it is made from."""


class Untyped:
    def __init__(self, model: Any, args: Any = None) -> None: ...


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, Mine])
def test_trainers_that_need_groups_are_refused_by_name(trainer_class: type) -> None:
    (problem,) = trainer_conflicts(trainer_class, None)
    assert "GRPOTrainer trains on groups of completions of one prompt (num_generations)" in problem
    assert "Use GRPOTrainer itself, without PoplarTrainerMixin" in problem


def test_arguments_that_ask_for_groups_are_refused_whatever_the_trainer(tmp_path: Path) -> None:
    (problem,) = trainer_conflicts(Untyped, OwnConfig(str(tmp_path), num_generations=8))
    assert problem.startswith("Untyped trains on groups")
    assert trainer_conflicts(Untyped, OwnConfig(str(tmp_path))) == []


def test_a_reference_model_in_pieces_is_refused() -> None:
    trainer = Untyped(None)
    assert reference_conflicts(trainer) == []
    trainer.ref_model = torch.nn.Linear(1, 1)
    assert reference_conflicts(trainer) == []
    trainer.ref_model.weight.ds_id = 0
    (problem,) = reference_conflicts(trainer)
    assert "the reference model of Untyped is spread over the ranks by ZeRO stage 3" in problem


def test_the_trainers_own_class_of_arguments_is_found(tmp_path: Path) -> None:
    stated, silent = inspect.signature(GRPOTrainer.__init__), inspect.signature(Untyped.__init__)
    # Annotations of this file are text, as in a trainer of a script that says `from __future__ import annotations`.
    assert wanted_arguments(stated) is TrainingArguments
    assert wanted_arguments(inspect.signature(GRPOTrainer.__init__, eval_str=True)) is OwnConfig
    assert wanted_arguments(silent) is TrainingArguments


class Whole:
    """Stands for the mixin."""


def test_a_subclass_that_only_passes_on_is_looked_through() -> None:
    class Base:
        def __init__(self, model: Any, args: OwnConfig | None = None, seed: int = 0) -> None: ...

    class Passing(Base):
        def __init__(self, *args: Any, extra: int = 1, **kwargs: Any) -> None: ...

    class Silent(Base):
        pass

    bound = init_signature(type("Both", (Whole, Passing), {}), Whole).bind("model", args="own", extra=2)
    assert bound.arguments["args"] == "own"
    assert (bound.args, bound.kwargs) == (("model", "own"), {"extra": 2})
    with pytest.raises(TypeError, match="extra"):
        init_signature(type("Both", (Whole, Silent), {}), Whole).bind("model", extra=2)


def test_stock_arguments_become_the_trainers_own_and_keep_their_values(tmp_path: Path) -> None:
    given_args = PoplarTrainingArguments(str(tmp_path), learning_rate=3e-3, poplar_replan="off", hub_token="secret")
    made = as_wanted(given_args, OwnConfig)
    assert (type(made), made.learning_rate, made.hub_token) == (OwnConfig, 3e-3, "secret")
    assert as_wanted(given_args, TrainingArguments) is given_args
    assert as_wanted(None, OwnConfig).logging_steps == 7
