"""How a loss is normalised, found out by behaviour, and the weights that make uneven micro-batches exact.

DeepSpeed (and DDP) average gradients over the ranks. With W ranks, a micro-batch whose loss is a mean over n items has to
count n * W / N, N being the items of all micro-batches of all ranks in the optimizer step: then the average over the
ranks is the gradient of the mean over all N items. A loss that divides a sum by a given N has to count W.

Whether a loss honours the given N cannot be read off a signature (many models accept any keyword and ignore it), so it is
called on a small batch and watched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

IGNORED_LABEL = -100
HONOURED = "honoured"
MEAN = "mean"
SUM = "sum"
UNKNOWN = "unknown"

LossCall = Callable[[Any, Any], torch.Tensor]
"""(batch, num_items_in_batch or None) -> scalar loss."""


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """What the loss of one micro-batch is."""

    kind: str
    """`honoured`: a sum divided by the given item count; `mean`; `sum`; `unknown`: none of them, treated as a mean."""
    items: str
    """What a mean is taken over: `tokens`, `shifted_tokens` (labels from the second position on) or `rows`."""
    scale: float = 1.0
    """For `honoured`: what the loss multiplies its quotient by (a script may multiply by the number of ranks itself)."""

    def weight(self, *, items: int, total_items: int, world_size: int) -> float:
        """The factor on one micro-batch's loss.

        Args:
            items: Items of the micro-batch; 0 for one that must not count.
            total_items: Items of all micro-batches on all ranks in this optimizer step.
            world_size: Number of ranks that gradients are averaged over.
        """
        if items == 0 or total_items == 0:
            return 0.0
        if self.kind == HONOURED:
            return world_size / self.scale
        if self.kind == SUM:
            return float(world_size)
        return items * world_size / total_items

    def count(self, batch: Any) -> int:
        """Items of one collated micro-batch under this rule."""
        return count_items(batch, self.items)


def count_items(batch: Any, items: str) -> int:
    """Items of a collated batch: non-ignored labels, the same without each row's first position, or rows.

    A batch without token labels is counted in rows, leaving out rows whose class label is ignored.
    """
    labels = _labels(batch)
    if items == "shifted_tokens" and isinstance(batch, Mapping) and batch.get("shift_labels") is not None:
        labels = batch["shift_labels"]
    elif items == "shifted_tokens" and labels is not None and labels.dim() > 1:
        labels = labels[..., 1:]
    if labels is None or not _countable(labels):
        return rows_of(batch)
    if items == "rows":
        return int(labels.ne(IGNORED_LABEL).sum()) if labels.dim() <= 1 else rows_of(batch)
    return int(labels.ne(IGNORED_LABEL).sum())


def has_token_labels(batch: Any) -> bool:
    """True for a batch whose labels are whole numbers, one per token."""
    labels = _labels(batch)
    return labels is not None and labels.dim() > 1 and _countable(labels)


def rows_of(batch: Any) -> int:
    """Rows of a collated batch: the first dimension of its first tensor."""
    for value in _values(batch):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return int(value.shape[0])
        if isinstance(value, (list, tuple, Mapping)) and not isinstance(value, str):
            inner = rows_of(value)
            if inner:
                return inner
    return 0


def find_loss_rule(
    call: LossCall,
    batch: Any,
    *,
    world_size: int,
    shifts_labels: bool,
    relative_noise: float = 1e-5,
    parts: tuple[Any, Any] | None = None,
) -> LossRule:
    """Watch a loss on a small batch.

    Args:
        call: (batch, item count or None) -> scalar loss, deterministic (evaluation mode), without side effects.
        batch: A collated batch of at least 3 rows.
        world_size: Number of ranks.
        shifts_labels: True where the model predicts each token from the ones before it.
        relative_noise: Rounding error to expect of a loss value; about 1e-5 in fp32, 5e-3 in half precision.
        parts: The same rows collated as two batches, used where there are no labels; None: cut out of `batch`, which is
            wrong where a collate function does not make one row of each sample (pairs of completions).

    Returns:
        The rule. `kind` is `unknown` where the loss is neither a mean, a sum, nor a sum over the given count, as with
        losses that compare the rows of a batch with each other.
    """
    if _labels(batch) is not None or parts is None:
        batch = _unevenly_labelled(_labelled_rows(batch))
        parts = (_rows(batch, 0, 1), _rows(batch, 1, rows_of(batch)))
    rule = _honoured_rule(call, batch, world_size=world_size, shifts_labels=shifts_labels)
    return rule or _plain_rule(call, batch, parts, shifts_labels=shifts_labels, relative_noise=relative_noise)


def _honoured_rule(call: LossCall, batch: Any, *, world_size: int, shifts_labels: bool) -> LossRule | None:
    if _labels(batch) is None:
        return None
    items = "shifted_tokens" if shifts_labels else "tokens"
    count = count_items(batch, items)
    once = _value(call, batch, count)
    twice = _value(call, batch, 2 * count)
    if once is None or twice is None or not _close(once, 2 * twice) or _close(once, 0.0):
        return None
    plain = _value(call, batch, None)
    scaled = plain is not None and world_size > 1 and _close(once, world_size * plain)
    return LossRule(kind=HONOURED, items=items, scale=float(world_size) if scaled else 1.0)


def _plain_rule(
    call: LossCall, batch: Any, parts: tuple[Any, Any], *, shifts_labels: bool, relative_noise: float
) -> LossRule:
    candidates = _candidate_items(batch, shifts_labels=shifts_labels)
    # One and the same count for all three: a loss that reads it without honouring it sees what it sees in training.
    given = None if _labels(batch) is None else count_items(batch, candidates[0])
    first, second, whole = (_value(call, part, given) for part in (*parts, batch))
    if first is None or second is None or whole is None:
        return LossRule(kind=UNKNOWN, items=candidates[0])
    errors = [abs(_mean_over(items, parts, (first, second)) - whole) for items in candidates]
    # The rules differ by little where the two parts have nearly the same loss: the first within rounding of the best wins.
    noise = relative_noise * abs(whole) + 1e-9
    if min(errors) <= 4 * noise:
        best = next(i for i, error in enumerate(errors) if error <= min(errors) + noise)
        return LossRule(kind=MEAN, items=candidates[best])
    if abs(first + second - whole) <= 4 * noise:
        return LossRule(kind=SUM, items=candidates[0])
    return LossRule(kind=UNKNOWN, items=candidates[0])


def _candidate_items(batch: Any, *, shifts_labels: bool) -> tuple[str, ...]:
    labels = _labels(batch)
    if labels is None or labels.dim() < 2 or not _countable(labels):
        return ("rows",)
    return ("shifted_tokens", "tokens", "rows") if shifts_labels else ("tokens", "shifted_tokens", "rows")


def _mean_over(items: str, parts: tuple[Any, Any], values: tuple[float, float]) -> float:
    counts = [count_items(part, items) for part in parts]
    return sum(n * value for n, value in zip(counts, values, strict=True)) / max(1, sum(counts))


def _value(call: LossCall, batch: Any, count: int | None) -> float | None:
    labels = _labels(batch)
    given = None if count is None else torch.tensor(count, device=labels.device if labels is not None else None)
    try:
        with torch.no_grad():
            return float(call(_copy(batch), given))
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
        # A loss that cannot be called this way does not follow the rule that is being tried.
        return None


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-2 * max(abs(a), abs(b)) + 1e-9


def _labels(batch: Any) -> torch.Tensor | None:
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get("labels", batch.get("label"))
    return labels if isinstance(labels, torch.Tensor) else None


def _countable(labels: torch.Tensor) -> bool:
    return not labels.is_floating_point() and labels.dim() > 0


def _values(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, (list, tuple)) else [batch]


def _copy(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def _rows(batch: Any, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of every tensor that has one entry per row."""
    total = rows_of(batch)

    def cut(value: Any) -> Any:
        per_row = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == total
        return value[start:stop] if per_row else value

    if isinstance(batch, Mapping):
        return {key: cut(value) for key, value in batch.items()}
    return type(batch)(cut(value) for value in batch) if isinstance(batch, (list, tuple)) else cut(batch)


