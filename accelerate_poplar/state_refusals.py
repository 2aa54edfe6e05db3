"""What uneven training state cannot be combined with, found in the DeepSpeed config before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import raise_together

_WITH_EVEN = "or leave the state shares even"


def check_config(deepspeed_config: Mapping[str, Any] | None, *, zero_stage: int, optimizer_name: str = "") -> None:
    """Refuse a DeepSpeed config that uneven state does not work with.

    Args:
        deepspeed_config: The config as it will be used.
        zero_stage: ZeRO stage of the run.
        optimizer_name: Name of the optimizer's class, where it is known.

    Raises:
        ConfigError: Names every feature that is in the way, all together.
    """
    raise_together(refusals(deepspeed_config, zero_stage=zero_stage, optimizer_name=optimizer_name))


def refusals(deepspeed_config: Mapping[str, Any] | None, *, zero_stage: int, optimizer_name: str = "") -> list[str]:
    """One sentence per feature that is in the way; arguments as `check_config`."""
    config = deepspeed_config or {}
    zero = config.get("zero_optimization") or {}
    problems = [] if zero_stage in (1, 2, 3) else [_no_state(zero_stage)]
    problems += _offload(zero)
    problems += [_sentence(name, value, why) for name, value, why in _features(config, zero, zero_stage) if value]
    if "muon" in (optimizer_name or _optimizer_type(config)).lower():
        problems.append(_MUON)
    return problems


def check_engine(*, shares: int, ranks: int, optimizer: object, has_experts: bool) -> None:
    """Refuse what only the engine knows, before it allocates anything.

    Args:
        shares: Number of shares.
        ranks: Ranks the engine shards over.
        optimizer: The optimizer it is given.
        has_experts: The model has mixture-of-experts layers.

    Raises:
        ConfigError: Names every feature that is in the way, all together.
    """
    problems = []
    if shares != ranks:
        problems.append(
            f"there are {shares} state fractions, but the engine shards over {ranks} ranks: {_PARALLEL}. Turn tensor, "
            "pipeline and sequence parallelism off, or leave the state shares even."
        )
    if has_experts:
        problems.append(_sentence("mixture-of-experts layers", True, "experts are sharded over other ranks"))
    if "muon" in type(optimizer).__name__.lower():
        problems.append(_MUON)
    raise_together(problems)


def offloads_optimizer(deepspeed_config: Mapping[str, Any] | None) -> bool:
    """True when a config keeps the optimizer's state on the host."""
    zero = (deepspeed_config or {}).get("zero_optimization") or {}
    return _section(zero, "offload_optimizer").get("device", "none") not in ("none", None)


def _no_state(zero_stage: int) -> str:
    return (
        f"ZeRO stage {zero_stage} keeps the whole training state on every rank, so there are no shares to be uneven. "
        "Use ZeRO stage 1, 2 or 3, or leave the state shares even."
    )


def _features(config: Mapping[str, Any], zero: Mapping[str, Any], zero_stage: int) -> Sequence[tuple[str, Any, str]]:
    equal = "it exchanges equal shards by its own means"
    found = [
        ("zero_optimization.elastic_checkpoint", zero.get("elastic_checkpoint"), "it merges equal shards on loading"),
        ("zero_optimization.zenflow", zero.get("zenflow"), "it replaces the optimizer"),
        ("zero_optimization.legacy_stage1", zero.get("legacy_stage1"), "it is no longer part of DeepSpeed"),
        ("zero_optimization.mics_shard_size", _above(zero.get("mics_shard_size"), 0), equal),
        ("zero_optimization.zero_hpz_partition_size", _above(zero.get("zero_hpz_partition_size"), 1), equal),
        ("zero_optimization.zero_quantized_weights", zero.get("zero_quantized_weights"), equal),
        (
            "zero_optimization.zero_quantized_nontrainable_weights",
            zero.get("zero_quantized_nontrainable_weights"),
            equal,
        ),
        ("zero_optimization.zero_quantized_gradients", zero.get("zero_quantized_gradients"), equal),
        ("tensor_parallel.autotp_size", _above(_section(config, "tensor_parallel").get("autotp_size"), 1), _PARALLEL),
        ("sequence_parallel_size", _above(config.get("sequence_parallel_size"), 1), _PARALLEL),
        ("expert_parallel", _section(config, "expert_parallel").get("enabled"), _PARALLEL),
        (
            "torch_autocast",
            _section(config, "torch_autocast").get("enabled"),
            "it gathers in another dtype than it keeps",
        ),
        ("compile.deepcompile", _section(config, "compile").get("deepcompile"), "it compiles its own gathering"),
    ]
    if zero_stage == 3:
        found += [
            (
                "zero_optimization.stage3_use_all_reduce_for_fetch_params",
                zero.get("stage3_use_all_reduce_for_fetch_params", zero.get("use_all_reduce_for_fetch_params")),
                equal,
            ),
            (
                "zero_optimization.reduce_scatter false",
                zero.get("reduce_scatter", True) is False,
                "gradients are then cut into equal parts",
            ),
        ]
    if zero_stage == 1 and _is_bf16(config) and _accumulates_fp32(config):
        found.append(
            (
                "data_types.grad_accum_dtype fp32 with bf16 at ZeRO stage 1",
                True,
                "DeepSpeed then uses another optimizer; ZeRO stage 2 has both",
            )
        )
    return found


_PARALLEL = "shares are for data-parallel ranks only"


def _sentence(name: str, value: Any, why: str) -> str:
    shown = "" if value is True else f" ({value})"
    return f"{name}{shown} cannot be combined with uneven training state: {why}. Turn it off, {_WITH_EVEN}."


def _offload(zero: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in ("offload_optimizer", "offload_param"):
        section = _section(zero, name)
        if section.get("device") == "nvme":
            problems.append(
                _sentence(f"zero_optimization.{name}.device nvme", True, "it swaps equal shards by itself")
            )
    optimizer = _section(zero, "offload_optimizer")
    if optimizer.get("ratio", 1.0) != 1.0:
        problems.append(
            _sentence(
                "zero_optimization.offload_optimizer.ratio",
                optimizer["ratio"],
                "its second optimizer misses learning-rate changes",
            )
        )
    if optimizer.get("super_offload"):
        problems.append(
            _sentence("zero_optimization.offload_optimizer.super_offload", True, "it replaces the optimizer")
        )
    return problems


_MUON = _sentence("the Muon optimizer", True, "it orthogonalises whole matrices across equal shards")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _above(value: Any, limit: int) -> Any:
    return value if isinstance(value, int) and value > limit else None


def _optimizer_type(config: Mapping[str, Any]) -> str:
    return str(_section(config, "optimizer").get("type", ""))


def _is_bf16(config: Mapping[str, Any]) -> bool:
    return any(_section(config, name).get("enabled") in (True, "true") for name in ("bf16", "bfloat16"))


def _accumulates_fp32(config: Mapping[str, Any]) -> bool:
    return str(_section(config, "data_types").get("grad_accum_dtype", "")) in ("fp32", "float32", "float")
