"""Small real models for the tests, with the loss function and the batches profiling wants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

SEQ_LEN = 64
VOCAB_SIZE = 512


def tiny_llama(layers: int = 2) -> LlamaForCausalLM:
    """A causal language model of about 0.3 million parameters."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def tiny_bert(layers: int = 2) -> BertForMaskedLM:
    """A masked language model with dropout and tied embeddings."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=4,
        )
    )


def token_loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """The model's own loss."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def token_rows(size: int) -> dict[str, torch.Tensor]:
    """Rows of random tokens."""
    ids = torch.randint(0, VOCAB_SIZE, (size, SEQ_LEN))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
