"""From settings to a plan that all ranks share: profile where needed, search, agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from .comm import Ranks, decide
from .config import EmulationConfig, PoplarConfig
from .device import DeviceFacts
from .errors import InsufficientMemoryError
from .plan import Plan, RankPlan
from .profiles import ClusterProfile
from .run_request import BatchRequest
from .search import find_plan
from .state_choice import choose_plan
from .units import GIB

MANUAL = "manual"


def reusable_plan(
    resumed: Plan | None,
    profile: ClusterProfile | None,
    *,
    config: PoplarConfig,
    emulation: EmulationConfig,
    stages: tuple[int, ...],
    facts: Sequence[DeviceFacts],
) -> Plan | None:
    """The checkpoint's plan where this run has the same devices and asks for nothing else.

    Args:
        resumed: The plan of the checkpoint, if there is one.
        profile: What it was made from, if that is known.
        config: This run's settings.
        emulation: What its ranks pretend to be.
        stages: The ZeRO stages it may use.
        facts: Its devices, in rank order.
    """
    unchanged = (
        resumed is not None
        and profile is not None
        and config.enabled
        and not config.reprofile
        and config.per_rank_micro_batch_sizes is None
        and config.max_micro_batch_size is None
        and (config.state_shards == "auto" or resumed.state_fractions == config.fractions_by_rank())
        and (config.state_offload == "auto" or not resumed.offloading_ranks)
        and resumed.strategy == config.strategy
        and resumed.zero_stage in stages
        and [rank.device for rank in profile.ranks] == [fact.device for fact in facts]
        and profile.emulated == emulation.active
    )
    if not unchanged or profile is None:
        return None
    emulated = emulation.memory_gib
    memory = [int(gib * GIB) for gib in emulated] if emulated else [fact.memory_bytes for fact in facts]
    same_kind = all(
        # CPU ranks share their host's memory, so a rank's part of it is not the fact.
        not fact.device_id or abs(rank.memory_bytes - own) <= 0.01 * own
        for rank, fact, own in zip(profile.ranks, facts, memory, strict=True)
    )
    return resumed if same_kind else None


def plan_by_hand(
    sizes: Sequence[int], *, accumulation: int, zero_stage: int, fractions: Sequence[float] | None = None
) -> Plan:
    """The plan of per-rank micro-batch sizes given by hand, repeated for every accumulation step.

    Args:
        sizes: Samples, one entry per rank.
        accumulation: Micro-steps per optimizer step.
        zero_stage: ZeRO stage of the plan.
        fractions: Shares of the training state, one per rank; None: even ones.
    """
    plan = Plan(
        zero_stage=zero_stage,
        global_batch_size=sum(sizes) * accumulation,
        predicted_step_time_s=0.0,
        strategy=MANUAL,
        ranks=tuple(RankPlan(rank=rank, micro_batch_sizes=(size,) * accumulation) for rank, size in enumerate(sizes)),
    )
    return plan.with_state(fractions)


def even_plan(*, global_batch_size: int, world_size: int, micro_batch_size: int, zero_stage: int) -> Plan:
    """An even split that nothing has to be measured for.

    Args:
        global_batch_size: Samples per optimizer step.
        world_size: Number of ranks.
        micro_batch_size: Largest micro-batch of any rank.
        zero_stage: ZeRO stage of the plan.
    """
    micro_steps = -(-global_batch_size // (world_size * micro_batch_size))
    share, extra = divmod(global_batch_size, world_size)
    ranks = []
    for rank in range(world_size):
        size, larger = divmod(share + (rank < extra), micro_steps)
        ranks.append(RankPlan(rank=rank, micro_batch_sizes=(size + 1,) * larger + (size,) * (micro_steps - larger)))
    return Plan(
        zero_stage=zero_stage,
        global_batch_size=global_batch_size,
        predicted_step_time_s=0.0,
        strategy="even",
        ranks=tuple(ranks),
    )


def find_shared_plan(
    *,
    ranks: Ranks,
    config: PoplarConfig,
    batch: BatchRequest,
    stages: tuple[int, ...],
    global_batch_size: int,
    profile: Callable[[tuple[int, ...]], ClusterProfile],
    given: Plan | None = None,
    explain: Callable[[ClusterProfile, int], str] | None = None,
    say: Callable[[str], None] | None = None,
    resumed: Plan | None = None,
) -> tuple[Plan, ClusterProfile | None]:
    """The plan of a run, the same on every rank.

    Args:
        ranks: The other ranks.
        config: The settings.
        batch: The batch figures without Poplar.
        stages: The ZeRO stages that may be used.
        global_batch_size: Samples per optimizer step.
        profile: Measures the cluster at the given stages; called on every rank, and only where a plan needs it.
        given: A plan made beforehand.
        explain: Profile and stage -> why a rank cannot hold one sample at that stage.
        say: Told, on every rank, when a stage had to be passed over.
        resumed: The plan of the checkpoint whose training state is loaded as it was cut, if any: where the planner is
            free to choose shares of the state, it keeps these.

    Returns:
        The plan, and the profile it was made from (None where nothing was measured); where shares of the training state
        were chosen with it, the profile has the limits and communication times that hold under them.

    Raises:
        InsufficientMemoryError: At none of the stages does every rank have room for one sample.
        PlanError: A rank cannot be given its share.
    """
    if given is not None:
        return given, None
    if not config.enabled:
        plan = even_plan(
            global_batch_size=global_batch_size,
            world_size=ranks.world_size,
            micro_batch_size=batch.per_device_micro_batch_size,
            zero_stage=_unprofiled_stage(stages),
        )
        return plan, None
    sizes = config.sizes_by_rank(ranks.world_size)
    if sizes is not None:
        return _with_sizes(sizes, ranks, config, batch, _unprofiled_stage(stages), say, resumed), None
    measured = profile(stages)
    if config.plans_state and ranks.world_size > 1:
        if not all(rank.points for rank in measured.ranks):
            raise InsufficientMemoryError(_why_not(measured, stages[-1], explain))
        return _with_shares(measured, ranks, config, stages, global_batch_size, say, resumed)
    fitting = _stages_that_fit(measured, stages, explain, say)
    stage = fitting[0] if len(fitting) == 1 else "auto"
    plan = decide(
        ranks,
        lambda: find_plan(measured, global_batch_size=global_batch_size, zero_stage=stage, strategy=config.strategy),
    )
    return plan, measured


def _with_sizes(
    sizes: Sequence[int],
    ranks: Ranks,
    config: PoplarConfig,
    batch: BatchRequest,
    stage: int,
    say: Callable[[str], None] | None,
    resumed: Plan | None,
) -> Plan:
    """The plan of sizes given by hand, on the shares of the settings."""
    fractions = config.fractions_by_rank()
    if config.state_offload == "auto" and say is not None:
        say("sizes are given by hand and nothing is measured, so no rank keeps its optimizer on the host")
    if config.state_shards == "auto":
        fractions = resumed.state_fractions if _keeps_shares(resumed, (stage,), ranks) else None
        if fractions is None and say is not None:
            say("sizes are given by hand and nothing is measured, so the shares of the training state are even")
    return plan_by_hand(sizes, accumulation=batch.gradient_accumulation_steps, zero_stage=stage, fractions=fractions)


def _with_shares(
    measured: ClusterProfile,
    ranks: Ranks,
    config: PoplarConfig,
    stages: tuple[int, ...],
    global_batch_size: int,
    say: Callable[[str], None] | None,
    resumed: Plan | None,
) -> tuple[Plan, ClusterProfile]:
    even = (1.0 / ranks.world_size,) * ranks.world_size
    fractions: Sequence[float] | None = config.state_shards if isinstance(config.state_shards, tuple) else None
    if config.state_shards == "even":
        fractions = even
    if fractions is None and _keeps_shares(resumed, stages, ranks):
        stages, fractions = (resumed.zero_stage,), resumed.state_fractions or even
    chosen = decide(
        ranks,
        lambda: choose_plan(
            measured,
            global_batch_size=global_batch_size,
            stages=stages,
            strategy=config.strategy,
            fractions=fractions,
            max_micro_batch_size=config.caps_by_rank(ranks.world_size),
            offload=config.state_offload == "auto",
        ),
    )
    if chosen.passed_over and say is not None:
        names = ", ".join(map(str, chosen.passed_over))
        say(f"ZeRO stage {names} passed over: {list(chosen.passed_over.values())[-1]}")
    offloading = chosen.plan.offloading_ranks
    if offloading and say is not None:
        say(
            f"state_offload: the optimizer is kept on the host on rank {', '.join(map(str, offloading))}, because otherwise "
            f"the training state leaves no room for a sample at ZeRO stage {chosen.plan.zero_stage}; the predicted step "
            "time does not count how much longer the optimizer takes there"
        )
    return chosen.plan, chosen.profile


def _keeps_shares(resumed: Plan | None, stages: tuple[int, ...], ranks: Ranks) -> TypeGuard[Plan]:
    """Whether the run goes on with training state as a checkpoint cut it."""
    if resumed is None or resumed.world_size != ranks.world_size:
        return False
    return resumed.zero_stage in stages and resumed.zero_stage > 0


def _stages_that_fit(
    profile: ClusterProfile,
    stages: tuple[int, ...],
    explain: Callable[[ClusterProfile, int], str] | None,
    say: Callable[[str], None] | None,
) -> list[int]:
    fitting = [stage for stage in stages if all(profile.stage(stage).max_micro_batch_size)]
    if not fitting:
        raise InsufficientMemoryError(_why_not(profile, stages[-1], explain))
    passed_over = [stage for stage in stages if stage not in fitting]
    if passed_over and say is not None:
        names = ", ".join(str(stage) for stage in passed_over)
        say(
            f"ZeRO stage {names} passed over, using stage {fitting[0]} or higher: "
            + _why_not(profile, passed_over[-1], explain)
        )
    return fitting


def _why_not(profile: ClusterProfile, stage: int, explain: Callable[[ClusterProfile, int], str] | None) -> str:
    if explain is not None:
        return explain(profile, stage)
    short = [rank for rank, cap in enumerate(profile.stage(stage).max_micro_batch_size) if cap == 0]
    return f"at ZeRO stage {stage} not even one sample fits on rank {', '.join(map(str, short))}."


def _unprofiled_stage(stages: tuple[int, ...]) -> int:
    """The stage of a run that measures nothing: the one that was asked for, or DeepSpeed's usual 2."""
    return stages[0] if len(stages) == 1 else 2
