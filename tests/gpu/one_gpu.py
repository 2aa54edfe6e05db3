"""The model and the rows of the tests on a GPU."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEQ_LEN, VOCABULARY = 256, 8192


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=6,
            num_attention_heads=8,
            use_cache=False,
        )
    )


def rows(size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (size, SEQ_LEN))
    return {"input_ids": ids, "labels": ids}
