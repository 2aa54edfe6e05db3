"""The parts of the examples that need no ranks: sizes of the models, rows, the choice of text."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from tests.core.scripts import load_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(path: str) -> ModuleType:
    return load_file(EXAMPLES / path, "example_" + path.replace("/", "_").removesuffix(".py"))


TEXT = load("text_data.py")
LLAMA = load("llama/train.py")
BERT = load("bert/train.py")


@pytest.mark.parametrize(("size", "billions"), [("0.5b", 0.50), ("1.1b", 1.10)])
def test_llama_sizes(size: str, billions: float) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA.SIZES[size]))
    assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(("size", "millions"), [("base", 109.5), ("large", 335.2)])
def test_bert_sizes(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(**BERT.SIZES[size]))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.5)


@given(lines=st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=8), row_len=st.integers(1, 5))
def test_packed_rows_are_the_text_in_order(lines: list[list[int]], row_len: int) -> None:
    tokens = [token for line in lines for token in line]
    if len(tokens) < row_len:
        with pytest.raises(SystemExit):
            TEXT.pack(lines, row_len)
        return
    rows = TEXT.pack(lines, row_len)
    assert all(len(row) == row_len for row in rows)
    assert list(chain.from_iterable(rows)) == tokens[: len(tokens) // row_len * row_len]
    assert TEXT.pack(lines, row_len, 1) == rows[:1]


def write_texts(folder: Path, *names: str) -> None:
    for name in names:
        (folder / f"{name}.txt").write_text(f"some {name} text\n\n \nmore\n")


@pytest.mark.parametrize(
    ("files", "expected", "said"),
    [
        (("train", "valid", "test"), ("train", "valid"), "train.txt"),
        (("valid", "test"), ("valid", "test"), "there is no train.txt"),
    ],
)
def test_text_of_a_folder(files: tuple[str, ...], expected: tuple[str, str], said: str, tmp_path: Path) -> None:
    write_texts(tmp_path, *files)
    training, evaluation, source = TEXT.load_text(str(tmp_path))
    assert (training, evaluation) == tuple([f"some {name} text", "more"] for name in expected)
    assert said in source


def test_a_folder_without_text_is_named(tmp_path: Path) -> None:
    write_texts(tmp_path, "valid")
    with pytest.raises(SystemExit, match=r"no test\.txt in it"):
        TEXT.load_text(str(tmp_path))


def test_without_a_hub_the_text_is_generated_and_always_the_same() -> None:
    training, evaluation, source = TEXT.load_text(None)
    assert "generated text" in source
    assert training == TEXT.load_text(None)[0]
    assert training[0] != evaluation[0]
    assert {word for line in evaluation for word in line.split()} <= {w for line in training for w in line.split()}


def test_masked_rows_hide_the_stated_share_and_label_nothing_else(tmp_path: Path) -> None:
    lines = TEXT.load_text(None)[0][:400]
    script = BERT.ScriptArguments(seq_len=32, vocab_size=300)
    tokenizer = BERT.make_tokenizer(script, lines, tmp_path)
    rows = BERT.make_rows(script, tokenizer, lines, None)
    ids, labels = torch.tensor(rows["input_ids"]), torch.tensor(rows["labels"])
    assert ids.shape == labels.shape == (len(rows), 32)
    chosen = labels != BERT.NOT_A_LABEL
    assert not chosen[:, [0, -1]].any()
    assert float(chosen[:, 1:-1].float().mean()) == pytest.approx(0.15, abs=0.01)
    assert float((ids[chosen] == tokenizer.mask_token_id).float().mean()) == pytest.approx(0.8, abs=0.02)
    assert not (ids[~chosen] == tokenizer.mask_token_id).any()
    assert rows["input_ids"] == BERT.make_rows(script, tokenizer, lines, None)["input_ids"]


def test_a_kept_tokenizer_is_used_again(tmp_path: Path) -> None:
    lines = TEXT.load_text(None)[0][:200]
    script = LLAMA.ScriptArguments(vocab_size=300)
    first = LLAMA.make_tokenizer(script, lines, tmp_path)
    again = LLAMA.make_tokenizer(script, ["quite different text"], tmp_path)
    assert len(first) == 300
    assert again.get_vocab() == first.get_vocab()
    assert again.decode(again(lines[0])["input_ids"]) == lines[0]
