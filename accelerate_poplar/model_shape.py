"""The figures of a model that the simulator needs, from a config file or by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import ConfigError, raise_together
from .profiles import read_json

_BYTES_PER_HIDDEN_UNIT = 34
_BYTES_PER_LOGIT = 10


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer as the simulator sees it: equal layers between an embedding and a head, 16-bit compute."""

    name: str
    """Label."""
    num_layers: int
    """Transformer layers; at least 1."""
    hidden_size: int
    """Hidden size; at least 1."""
    layer_parameters: int
    """Parameters of one layer."""
    vocab_size: int
    """Entries of the output layer; 0: the output layer is left out."""
    num_parameters: int
    """Parameters of the whole model."""
    seq_len: int
    """Tokens per sample; at least 1."""

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer that a micro-step multiplies with."""
        return self.vocab_size * self.hidden_size

    def activation_bytes(self, *, checkpointing: bool = False) -> float:
        """Bytes one sample keeps for the backward pass.

        34 bytes per token, hidden unit and layer (Korthikanti et al. 2022, equation 1, with attention that does not
        store its matrix); with checkpointing 2 per layer and one full layer. Logits: 10 bytes each (16-bit, fp32 copy,
        gradient).

        Args:
            checkpointing: Whether layers are recomputed in the backward pass.
        """
        layers = (
            2 * self.num_layers + _BYTES_PER_HIDDEN_UNIT if checkpointing else _BYTES_PER_HIDDEN_UNIT * self.num_layers
        )
        return float(self.seq_len * (layers * self.hidden_size + _BYTES_PER_LOGIT * self.vocab_size))


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int) -> dict[str, Any]:
    return {
        "name": name,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": 32000,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
    }


def _bert(name: str, layers: int, hidden: int) -> dict[str, Any]:
    return {
        "name": name,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
        "vocab_size": 30522,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    }


_NAMED = {
    "llama-0.5b": _llama("llama-0.5b", 24, 1280, 20, 4, 3520),
    "llama-1.1b": _llama("llama-1.1b", 22, 2048, 32, 4, 5632),
    "llama-7b": _llama("llama-7b", 32, 4096, 32, 32, 11008),
    "bert-base": _bert("bert-base", 12, 768),
    "bert-large": _bert("bert-large", 24, 1024),
}

MODELS = tuple(_NAMED)
"""Names `find_model` knows."""


def find_model(name: str | Path, *, seq_len: int | None = None) -> ModelShape:
    """A model by name, or from a `config.json` as transformers writes it.

    Args:
        name: One of `MODELS`, or the path of a config file.
        seq_len: Tokens per sample; None: the model's `max_position_embeddings`.

    Raises:
        ConfigError: The name is neither, or the config lacks a figure.
    """
    if str(name) in _NAMED:
        shape = shape_from_config(_NAMED[str(name)], source=str(name))
    elif Path(name).is_file():
        shape = shape_from_config(read_json(name, ConfigError), source=str(name))
    else:
        raise ConfigError(f"model {str(name)!r} is neither a file nor one of {', '.join(MODELS)}.")
    if seq_len is None:
        return shape
    if seq_len < 1:
        raise ConfigError(f"seq_len is {seq_len}; it must be at least 1.")
    return replace(shape, seq_len=seq_len)


def shape_from_config(config: Any, *, source: str = "config") -> ModelShape:
    """Count parameters from the keys of a transformers config.

    Args:
        config: num_hidden_layers, hidden_size, num_attention_heads and vocab_size; optionally intermediate_size,
            num_key_value_heads, hidden_act, tie_word_embeddings, max_position_embeddings.
        source: Name for messages.

    Raises:
        ConfigError: Names every figure that is missing or out of range.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source}: a model config is an object, not {type(config).__name__}.")
    problems: list[str] = []

    def whole(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{source}: `{key}` is {value!r}; it must be a whole number of at least 1.")
            return 1
        return value

    layers, hidden = whole("num_hidden_layers"), whole("hidden_size")
    heads, vocabulary = whole("num_attention_heads"), whole("vocab_size")
    kv_heads, inner = whole("num_key_value_heads", heads), whole("intermediate_size", 4 * hidden)
    seq_len = whole("max_position_embeddings", 2048)
    raise_together(problems, ConfigError)
    gated = config.get("hidden_act") in ("silu", "swish", "geglu", "swiglu")
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads
    layer = attention + (3 if gated else 2) * hidden * inner + 2 * hidden
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return ModelShape(
        name=str(config.get("name", config.get("model_type", source))),
        num_layers=layers,
        hidden_size=hidden,
        layer_parameters=layer,
        vocab_size=vocabulary,
        num_parameters=layers * layer + embeddings + hidden,
        seq_len=seq_len,
    )
