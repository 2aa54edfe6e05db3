"""Text for the examples: a local folder, wikitext-2 from the hub, or generated where there is neither."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
from datasets import DatasetDict, load_dataset
from huggingface_hub import constants

DATASET = ("Salesforce/wikitext", "wikitext-2-v1")


@dataclass
class TextArguments:
    """The text, and how it is cut into rows."""

    seq_len: int = field(default=128, metadata={"help": "tokens per row"})
    data_dir: str | None = field(
        default=None,
        metadata={
            "help": "folder with valid.txt, test.txt and perhaps train.txt, or with a folder wikitext-2 that has them; "
            "from the hub if left out"
        },
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "a tokenizer of the hub, or a folder; trained on the text if left out"}
    )
    vocab_size: int = field(default=2048, metadata={"help": "tokens of a tokenizer that is trained here"})
    max_train_rows: int | None = field(default=None, metadata={"help": "train on this many rows at most"})
    max_eval_rows: int | None = field(default=None, metadata={"help": "evaluate on this many rows at most"})


def load_text(data_dir: str | None) -> tuple[list[str], list[str], str]:
    """Find lines to train on and lines to evaluate on; empty lines are left out.

    Args:
        data_dir: A folder with `valid.txt` and `test.txt`, and `train.txt` if there is one; None: the hub.

    Returns:
        The training lines, the evaluation lines, and a sentence that says what they are.
    """
    train, evaluation, source = _from_folder(Path(data_dir)) if data_dir is not None else _from_hub_or_generated()
    return [line for line in train if line.strip()], [line for line in evaluation if line.strip()], source


def tokenizer_folder(output_dir: str, checkpoint: str | None) -> Path:
    """Where the run's tokenizer is kept: beside the checkpoint a run continues from, else in the output directory.

    Training one again may number equally frequent pieces otherwise, and the rows would not be the same.
    """
    saved = Path(checkpoint) if checkpoint and checkpoint != "last" else None
    return saved if saved is not None and (saved / "tokenizer.json").is_file() else Path(output_dir) / "tokenizer"


def pack(token_ids: Iterable[list[int]], row_len: int, limit: int | None = None) -> list[list[int]]:
    """One long line of tokens, cut into rows.

    Args:
        token_ids: The tokens of each line of text.
        row_len: Tokens per row; a rest that fills no row is left out.
        limit: Number of rows at most.

    Returns:
        The rows, each `row_len` tokens.
    """
    tokens = list(chain.from_iterable(token_ids))
    rows = [tokens[start : start + row_len] for start in range(0, len(tokens) - row_len + 1, row_len)][:limit]
    if not rows:
        raise SystemExit(f"the text has {len(tokens)} tokens, too few for one row of {row_len}.")
    return rows


def _from_hub_or_generated() -> tuple[list[str], list[str], str]:
    try:
        parts = _from_hub()
    except (ConnectionError, FileNotFoundError) as problem:
        return (
            _generated(seed=0, lines=4000),
            _generated(seed=1, lines=400),
            f"generated text, because {' '.join(DATASET)} could not be loaded: {problem}; "
            "pass --data_dir FOLDER to train on text of your own",
        )
    return parts["train"]["text"], parts["validation"]["text"], " ".join(DATASET)


def _from_hub() -> DatasetDict:
    # Asked first, because the hub's own retries would take half a minute on every rank.
    if not constants.HF_HUB_OFFLINE and not _hub_answers():
        raise ConnectionError("no connection to the hub (set HF_HUB_OFFLINE=1 to use a copy in the cache)")
    return load_dataset(*DATASET)


def text_files(folder: Path) -> tuple[Path, Path]:
    """The files of a folder to train on and to evaluate on.

    Raises:
        SystemExit: They are not there.
    """
    if not (folder / "valid.txt").is_file() and (folder / "wikitext-2" / "valid.txt").is_file():
        folder = folder / "wikitext-2"
    names = ("train.txt", "valid.txt") if (folder / "train.txt").is_file() else ("valid.txt", "test.txt")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise SystemExit(f"--data_dir {folder}: no {' and no '.join(missing)} in it. It needs valid.txt and test.txt.")
    return folder / names[0], folder / names[1]


def _from_folder(folder: Path) -> tuple[list[str], list[str], str]:
    training, evaluation = text_files(folder)
    lines = [path.read_text(encoding="utf-8").splitlines() for path in (training, evaluation)]
    remark = "" if training.name == "train.txt" else " (there is no train.txt)"
    return (
        lines[0],
        lines[1],
        f"{training.name} of {training.parent} to train on{remark}, {evaluation.name} to evaluate on",
    )


def _hub_answers(timeout_s: float = 5.0) -> bool:
    if getproxies():
        return True  # a direct connection would prove nothing
    address = urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((address.hostname, address.port or 443), timeout=timeout_s):
            return True
    except OSError:
        return False


def _generated(*, seed: int, lines: int, words_per_line: int = 60) -> list[str]:
    """Sentences of made-up words in which a word narrows down the next one, so that there is something to learn."""
    language = np.random.default_rng(20)  # the same words and the same habits for every seed
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    words = ["".join(language.choice(syllables, size=language.integers(1, 4))) for _ in range(500)]
    followers = language.integers(0, len(words), size=(len(words), 8))
    speaker = np.random.default_rng(seed)
    habits = speaker.geometric(0.35, size=(lines, words_per_line)).clip(max=8) - 1
    text = []
    for line_habits in habits:
        word = int(speaker.integers(len(words)))
        line = []
        for habit in line_habits:
            line.append(words[word])
            word = int(followers[word, habit])
        text.append(" ".join(line) + " .")
    return text
