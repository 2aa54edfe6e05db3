"""`accelerate-poplar profile`: measure this cluster for a model and write `profiles.json`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from .errors import ConfigError

EPILOG = """\
Start it as training is started, one process per device:
  accelerate launch --config_file poplar.yaml -m accelerate_poplar profile --model config.json --global-batch-size 256
then plan with what it wrote:
  accelerate-poplar plan --profiles profiles.json --global-batch-size 256 --zero-stage auto"""


def add_parsers(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "profile",
        help="measure this cluster for a model and write profiles.json",
        description="Measure every rank's step time and memory for a model built from its configuration, and the\n"
        "collectives between the ranks. Nothing is trained and nothing is downloaded but the configuration.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="config.json, its folder, or a hub name")
    parser.add_argument("--task", default="causal-lm", choices=("causal-lm", "masked-lm"), help="default: causal-lm")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens per sample (default: the model's maximum)")
    parser.add_argument(
        "--global-batch-size",
        type=int,
        required=True,
        metavar="N",
        help="samples per optimizer step; the largest size",
    )
    parser.add_argument("--zero-stage", default="auto", metavar="STAGE", help="0 to 3 or auto, all of them (default)")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"), help="compute dtype")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--output", default="profiles.json", metavar="FILE", help="default: profiles.json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure on every rank; rank 0 writes the file and prints the plan that follows from it.

    Raises:
        ConfigError: The configuration cannot be read, or a size is out of range.
    """
    if args.global_batch_size < 1 or (args.seq_len is not None and args.seq_len < 2):
        raise ConfigError("--global-batch-size must be at least 1 and --seq-len at least 2.")
    # The host libraries take seconds to import; `--help` should not.
    from .arguments import PoplarTrainingArguments
    from .trainer import PoplarTrainer

    with tempfile.TemporaryDirectory() as scratch:
        settings = PoplarTrainingArguments(
            output_dir=scratch,
            per_device_train_batch_size=1,
            bf16=args.dtype == "bf16",
            fp16=args.dtype == "fp16",
            activation_checkpointing=args.checkpointing,
            report_to=[],
            poplar_zero_stage=args.zero_stage,
            poplar_global_batch_size=str(args.global_batch_size),
            poplar_reprofile="true",
        )
        model, rows = _model_and_rows(args)
        trainer = PoplarTrainer(model=model, args=settings, train_dataset=rows)
        if args.checkpointing:
            model.activation_checkpointing_enable()
        trainer.poplar_prepare()
        if trainer.is_world_process_zero():
            trainer.poplar.profile.save(args.output)
            print(f"{Path(args.output).resolve()}")
    return 0


def _model_and_rows(args: argparse.Namespace) -> tuple[Any, list[dict[str, Any]]]:
    """The model with random weights, and a few rows of random tokens of the wanted length."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    try:
        config = AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--model {args.model}: no model configuration can be read there: {problem}") from None
    builder = AutoModelForCausalLM if args.task == "causal-lm" else AutoModelForMaskedLM
    length = args.seq_len or config.max_position_embeddings
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (8, length), generator=generator)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
    return builder.from_config(config), rows
