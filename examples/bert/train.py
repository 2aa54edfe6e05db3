r"""Train a BERT from scratch to fill in masked tokens, with Trainer changed to PoplarTrainer.

Run it with, for instance,

    accelerate launch --config_file configs/one_host_gpus.yaml \
        examples/bert/train.py --size base --output_dir outputs/bert
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from accelerate_poplar import PoplarTrainer, PoplarTrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[1]))
from text_data import TextArguments, load_text, pack, tokenizer_folder

SIZES = {
    "tiny": {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512},
    "base": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
    },
    "large": {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 30522,
    },
}
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
NOT_A_LABEL = -100


@dataclass
class ScriptArguments(TextArguments):
    """What to train, and on which text."""

    size: str = field(default="tiny", metadata={"help": f"size of the model: {', '.join(SIZES)}"})
    mask_share: float = field(default=0.15, metadata={"help": "share of the tokens to be filled in"})


def make_tokenizer(script: ScriptArguments, lines: list[str], folder: Path) -> PreTrainedTokenizerFast:
    """The named tokenizer, or a WordPiece one trained on the text and kept in `folder`."""
    if script.tokenizer_name is not None:
        return AutoTokenizer.from_pretrained(script.tokenizer_name)
    if not (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL_TOKENS["unk_token"]))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=script.vocab_size, special_tokens=list(SPECIAL_TOKENS.values()), show_progress=False
        )
        tokenizer.train_from_iterator(lines, trainer)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_rows(
    script: ScriptArguments, tokenizer: PreTrainedTokenizerFast, lines: list[str], limit: int | None
) -> Dataset:
    """Packed rows with some tokens masked.

    The masks are drawn here, once, and not while batches are put together: a row then looks the same whichever rank
    runs it, and the loss curve does not depend on the plan.
    """
    ids = tokenizer(lines, add_special_tokens=False)["input_ids"]
    rows = np.array(pack(ids, script.seq_len - 2, limit))
    random = np.random.default_rng(0)
    chosen = random.random(rows.shape) < script.mask_share
    labels = np.where(chosen, rows, NOT_A_LABEL)
    # Of the chosen tokens 80% are hidden, 10% replaced by another and 10% left as they are, as in BERT's paper.
    fate = random.random(rows.shape)
    masked = np.where(chosen & (fate < 0.8), tokenizer.mask_token_id, rows)
    masked = np.where(chosen & (fate >= 0.9), random.integers(0, len(tokenizer), rows.shape), masked)

    def framed(body: np.ndarray, first: int, last: int) -> list[list[int]]:
        return np.pad(body, ((0, 0), (1, 1)), constant_values=((0, 0), (first, last))).tolist()

    return Dataset.from_dict(
        {
            "input_ids": framed(masked, tokenizer.cls_token_id, tokenizer.sep_token_id),
            "labels": framed(labels, NOT_A_LABEL, NOT_A_LABEL),
        }
    )


def main() -> None:
    """Train, evaluate, save."""
    script, args = HfArgumentParser((ScriptArguments, PoplarTrainingArguments)).parse_args_into_dataclasses()
    if script.size not in SIZES:
        raise SystemExit(f"--size {script.size}: choose one of {', '.join(SIZES)}.")
    set_seed(args.seed)

    train_lines, eval_lines, source = load_text(script.data_dir)
    with args.main_process_first(local=False, desc="making the tokenizer"):
        tokenizer = make_tokenizer(script, train_lines, tokenizer_folder(args.output_dir, args.resume_from_checkpoint))
    train_rows = make_rows(script, tokenizer, train_lines, script.max_train_rows)
    eval_rows = make_rows(script, tokenizer, eval_lines, script.max_eval_rows)

    shape = SIZES[script.size]
    config = BertConfig(
        **{**shape, "vocab_size": max(shape.get("vocab_size", 0), len(tokenizer))},
        max_position_embeddings=max(script.seq_len, 512),
        pad_token_id=tokenizer.pad_token_id,
    )
    model = BertForMaskedLM(config)
    if args.process_index == 0:
        print(f"text: {source}; {len(train_rows)} rows of {script.seq_len} tokens to train on")
        print(f"model: BERT {script.size}, {model.num_parameters():,} parameters")

    trainer = PoplarTrainer(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    checkpoint = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir) if checkpoint == "last" else checkpoint)
    trainer.save_model()
    trainer.save_state()

    metrics = trainer.evaluate()
    metrics["eval_perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
