"""How a loss is normalised is found out by behaviour, and the weights make uneven micro-batches exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from accelerate_poplar.loss import HONOURED, MEAN, SUM, UNKNOWN, LossRule, count_items, find_loss_rule, rows_of

VOCABULARY = 11
Call = Callable[[Any, Any], torch.Tensor]


def token_batch(rows: int = 3, length: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "logits": torch.randn(rows, length, VOCABULARY, generator=generator),
        "labels": torch.randint(0, VOCABULARY, (rows, length), generator=generator),
    }


def cross_entropy(batch: Any, reduction: str, *, shift: bool) -> torch.Tensor:
    logits, labels = batch["logits"], batch["labels"]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), reduction=reduction)


LOSSES: dict[str, tuple[Call, bool, LossRule]] = {
    "mean over tokens": (
        lambda b, n: cross_entropy(b, "mean", shift=False),
        False,
        LossRule(kind=MEAN, items="tokens"),
    ),
    "mean over shifted tokens": (
        lambda b, n: cross_entropy(b, "mean", shift=True),
        True,
        LossRule(kind=MEAN, items="shifted_tokens"),
    ),
    "shifted, though the host does not say so": (
        lambda b, n: cross_entropy(b, "mean", shift=True),
        False,
        LossRule(kind=MEAN, items="shifted_tokens"),
    ),
    "honoured": (
        lambda b, n: cross_entropy(b, "mean", shift=True) if n is None else cross_entropy(b, "sum", shift=True) / n,
        True,
        LossRule(kind=HONOURED, items="shifted_tokens"),
    ),
    "honoured and multiplied by the ranks": (
        lambda b, n: (
            cross_entropy(b, "mean", shift=False) if n is None else 2 * cross_entropy(b, "sum", shift=False) / n
        ),
        False,
        LossRule(kind=HONOURED, items="tokens", scale=2.0),
    ),
    "honoured, and cannot do without the count": (
        lambda b, n: cross_entropy(b, "sum", shift=False) / n,
        False,
        LossRule(kind=HONOURED, items="tokens"),
    ),
    "sum": (lambda b, n: cross_entropy(b, "sum", shift=False), False, LossRule(kind=SUM, items="tokens")),
    "mean over rows of token means": (
        lambda b, n: torch.stack(
            [functional.cross_entropy(x, y) for x, y in zip(b["logits"], b["labels"], strict=True)]
        ).mean(),
        False,
        LossRule(kind=MEAN, items="rows"),
    ),
    "rows compared with each other": (
        lambda b, n: torch.logsumexp(b["logits"].sum(dim=(1, 2)), dim=0),
        False,
        LossRule(kind=UNKNOWN, items="tokens"),
    ),
}


@pytest.mark.scenario(11)
@pytest.mark.parametrize("name", LOSSES)
def test_found_out_by_behaviour(name: str) -> None:
    call, shifts, rule = LOSSES[name]
    assert find_loss_rule(call, token_batch(), world_size=2, shifts_labels=shifts) == rule


def test_a_loss_over_rows_without_token_labels() -> None:
    batch = {"x": torch.arange(5.0), "labels": torch.arange(5.0)}
    found = find_loss_rule(lambda b, n: (b["x"] - 2).pow(2).mean(), batch, world_size=2, shifts_labels=False)
    assert found == LossRule(kind=MEAN, items="rows")
    assert found.count(batch) == 5


def test_a_loss_that_always_fails_is_unknown() -> None:
    def broken(batch: Any, count: Any) -> torch.Tensor:
        raise ValueError("no")

    assert find_loss_rule(broken, token_batch(), world_size=2, shifts_labels=False).kind == UNKNOWN


def test_counting() -> None:
    labels = torch.tensor([[5, -100, 7], [1, 2, -100]])
    assert count_items({"labels": labels}, "tokens") == 4
    assert count_items({"labels": labels}, "shifted_tokens") == 2
    assert count_items({"labels": labels}, "rows") == 2
    assert count_items({"labels": labels, "shift_labels": torch.tensor([[1, -100]])}, "shifted_tokens") == 1
    assert count_items({"labels": torch.tensor([1, -100, 2])}, "rows") == 2
    assert count_items({"labels": torch.tensor([0.5, 1.5])}, "tokens") == 2
    assert count_items({"x": torch.zeros(4, 2)}, "rows") == 4
    assert rows_of([torch.zeros(3, 1), torch.zeros(3)]) == 3
    assert rows_of({"a": "text"}) == 0


@pytest.mark.scenario(10)
def test_one_token_beside_seven() -> None:
    rule = LossRule(kind=MEAN, items="tokens")
    weights = [rule.weight(items=n, total_items=8, world_size=2) for n in (1, 7)]
    assert sum(w * loss for w, loss in zip(weights, (10.0, 2.0), strict=True)) / 2 == pytest.approx(3.0)


@pytest.mark.scenario(2)
def test_weights_of_four_unequal_cards() -> None:
    rule = LossRule(kind=MEAN, items="rows")
    sizes = (24, 12, 16, 24)
    weights = [rule.weight(items=n, total_items=76, world_size=4) / 4 for n in sizes]
    assert weights == pytest.approx([24 / 76, 12 / 76, 16 / 76, 24 / 76])


@pytest.mark.scenario(14)
@pytest.mark.parametrize("kind", [MEAN, HONOURED, SUM, UNKNOWN])
def test_nothing_to_learn_counts_nothing(kind: str) -> None:
    rule = LossRule(kind=kind, items="tokens")
    assert rule.weight(items=0, total_items=5, world_size=2) == 0.0
    assert rule.weight(items=0, total_items=0, world_size=2) == 0.0


@settings(max_examples=200, deadline=None)
@given(
    items=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=5),
    kind=st.sampled_from([MEAN, HONOURED]),
)
def test_the_average_over_ranks_is_the_mean_over_items(items: list[list[int]], kind: str) -> None:
    total, world_size = sum(map(sum, items)), len(items)
    rule = LossRule(kind=kind, items="tokens")
    value = 0.0
    for rank, own in enumerate(items):
        for step, count in enumerate(own):
            each = 1.0 + rank + 10 * step
            loss = each * count / max(total, 1) if kind == HONOURED else each
            value += rule.weight(items=count, total_items=total, world_size=world_size) * loss / world_size
    wanted = sum(n * (1.0 + r + 10 * s) for r, own in enumerate(items) for s, n in enumerate(own)) / max(total, 1)
    assert value == pytest.approx(wanted)
