"""The cases of the fine-tuning suite; importable without torch."""

from __future__ import annotations

CASES = (
    *(f"lora-zero{stage}" for stage in range(4)),
    "lora_smoothed",
    "lora_profiled",
    "checkpointed-zero2",
    "checkpointed-zero3",
    "bf16-zero1",
    "bf16-zero2",
    "neftune",
    "sft-zero1",
    "sft-zero2",
    "sft-zero3",
    "sft_packed",
    "sft_by_length",
    "sft_plain_arguments",
    "sft_evaluated",
    "dpo-zero1",
    "dpo-zero2",
    "dpo_with_reference_model",
    "dpo_evaluated",
    "grpo_refused",
)
