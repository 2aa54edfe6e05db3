r"""Fine-tune a causal language model with TRL's SFTTrainer and LoRA, put on unequal ranks by PoplarTrainerMixin.

Run it with, for instance,

    accelerate launch --config_file configs/one_host_gpus.yaml \
        examples/sft/train.py --model_name_or_path NAME --output_dir outputs/sft
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from accelerate_poplar import PoplarTrainerMixin, PoplarTrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[1]))
from text_data import TextArguments, load_text, tokenizer_folder

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
    },
}
END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"


@dataclass
class ScriptArguments(TextArguments):
    """What to fine-tune, and on which text."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "a model of the hub, or a folder; a new Llama of --size if left out"}
    )
    size: str = field(default="tiny", metadata={"help": f"size of a new model: {', '.join(SIZES)}"})
    lora_rank: int = field(default=16, metadata={"help": "rank of the adapters"})


@dataclass
class SFTArguments(SFTConfig, PoplarTrainingArguments):
    """TRL's arguments, with its defaults, and the --poplar_<name> flags."""


class PoplarSFTTrainer(PoplarTrainerMixin, SFTTrainer):
    """SFTTrainer on unequal ranks."""


def make_tokenizer(script: ScriptArguments, lines: list[str], folder: Path) -> PreTrainedTokenizerFast:
    """The model's own tokenizer, or a byte-level BPE trained on the text and kept in `folder`."""
    if script.tokenizer_name or script.model_name_or_path:
        return AutoTokenizer.from_pretrained(script.tokenizer_name or script.model_name_or_path)
    if not (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=script.vocab_size,
            special_tokens=[END_OF_TEXT, PADDING],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(lines, trainer)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PADDING).save_pretrained(
            folder
        )
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_model(script: ScriptArguments, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The named model, or a new one."""
    if script.model_name_or_path is not None:
        return AutoModelForCausalLM.from_pretrained(script.model_name_or_path)
    config = LlamaConfig(
        **SIZES[script.size],
        vocab_size=len(tokenizer),
        max_position_embeddings=max(script.seq_len, 2048),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_rows(lines: list[str], limit: int | None) -> Dataset:
    """Each line's first words as the prompt and the rest, which is what is learnt, as the completion."""
    rows = []
    for line in lines[:limit]:
        words = line.split()
        cut = max(1, min(8, len(words) // 2))
        rows.append({"prompt": " ".join(words[:cut]), "completion": " " + " ".join(words[cut:])})
    return Dataset.from_list(rows)


def main() -> None:
    """Train, evaluate, save."""
    script, args = HfArgumentParser((ScriptArguments, SFTArguments)).parse_args_into_dataclasses()
    if script.size not in SIZES:
        raise SystemExit(f"--size {script.size}: choose one of {', '.join(SIZES)}.")
    args.max_length = script.seq_len
    set_seed(args.seed)

    train_lines, eval_lines, source = load_text(script.data_dir)
    with args.main_process_first(local=False, desc="making the tokenizer"):
        tokenizer = make_tokenizer(script, train_lines, tokenizer_folder(args.output_dir, args.resume_from_checkpoint))
    if args.process_index == 0:
        print(f"text: {source}")

    trainer = PoplarSFTTrainer(
        model=make_model(script, tokenizer),
        args=args,
        train_dataset=make_rows(train_lines, script.max_train_rows),
        eval_dataset=make_rows(eval_lines, script.max_eval_rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=script.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    if args.process_index == 0:
        trainable, total = trainer.model.get_nb_trainable_parameters()
        print(f"model: {trainable:,} of {total:,} parameters are trained")
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
