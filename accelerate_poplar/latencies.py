"""Tables of measured per-layer times: real curves for the simulator and the planner's benchmarks.

The file is JSON with two keys. `models`: name -> hidden_size, num_layers, parameters_per_layer and total_parameters.
`curves`: a list of objects with model, gpu, seq_len, dtype (`float16`, `bfloat16` or `float32`), forward_ms and
backward_ms; entry i of these lists is the time of one layer with i + 1 samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ProfileError, raise_together
from .model_shape import ModelShape
from .profiles import Measurement, read_json


@dataclass(frozen=True, kw_only=True)
class LayerCurve:
    """Measured times of one layer on one device."""

    model: str
    """Name of the model, a key of the table's models."""
    gpu: str
    """Name of the device."""
    seq_len: int
    """Tokens per sample."""
    dtype: str
    """`float16`, `bfloat16` or `float32`."""
    layer_time_s: tuple[float, ...]
    """Seconds of forward and backward; index = samples - 1."""

    def points(self, num_layers: int) -> tuple[Measurement, ...]:
        """Measurements of a model with `num_layers` such layers; memory is not measured (0)."""
        return tuple(
            Measurement(micro_batch_size=index + 1, step_time_s=seconds * num_layers, peak_memory_bytes=0)
            for index, seconds in enumerate(self.layer_time_s)
        )


@dataclass(frozen=True, kw_only=True)
class LatencyTable:
    """All curves of one file."""

    shapes: Mapping[str, Mapping[str, int]]
    """Model name -> its figures."""
    curves: tuple[LayerCurve, ...]
    """Curves in the order of the file."""

    @classmethod
    def load(cls, path: str | Path) -> LatencyTable:
        """Read a file.

        Raises:
            ProfileError: The file is missing or not of this form; names every curve that is wrong.
        """
        data = read_json(path, ProfileError)
        if not isinstance(data, Mapping) or not isinstance(data.get("curves"), list):
            raise ProfileError(f"{path}: a latency table is an object with a list `curves`.")
        problems: list[str] = []
        curves = [_read_curve(f"{path}: curves[{i}]", item, problems) for i, item in enumerate(data["curves"])]
        raise_together(problems, ProfileError)
        return cls(shapes=dict(data.get("models", {})), curves=tuple(curve for curve in curves if curve is not None))

    def select(self, *, model: str, seq_len: int, dtype: str) -> dict[str, LayerCurve]:
        """Curves of one model, length and dtype by device; the first where a device has several."""
        found: dict[str, LayerCurve] = {}
        for curve in self.curves:
            if (curve.model, curve.seq_len, curve.dtype) == (model, seq_len, dtype):
                found.setdefault(curve.gpu, curve)
        return found

    def shape(self, model: str, *, seq_len: int) -> ModelShape:
        """The model's figures, without an output layer, which the table does not time.

        Raises:
            ProfileError: The table has no figures of that model.
        """
        figures = self.shapes.get(model)
        if figures is None:
            raise ProfileError(f"model {model!r} has no entry in `models`. Known: {', '.join(self.shapes)}.")
        return ModelShape(
            name=model,
            num_layers=figures["num_layers"],
            hidden_size=figures["hidden_size"],
            layer_parameters=figures["parameters_per_layer"],
            vocab_size=0,
            num_parameters=figures["total_parameters"],
            seq_len=seq_len,
        )


def _read_curve(where: str, item: Any, problems: list[str]) -> LayerCurve | None:
    if not isinstance(item, Mapping):
        problems.append(f"{where}: must be an object, not {item!r}.")
        return None
    missing = [key for key in ("model", "gpu", "seq_len", "dtype", "forward_ms", "backward_ms") if key not in item]
    if missing:
        problems.append(f"{where}: {', '.join(f'`{key}`' for key in missing)} missing.")
        return None
    forward, backward = item["forward_ms"], item["backward_ms"]
    if not _are_times(forward) or not _are_times(backward) or len(forward) != len(backward) or not forward:
        problems.append(f"{where}: `forward_ms` and `backward_ms` must be lists of equally many positive numbers.")
        return None
    return LayerCurve(
        model=str(item["model"]),
        gpu=str(item["gpu"]),
        seq_len=int(item["seq_len"]),
        dtype=str(item["dtype"]),
        layer_time_s=tuple((f + b) / 1e3 for f, b in zip(forward, backward, strict=True)),
    )


def _are_times(values: Any) -> bool:
    return isinstance(values, Sequence) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) and v > 0 for v in values
    )
