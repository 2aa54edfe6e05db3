"""Where a plan's shares of the training state meet the DeepSpeed engine and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .checkpoint import check_resume
from .comm import Ranks, decide
from .errors import CompatibilityError
from .plan import PLAN_FILE_NAME, Plan
from .state_shards import uneven_state


@contextmanager
def shared_state(
    plan: Plan,
    ranks: Ranks,
    deepspeed_config: Mapping[str, Any] | None,
    *,
    checkpoint: str | Path | None = None,
) -> Iterator[None]:
    """Around the building of a DeepSpeed engine: it holds the plan's shares of the training state.

    Args:
        plan: The plan; nothing changes where its shares are even and no rank offloads its optimizer.
        ranks: The other ranks.
        deepspeed_config: This rank's engine config.
        checkpoint: The folder of the checkpoint that is loaded into the engine, if any.

    Raises:
        ConfigError: The config cannot be combined with uneven shares, or the checkpoint has other ones.
        CompatibilityError: This DeepSpeed is not one that can do it.
    """
    if checkpoint is not None:
        check_shares(plan, ranks, deepspeed_config, checkpoint)
    if plan.state_fractions is None and not plan.offloading_ranks:
        yield
        return
    with uneven_state(
        plan.state_fractions, zero_stage=plan.zero_stage, deepspeed_config=deepspeed_config, ranks=ranks
    ):
        yield


def require_shares(plan: Plan, engine: Any) -> None:
    """Refuse an engine that was built earlier, on other shares of the training state than the plan's.

    Raises:
        CompatibilityError: It was.
    """
    built_on = getattr(getattr(engine, "optimizer", None), "shares", None)
    held = None if built_on is None else built_on.fractions
    if held != plan.state_fractions:
        raise CompatibilityError(
            f"the model is in a DeepSpeed engine already, with shares {held or 'even'} of the training state, but the "
            f"plan has {plan.state_fractions or 'even'} ones. Train before anything else builds an engine (evaluate() "
            "under ZeRO stage 3 does), or use a new trainer."
        )


def check_shares(plan: Plan, ranks: Ranks, deepspeed_config: Mapping[str, Any] | None, checkpoint: str | Path) -> None:
    """Refuse to load training state that was cut by other shares than the plan's; a collective call.

    Where this run's shares and the checkpoint's are even, DeepSpeed checks for itself.

    Args:
        plan: The plan of the run.
        ranks: The other ranks.
        deepspeed_config: This rank's engine config.
        checkpoint: The folder that is loaded.

    Raises:
        ConfigError: The shares differ; names both and the ways to go on.
    """

    def check() -> None:
        saved = Plan.load(checkpoint) if (Path(checkpoint) / PLAN_FILE_NAME).is_file() else None
        if plan.state_fractions is not None or (saved is not None and saved.state_fractions is not None):
            check_resume(checkpoint, fractions=plan.state_fractions, world_size=ranks.world_size)

    if plan.zero_stage > 0 and not loads_universal(deepspeed_config):
        decide(ranks, check)


def loads_universal(deepspeed_config: Mapping[str, Any] | None) -> bool:
    """True where checkpoints are in DeepSpeed's universal form, which any shares can load."""
    return bool(((deepspeed_config or {}).get("checkpoint") or {}).get("load_universal"))