def _labelled_rows(batch: Any) -> Any:
    """As many rows, all of them with labels that count: a mean over a row without any is 0/0 and shows nothing."""
    labels = _labels(batch)
    if labels is None or labels.dim() < 2 or not _countable(labels):
        return batch
    counted = (labels[..., 1:] != IGNORED_LABEL).flatten(1).any(dim=1).nonzero().flatten()
    total = rows_of(batch)
    if len(counted) in (0, total):
        return batch
    chosen = counted[torch.arange(total, device=counted.device) % len(counted)]
    return {
        key: value[chosen] if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == total else value
        for key, value in batch.items()
    }


def _unevenly_labelled(batch: Any) -> Any:
    """The batch with part of its first row's labels ignored, so that means over rows and over tokens differ."""
    labels = _labels(batch)
    if labels is None or labels.dim() < 2 or not _countable(labels):
        return batch
    uneven = labels.clone()
    columns = uneven.shape[-1]
    counted = (uneven[0] != IGNORED_LABEL).nonzero()
    if len(counted) > 2:
        # Keep the first position of the other rows: a mean over shifted labels then differs from one over all labels.
        uneven[0, ..., : max(1, columns // 2)] = IGNORED_LABEL
        if not (uneven[0] != IGNORED_LABEL).any():
            uneven[0] = labels[0]
            uneven[0, ..., :1] = IGNORED_LABEL
    key = "labels" if "labels" in batch else "label"
    return {**batch, key: uneven}
