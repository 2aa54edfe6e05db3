"""DeepSpeed checkpoints whose training state is in unequal shares: what they are, and how to make the shares equal.

DeepSpeed's own tools count on equal shares under ZeRO stage 3, and a run with other shares or another number of ranks
needs DeepSpeed's universal form; both start from what `to_even` writes, which is an ordinary DeepSpeed checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .checkpoint_cuts import FlatGroups, SingleParameters
from .errors import ConfigError
from .plan import PLAN_FILE_NAME
from .state_layout import StateShares
from .state_record import RECORD_KEY, ROUTE, check_record, recorded_shares

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MODEL_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_OPTIMIZER = "optimizer_state_dict"


def saved_shares(folder: str | Path) -> StateShares | None:
    """The shares of the training state in a checkpoint; None: they are equal.

    Args:
        folder: A folder with a `latest` file, or the folder it names.

    Raises:
        ConfigError: The folder holds no DeepSpeed checkpoint with sharded state.
    """
    files = _rank_files(_tag_folder(Path(folder)), _OPTIMIZER_FILE)
    return recorded_shares(_load(files[0])[_OPTIMIZER].get(RECORD_KEY))


def check_resume(folder: str | Path, *, fractions: Sequence[float] | None, world_size: int) -> None:
    """Refuse to resume from state that was cut for other shares or another number of ranks.

    Args:
        folder: As `saved_shares`.
        fractions: This run's shares, one per rank; None: even.
        world_size: Number of ranks.

    Raises:
        ConfigError: It was; names both and the ways to go on. Or the folder holds no such checkpoint.
    """
    files = _rank_files(_tag_folder(Path(folder)), _OPTIMIZER_FILE)
    if len(files) != world_size:
        raise ConfigError(
            f"{folder}: the checkpoint's training state is cut for {len(files)} ranks, this run has {world_size}. "
            f"{ROUTE}."
        )
    shares = None if fractions is None else StateShares(fractions=tuple(fractions))
    check_record(_load(files[0])[_OPTIMIZER].get(RECORD_KEY), shares)


def to_even(folder: str | Path, output: str | Path | None = None) -> Path:
    """Write a copy of a checkpoint in which every rank has an equal share of the training state.

    The copy is an ordinary DeepSpeed checkpoint for as many ranks: a run with even shares resumes from it exactly, and
    `zero_to_fp32.py` and `ds_to_universal.py --inject_missing_state` read it. One rank's file is written at a time;
    the files being read are mapped into memory, not loaded.

    Args:
        folder: A folder with a `latest` file, or the folder it names. It is not changed.
        output: Where the copy goes; must not exist. None: `folder` with `-even` at the end of its name.

    Returns:
        The folder of the copy.

    Raises:
        ConfigError: The folder holds no checkpoint with unequal shares, some rank's file is missing, or the output
            exists.
    """
    source = Path(folder).resolve()
    target = Path(output) if output is not None else source.with_name(source.name + "-even")
    if target.exists():
        raise ConfigError(f"{target}: exists already. Remove it, or name another output folder.")
    tag = _tag_folder(source)
    files = _rank_files(tag, _OPTIMIZER_FILE)
    loaded = [_load(path) for path in files]
    states = [content[_OPTIMIZER] for content in loaded]
    shares = recorded_shares(states[0].get(RECORD_KEY))
    if shares is None:
        raise ConfigError(f"{source}: the training state is in even shares already; nothing needs to be converted.")
    if len(files) != shares.world_size:
        raise ConfigError(
            f"{tag}: has the state of {len(files)} ranks, but it was cut for {shares.world_size}. A rank's file is "
            "missing, or files of several checkpoints are mixed."
        )
    model_files = _rank_files(tag, _MODEL_FILE) if states[0]["zero_stage"] == 3 else []
    models = [_load(path) for path in model_files]
    cut = SingleParameters(states, models, shares) if models else FlatGroups(states, shares)
    rewritten = {path.name for path in (*files, *model_files)}
    # Under another name until it is complete, so that a half-written copy is never taken for a checkpoint.
    partial = target.with_name(f"{target.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    shutil.copytree(source, partial, ignore=lambda _, names: rewritten.intersection(names))
    place = partial / tag.relative_to(source)
    for rank, (path, content) in enumerate(zip(files, loaded, strict=True)):
        even = {key: value for key, value in cut.rank_state(rank).items() if key != RECORD_KEY}
        torch.save({**content, _OPTIMIZER: even}, place / path.name)
    if isinstance(cut, SingleParameters):
        for rank, path in enumerate(model_files):
            torch.save(cut.model_state(rank), place / path.name)
    _forget_shares(partial / PLAN_FILE_NAME)
    partial.rename(target)
    return target


def _tag_folder(folder: Path) -> Path:
    """The folder that holds the ranks' files."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder.")
    if any(_OPTIMIZER_FILE.match(path.name) for path in folder.iterdir()):
        return folder
    latest = folder / "latest"
    if latest.is_file() and (folder / latest.read_text(encoding="utf-8").strip()).is_dir():
        return folder / latest.read_text(encoding="utf-8").strip()
    raise ConfigError(
        f"{folder}: is no DeepSpeed checkpoint. Name a folder with a `latest` file (a Trainer's `checkpoint-N`), or the "
        "folder with the `*_optim_states.pt` files."
    )


def _rank_files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of all ranks, in rank order."""
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        match = pattern.match(path.name)
        if match is None:
            continue
        if int(match.group(2)) != 0:
            raise ConfigError(f"{path}: belongs to a model-parallel run, which has no uneven shares.")
        found[int(match.group(1))] = path
    if not found or sorted(found) != list(range(len(found))):
        raise ConfigError(
            f"{folder}: has sharded training state of ranks {sorted(found)}; a checkpoint of ZeRO stage 1, 2 or 3 has a "
            "file of every rank from 0. A rank could not save, or the run had no sharded state."
        )
    return [found[rank] for rank in range(len(found))]


def _load(path: Path) -> dict[str, Any]:
    # DeepSpeed pickles its loss scaler and more into these files, so they cannot be read as weights only.
    content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    if not isinstance(content, dict) or "zero_stage" not in content.get(_OPTIMIZER, {"zero_stage": 0}):
        raise ConfigError(f"{path}: holds no sharded training state of ZeRO stage 1, 2 or 3.")
    return content


def _forget_shares(path: Path) -> None:
    """Take the shares out of a plan file, if there is one."""
    if not path.is_file():
        return
    plan = json.loads(path.read_text(encoding="utf-8"))
    for rank in plan.get("ranks", ()):
        rank.pop("state_fraction", None)
    plan.pop("digest", None)
    path.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
