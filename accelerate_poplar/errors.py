"""Every exception this package raises on purpose.

    PoplarError
    |-- ConfigError (ValueError)         a setting is unknown, out of range or contradicts another
    |-- ProfileError (ValueError)        a profile has missing, impossible or contradictory figures
    |-- PlanError (ValueError)           no plan exists, or a plan breaks one of its own rules
    |   `-- InsufficientMemoryError      a rank cannot hold even one sample
    |-- DataError (ValueError)           a dataset or loader cannot be shared out
    |-- CompatibilityError (RuntimeError) a library version or a feature we cannot work with
    `-- RankError (RuntimeError)         a rank failed, is late, or disagrees with the others

Messages state the values, the rule, the fix and, where one is to blame, the rank.
"""

from __future__ import annotations

from collections.abc import Iterable


class PoplarError(Exception):
    """Base class of all errors raised by accelerate_poplar."""

    problems: tuple[str, ...] = ()
    """The single problems of an error that reports several at once."""


class ConfigError(PoplarError, ValueError):
    """A setting is unknown, out of range or contradicts another one."""


class ProfileError(PoplarError, ValueError):
    """A profile holds missing, impossible or contradictory figures."""


class PlanError(PoplarError, ValueError):
    """No plan exists for the request, or a plan breaks one of its own rules."""


class InsufficientMemoryError(PlanError):
    """At least one rank cannot hold a single sample at the requested ZeRO stage."""


class DataError(PoplarError, ValueError):
    """A dataset or data loader cannot be shared out between the ranks."""


class CompatibilityError(PoplarError, RuntimeError):
    """A library version or a feature that cannot be combined with uneven ranks."""


class RankError(PoplarError, RuntimeError):
    """A rank failed, did not answer in time, or disagrees with the others."""


def raise_together(problems: Iterable[str], error: type[PoplarError] = ConfigError) -> None:
    """Raise `error` naming every problem at once; do nothing when there are none.

    Args:
        problems: One sentence or short paragraph per problem.
        error: The class to raise.
    """
    found = tuple(problems)
    if not found:
        return
    listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(found, start=1))
    raised = error(found[0] if len(found) == 1 else f"{len(found)} problems, all to be fixed:\n{listing}")
    raised.problems = found
    raise raised
