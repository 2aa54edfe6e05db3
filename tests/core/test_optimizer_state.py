"""Memory is planned for the optimizer the run has, whatever brings it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DummyOptim
from torch import nn
from transformers import Trainer, TrainingArguments

from accelerate_poplar.optimizer_state import of_deepspeed, of_optimizer, of_trainer, state_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1), 4.0),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), 8.0),
        (lambda ps: torch.optim.Adam(ps), 12.0),
        (lambda ps: torch.optim.Adagrad(ps), 8.0),
    ],
)
def test_one_like_the_loop_s_own_is_tried(make: Any, expected: float) -> None:
    optimizer = make([nn.Parameter(torch.zeros(3, 3))])
    before = len(optimizer.state)
    assert of_optimizer(optimizer, CPU) == pytest.approx(expected, abs=0.01)
    assert len(optimizer.state) == before, "the loop's own is left alone"


def test_what_cannot_be_told_counts_as_adamw() -> None:
    def fails(_: Any) -> torch.optim.Optimizer:
        raise ValueError("wants names")

    assert state_bytes(fails, CPU) is None
    assert of_optimizer(DummyOptim([nn.Parameter(torch.zeros(1))]), CPU) is None


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"type": "SGD", "params": {"lr": "auto"}}, 4.0),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, 8.0),
        ({"type": "Adagrad"}, 8.0),
        ({"type": "AdamW"}, None),
        ({"type": "OneBitAdam"}, None),
    ],
)
def test_deepspeed_s_own_is_known_by_name(named: dict[str, Any], expected: float | None) -> None:
    assert of_deepspeed({"optimizer": named}, CPU) == (None if expected is None else pytest.approx(expected, abs=0.01))


@pytest.mark.parametrize(("name", "expected"), [("adamw_torch", 12.0), ("sgd", 4.0), ("adagrad", 8.0)])
def test_a_trainer_s_is_the_one_it_will_make(tmp_path: Path, name: str, expected: float) -> None:
    args = TrainingArguments(str(tmp_path), optim=name, report_to=[], use_cpu=True)
    trainer = Trainer(model=nn.Linear(2, 2), args=args)
    assert of_trainer(trainer, CPU) == pytest.approx(expected, abs=0.01)
    given = Trainer(
        model=nn.Linear(2, 2), args=args, optimizers=(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), None)
    )
    assert of_trainer(given, CPU) == pytest.approx(4.0, abs=0.01)
