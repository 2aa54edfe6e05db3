"""Profiles kept on disk, so that a second start measures nothing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .comm import Ranks
from .errors import ProfileError
from .model_state import full_shape
from .profiles import ClusterProfile, read_json

CACHE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ProfileCache:
    """A folder of profiles, one file per cluster and model.

    Only rank 0 reads and writes; what it finds goes to every rank, so that a folder that only some hosts see cannot
    make ranks disagree.
    """

    folder: Path
    """Made when the first profile is stored."""
    refresh: bool = False
    """True: what is stored is not used, only replaced."""

    def load(self, ranks: Ranks, key: str, kind: type[ClusterProfile] = ClusterProfile) -> ClusterProfile | None:
        """The stored profile on every rank, or None; a file that cannot be read counts as none.

        Args:
            ranks: The other ranks; all must call it together.
            key: As made by `cache_key`.
            kind: Class to read it as.
        """
        found = None
        if ranks.rank == 0 and not self.refresh:
            try:
                entry = read_json(self._path(key), ProfileError)
                found = kind.from_dict(entry["profile"], source=str(self._path(key)))
            except (ProfileError, KeyError, TypeError):
                found = None
        box: tuple[ClusterProfile | None] = ranks.broadcast((found,))
        return box[0]

    def store(self, ranks: Ranks, key: str, parts: Mapping[str, Any], profile: ClusterProfile) -> None:
        """Write a profile on rank 0; a folder that cannot be written to is not an error, only no cache."""
        if ranks.rank != 0:
            return
        path = self._path(key)
        text = json.dumps({"version": CACHE_VERSION, "key": parts, "profile": profile.to_dict()}, indent=2)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(text + "\n", encoding="utf-8")
            draft.replace(path)
        except OSError:
            return

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def cache_key(parts: Mapping[str, Any]) -> str:
    """A file name from everything a profile depends on; equal parts give equal names on every machine."""
    text = json.dumps({"version": CACHE_VERSION, **parts}, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def model_fingerprint(model: nn.Module) -> str:
    """Digest of what decides a model's speed and memory: its config, modules, parameters and checkpointing.

    Values of parameters do not count; whether they are trainable does.
    """
    config: Any = getattr(model, "config", None)
    described = {
        "config": config.to_dict() if hasattr(config, "to_dict") else str(config),
        "modules": [(name, type(module).__qualname__) for name, module in model.named_modules()],
        "parameters": [(name, list(full_shape(p)), p.requires_grad) for name, p in model.named_parameters()],
        "checkpointing": any(bool(getattr(module, "gradient_checkpointing", False)) for module in model.modules()),
    }
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
