"""What a checkpoint says of the shares its training state was cut by, and when a run may load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ConfigError
from .state_layout import LAYOUT_VERSION, StateShares

RECORD_KEY = "accelerate_poplar_state"
"""Key of the record in every rank's optimizer state."""

ROUTE = (
    "Resume with the shares it was saved with; or convert it with `accelerate-poplar checkpoint to-even DIR` and "
    "resume with even shares; or convert that with DeepSpeed's `ds_to_universal.py --inject_missing_state` and resume "
    "with any shares and any number of ranks by setting `checkpoint: {load_universal: true}` in the DeepSpeed config"
)
"""How training can go on from a checkpoint with other shares."""


def share_record(shares: StateShares, *, zero_stage: int) -> dict[str, Any]:
    """The record, in plain types."""
    return {"layout": LAYOUT_VERSION, "zero_stage": zero_stage, "fractions": list(shares.fractions)}


def recorded_shares(record: Mapping[str, Any] | None) -> StateShares | None:
    """The shares in a record; None: there is no record, the state is cut evenly.

    Raises:
        ConfigError: A newer release wrote it.
    """
    if record is None:
        return None
    if record.get("layout") != LAYOUT_VERSION:
        raise ConfigError(
            f"the checkpoint's training state was cut by rule {record.get('layout')!r}, this release knows rule "
            f"{LAYOUT_VERSION}. Use the release of accelerate_poplar that wrote it."
        )
    return StateShares(fractions=tuple(record["fractions"]))


def check_record(record: Mapping[str, Any] | None, shares: StateShares | None) -> None:
    """Refuse state that was cut by other shares than this run's.

    Args:
        record: What the checkpoint says; None: it was cut evenly.
        shares: This run's shares; None: even.

    Raises:
        ConfigError: They differ; names both and the ways to go on.
    """
    saved = recorded_shares(record)
    if saved == shares:
        return
    raise ConfigError(
        f"the checkpoint holds training state in {_describe(saved)}, this run holds it in {_describe(shares)}; a rank "
        f"would load another rank's state. {ROUTE}."
    )


def _describe(shares: StateShares | None) -> str:
    if shares is None:
        return "even shares"
    return "shares of " + ", ".join(f"{fraction:.4g}" for fraction in shares.fractions)
