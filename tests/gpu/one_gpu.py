"""The model, the rows and the profile of the tests on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_poplar.comm import SingleRank
from accelerate_poplar.measure import MeasuredProfile, profile_cluster

from ..core.tiny_models import token_loss

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


def profile(dtype: torch.dtype, *, largest_micro_batch: int, **changes: Any) -> MeasuredProfile:
    """The profile of the GPU; `changes` are arguments of `profile_cluster`."""
    usual: dict[str, Any] = {
        "model": new_model(),
        "ranks": SingleRank(),
        "device": torch.device("cuda", 0),
        "memory_fraction": 0.9,
        "relative_error": 0.03,
    }
    return profile_cluster(
        loss_fn=token_loss,
        make_batch=rows,
        dtype=dtype,
        zero_stages=(0,),
        largest_micro_batch=largest_micro_batch,
        user_caps=None,
        budget_s=30.0,
        model_name="llama",
        seq_len=SEQ_LEN,
        **{**usual, **changes},
    )
