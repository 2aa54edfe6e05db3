r"""Train a Llama from scratch on packed rows of text, with Trainer changed to PoplarTrainer.

Run it with, for instance,

    accelerate launch --config_file configs/one_host_gpus.yaml \
        examples/llama/train.py --size 0.5b --output_dir outputs/llama
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from accelerate_poplar import PoplarTrainer, PoplarTrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[1]))
from text_data import TextArguments, load_text, pack, tokenizer_folder

SIZES = {
    "tiny": {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 352,
    },
    "0.5b": {
        "num_hidden_layers": 24,
        "hidden_size": 1280,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "intermediate_size": 3520,
        "vocab_size": 32000,
    },
    # TinyLlama's shape
    "1.1b": {
        "num_hidden_layers": 22,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
    },
}
END_OF_TEXT = "<|endoftext|>"


@dataclass
class ScriptArguments(TextArguments):
    """What to train, and on which text."""

    size: str = field(default="tiny", metadata={"help": f"size of the model: {', '.join(SIZES)}"})


def make_tokenizer(script: ScriptArguments, lines: list[str], folder: Path) -> PreTrainedTokenizerFast:
    """The named tokenizer, or a byte-level BPE trained on the text and kept in `folder`."""
    if script.tokenizer_name is not None:
        return AutoTokenizer.from_pretrained(script.tokenizer_name)
    if not (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=script.vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        tokenizer.train_from_iterator(lines, trainer)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_rows(tokenizer: PreTrainedTokenizerFast, lines: list[str], seq_len: int, limit: int | None) -> Dataset:
    """Packed rows, lines parted by the end-of-text token; every token is a label."""
    ids = tokenizer(lines, add_special_tokens=False)["input_ids"]
    rows = pack(([*line, tokenizer.eos_token_id] for line in ids), seq_len, limit)
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def main() -> None:
    """Train, evaluate, save."""
    script, args = HfArgumentParser((ScriptArguments, PoplarTrainingArguments)).parse_args_into_dataclasses()
    if script.size not in SIZES:
        raise SystemExit(f"--size {script.size}: choose one of {', '.join(SIZES)}.")
    set_seed(args.seed)

    train_lines, eval_lines, source = load_text(script.data_dir)
    with args.main_process_first(local=False, desc="making the tokenizer"):
        tokenizer = make_tokenizer(script, train_lines, tokenizer_folder(args.output_dir, args.resume_from_checkpoint))
    train_rows = make_rows(tokenizer, train_lines, script.seq_len, script.max_train_rows)
    eval_rows = make_rows(tokenizer, eval_lines, script.seq_len, script.max_eval_rows)

    shape = SIZES[script.size]
    config = LlamaConfig(
        **{**shape, "vocab_size": max(shape.get("vocab_size", 0), len(tokenizer))},
        max_position_embeddings=max(script.seq_len, 2048),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    if args.process_index == 0:
        print(f"text: {source}; {len(train_rows)} rows of {script.seq_len} tokens to train on")
        print(f"model: Llama {script.size}, {model.num_parameters():,} parameters")

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
