"""Models, rows and loss formulas of `accelerate-poplar verify`.

A built-in kind's loss over a whole batch is written out here, apart from the code that training goes through; for the
user's own model the stock trainer's loss over the whole batch counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from .errors import ConfigError
from .verify import OWN, VerifyOptions

VOCABULARY = 256
"""Tokens of the built-in kinds: a text's bytes are its tokens."""
LENGTH = 12
"""Tokens per row of the built-in kinds."""
CLASSES = 3
IGNORED = -100

Row = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """A model, its rows, and its loss over a whole batch."""

    model: Callable[[], nn.Module]
    """Builds it; the caller seeds torch."""
    row: Callable[[int, torch.Generator], Row]
    """(number, generator) -> one row."""
    loss: Callable[[nn.Module, Row], torch.Tensor] | None
    """(model, collated batch) -> the mean over everything in it; None: what the stock trainer takes on one process."""
    trainer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the trainer."""


def find_kinds(options: VerifyOptions) -> dict[str, Kind]:
    """The kinds that were asked for.

    Raises:
        ConfigError: The user's model cannot be found or built.
    """
    tokens = None if options.data is None else Path(options.data).read_bytes()
    if options.model is not None:
        return {OWN: _own_kind(options, tokens)}
    text = None if tokens is None else list(tokens)
    kinds = {
        "llama": Kind(_tiny_llama, lambda i, g: _token_row(i, g, text), _causal_loss),
        "bert_mlm": Kind(
            lambda: BertForMaskedLM(_tiny_bert()), lambda i, g: _masked(_token_row(i, g, text), g), _token_loss
        ),
        "bert_cls": Kind(
            lambda: BertForSequenceClassification(_tiny_bert(num_labels=CLASSES)),
            lambda i, g: {**_token_row(i, g, text), "labels": torch.tensor(i % CLASSES)},
            lambda model, batch: functional.cross_entropy(_logits(model, batch), batch["labels"]),
        ),
        "module": Kind(
            _Regression,
            lambda i, g: {"features": torch.randn(6, generator=g), "labels": torch.randn((), generator=g)},
            lambda model, batch: functional.mse_loss(model(batch["features"])["logits"], batch["labels"]),
            {"compute_loss_func": _squared_error},
        ),
    }
    return {name: kinds[name] for name in options.kinds}


def make_rows(kind: Kind, count: int) -> list[Row]:
    """The first rows of a kind, the same on every rank; padding and ignored labels are spread unevenly."""
    generator = torch.Generator().manual_seed(7)
    return [kind.row(index, generator) for index in range(count)]


def collate(rows: Sequence[Row]) -> Row:
    """Rows stacked to a batch."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


# Rows


def _token_row(index: int, generator: torch.Generator, text: Sequence[int] | None, *, length: int = LENGTH) -> Row:
    ids = _tokens(index, generator, text, length=length, vocabulary=VOCABULARY)
    labels, attention = ids.clone(), torch.ones(length, dtype=torch.long)
    padded = (index * 5) % (length - 4)
    if padded:
        ids[-padded:], labels[-padded:], attention[-padded:] = 0, IGNORED, 0
    if index % 7 == 3:
        labels[:] = IGNORED
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}


def _tokens(
    index: int, generator: torch.Generator, text: Sequence[int] | None, *, length: int, vocabulary: int
) -> torch.Tensor:
    if text is None:
        return torch.randint(4, vocabulary, (length,), generator=generator)
    if len(text) < length:
        raise ConfigError(f"--data has {len(text)} tokens, a row needs {length}. Give a longer text.")
    start = (index * length) % (len(text) - length + 1)
    return torch.tensor(text[start : start + length]) % vocabulary


def _masked(row: Row, generator: torch.Generator) -> Row:
    """Only some positions keep their label, another share in every row."""
    labels = row["labels"].clone()
    labels[torch.rand(labels.shape, generator=generator) > 0.4] = IGNORED
    return {**row, "labels": labels}


# Models and losses


def _tiny_llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


def _tiny_bert(**more: Any) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **more,
    )


class _Regression(nn.Module):
    """A module that knows nothing of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layers(features).squeeze(-1)}


def _squared_error(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return functional.mse_loss(outputs["logits"], labels)


def _logits(model: nn.Module, batch: Row) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits


def _token_loss(model: nn.Module, batch: Row) -> torch.Tensor:
    return _mean_over_labels(_logits(model, batch), batch["labels"])


def _causal_loss(model: nn.Module, batch: Row) -> torch.Tensor:
    return _mean_over_labels(_logits(model, batch)[:, :-1], batch["labels"][:, 1:])


def _mean_over_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    total = functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum()


# The user's own model


def _own_kind(options: VerifyOptions, text: bytes | None) -> Kind:
    name = str(options.model)
    config = _own_config(name)
    model_class = _own_class(config)
    vocabulary = int(getattr(config, "vocab_size", VOCABULARY))
    limit = int(getattr(config, "max_position_embeddings", options.seq_len) or options.seq_len)
    length = min(options.seq_len, limit)
    tokens = None if text is None else _tokenised(name, text)
    masked = "MaskedLM" in model_class.__name__
    classes = "SequenceClassification" in model_class.__name__

    def row(index: int, generator: torch.Generator) -> Row:
        ids = _tokens(index, generator, tokens, length=length, vocabulary=vocabulary)
        attention, labels = torch.ones(length, dtype=torch.long), ids.clone()
        padded = (index * 5) % (length // 2)
        if padded:
            labels[-padded:], attention[-padded:] = IGNORED, 0
        whole = {"input_ids": ids, "attention_mask": attention, "labels": labels}
        if classes:
            return {**whole, "labels": torch.tensor(index % (config.num_labels or CLASSES))}
        return _masked(whole, generator) if masked else whole

    return Kind(lambda: model_class(config).to(torch.float32), row, None)


def _own_config(name: str) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as problem:
        raise ConfigError(
            f"--model {name}: no config of a transformers model ({problem}). Give a folder with a config.json, or a "
            "model's name on the hub."
        ) from problem
    # Ranks draw other random numbers than one process: with dropout nothing could be compared.
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    config.use_cache = False
    found: PretrainedConfig = config
    return found


def _own_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    import transformers

    named: list[Any] = [getattr(transformers, name, None) for name in config.architectures or ()]
    if type(config) in AutoModelForCausalLM._model_mapping:
        named.append(AutoModelForCausalLM._model_mapping[type(config)])
    found: type[PreTrainedModel] | None = next((one for one in named if isinstance(one, type)), None)
    if found is None or not any(word in found.__name__ for word in ("LM", "SequenceClassification")):
        raise ConfigError(
            f"--model: {found.__name__ if found else config.model_type} is not a language model or a sequence "
            "classifier; name such a class under `architectures` in its config."
        )
    return found


def _tokenised(name: str, text: bytes) -> list[int]:
    """The text in the model's own tokens; its bytes where there is no tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return list(text)
    ids: list[int] = tokenizer(text.decode("utf-8", errors="replace"), add_special_tokens=False)["input_ids"]
    # A folder without a tokenizer may give one that knows no token.
    return ids or list(text)
