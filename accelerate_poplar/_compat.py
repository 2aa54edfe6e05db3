"""Everything that depends on how a version of another library is built inside, each with the versions it is for.

DeepSpeed has no way to be told that ranks hold unequal shares of the training state. `state_shards` gives it
subclasses of its own optimizers that do; they have to be found under the stock names while an engine is built, which
is what `substituted` is for. Nothing stays replaced afterwards: what must live on lives in the subclasses' objects.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from .errors import CompatibilityError

DEEPSPEED_TESTED = ("0.19.8",)
"""DeepSpeed versions that uneven training state was tested with."""
DEEPSPEED_FROM, DEEPSPEED_BELOW = "0.19.8", "0.20"
"""DeepSpeed versions that uneven training state is allowed with, if their inside is as expected."""

LOST_MICRO_BATCH = ("0.18.6", "0.18.10")
"""First and last DeepSpeed version whose ZeRO-1 with bf16 and fp32 accumulation leaves the last micro-batch out (DeepSpeed
issue 7985); 0.18.11 and later have it right."""

ENGINE_OPTIMIZER = ("deepspeed.runtime.engine", "DeepSpeedZeroOptimizer")
"""Where an engine finds the optimizer of ZeRO stages 1 and 2. DeepSpeed 0.19.8; ends with a class hook there."""
STAGE3_OPTIMIZER = ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
"""Where an engine finds the optimizer of ZeRO stage 3. DeepSpeed 0.19.8; ends with a class hook there."""
ZERO_INIT = (
    ("deepspeed.runtime.zero", "Init"),
    ("deepspeed.runtime.zero.parameter_offload", "Init"),
)
"""Where models and engines find `deepspeed.zero.Init`. DeepSpeed 0.19.8; ends with a class hook there."""

_STAGE12_METHODS = {
    "get_data_parallel_partitions": ("self", "tensor", "group_id"),
    "get_partition_info": ("self", "tensor_list", "partition_size", "partition_id", "param_padding"),
    "get_grad_position": ("self", "group_id", "tensor_list", "first_offset", "partition_size"),
    "initialize_gradient_partitioning_data_structures": ("self",),
    "_link_all_hp_params": ("self",),
    "step": ("self", "closure"),
    "update_lp_params": ("self",),
    "state_dict": ("self",),
    "_load_legacy_checkpoint": ("self", "state_dict_list", "load_optimizer_states", "load_from_fp32_weights"),
}
_STAGE3_METHODS = {
    "initialize_ds_offload": None,
    "_create_fp16_sub_groups": ("self", "params_group"),
    "_fp32_state_allgather": ("self", "param", "fp32_state_partition"),
    "set_fp32_grad_for_param": ("self", "value", "param"),
    "set_full_hp_param": ("self", "value", "param", "optim_state_key"),
    "update_fp32_grad_for_param_vectorized": ("self", "update_func", "param_list"),
    "load_hp_checkpoint_state_from_checkpoint_dir_stage3": ("self", "checkpoint_dir"),
    "load_hp_checkpoint_state": ("self", "folder", "key", "param"),
    "state_dict": ("self",),
    "_rigid_load_state_dict": ("self", "state_dict", "load_optimizer_states"),
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads": None,
    "get_grad_norm_direct": ("self", "gradients", "params", "norm_type"),
    "_constant_buffered_norm2": ("self", "input", "buffer_size"),
}
_INIT_METHODS = {
    "_convert_to_deepspeed_param": ("self", "param"),
    "_aligned_size": ("self", "param"),
    "_padding_size": ("self", "param"),
    "_all_gather": None,
    "_partition_param": None,
    "get_partition_dp_group": ("self", "param"),
}


def require_deepspeed() -> None:
    """Check that this DeepSpeed is one that uneven training state is allowed with.

    Raises:
        CompatibilityError: It is not; names the versions.
    """
    found = Version(version("deepspeed"))
    if not Version(DEEPSPEED_FROM) <= found < Version(DEEPSPEED_BELOW):
        raise CompatibilityError(
            f"uneven training state needs DeepSpeed from {DEEPSPEED_FROM} to below {DEEPSPEED_BELOW} (tested: "
            f"{', '.join(DEEPSPEED_TESTED)}), but {found} is installed. Install one of these, or use even shares."
        )


def require_stage12(stock: type) -> None:
    """Check that DeepSpeed's optimizer of stages 1 and 2 has the methods that are relied upon; raises as below."""
    _require_methods(stock, _STAGE12_METHODS)


def require_stage3(stock: type, init: type) -> None:
    """Check that DeepSpeed's stage-3 optimizer and `zero.Init` have the methods that are relied upon.

    Raises:
        CompatibilityError: A method is missing or takes other arguments.
    """
    _require_methods(stock, _STAGE3_METHODS)
    _require_methods(init, _INIT_METHODS)


@contextmanager
def substituted(replacements: Mapping[tuple[str, str], Any]) -> Iterator[None]:
    """Let modules see other objects under some of their names for the time being.

    Args:
        replacements: (module, name) -> the object to be found there.

    Raises:
        CompatibilityError: A module lacks the name.
    """
    before = {place: found_at(place) for place in replacements}
    try:
        for (module, name), replacement in replacements.items():
            setattr(importlib.import_module(module), name, replacement)
        yield
    finally:
        for (module, name), stock in before.items():
            setattr(importlib.import_module(module), name, stock)


def found_at(place: tuple[str, str]) -> Any:
    """The object a module holds under a name.

    Raises:
        CompatibilityError: It holds none.
    """
    module, name = place
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise CompatibilityError(
            f"DeepSpeed {version('deepspeed')} has no {module}.{name}, which uneven training state relies on (tested "
            f"with DeepSpeed {', '.join(DEEPSPEED_TESTED)}). Install a tested version, or use even shares."
        ) from None


def rebind(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a function that sees other objects under some of its module's names; the module stays as it is.

    Args:
        function: A function or method; decorators that only wrap it are left out of the copy.
        **names: Name -> the object the copy sees.

    Raises:
        CompatibilityError: The function uses no such name, so its inside is not what is expected.
    """
    plain = _plain(function)
    unused = [name for name in names if name not in plain.__code__.co_names]
    if unused:
        raise CompatibilityError(
            f"{plain.__module__}.{plain.__qualname__} of DeepSpeed {version('deepspeed')} does not use "
            f"{', '.join(unused)}; uneven training state relies on it (tested with {', '.join(DEEPSPEED_TESTED)}). "
            "Install a tested version, or use even shares."
        )
    copy = types.FunctionType(
        plain.__code__, {**plain.__globals__, **names}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return functools.wraps(plain)(copy)


def _plain(function: Callable[..., Any]) -> types.FunctionType:
    """The function under its decorators, also those (DeepSpeed's NVTX ranges) that do not say what they wrap."""
    inner: Any = inspect.unwrap(function)
    while inner.__code__.co_freevars == ("func",):
        inner = inspect.unwrap(inner.__closure__[0].cell_contents)
    return inner


def _require_methods(owner: type, methods: Mapping[str, tuple[str, ...] | None]) -> None:
    problems = []
    for name, wanted in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            problems.append(f"{name} is missing")
            continue
        found = tuple(inspect.signature(_plain(method)).parameters)
        if wanted is not None and found != wanted:
            problems.append(f"{name} takes ({', '.join(found)}) instead of ({', '.join(wanted)})")
    if problems:
        raise CompatibilityError(
            f"uneven training state relies on the inside of {owner.__module__}.{owner.__name__}, which is not as "
            f"expected in DeepSpeed {version('deepspeed')}: {'; '.join(problems)}. Install a tested version "
            f"({', '.join(DEEPSPEED_TESTED)}), or use even shares."
        )


def known_faults(deepspeed_version: str) -> list[str]:
    """Faults of a DeepSpeed version that change what is computed, one sentence each.

    Args:
        deepspeed_version: For example "0.18.7".
    """
    first, last = (Version(limit) for limit in LOST_MICRO_BATCH)
    if not first <= Version(deepspeed_version) <= last:
        return []
    return [
        f"DeepSpeed {deepspeed_version} leaves the last micro-batch out of the gradient at ZeRO stage 1 with bf16 and fp32 "
        f"accumulation (versions {LOST_MICRO_BATCH[0]} to {LOST_MICRO_BATCH[1]}). Install 0.19.8 or newer, or use another "
        "stage."
    ]


def installed_faults() -> list[str]:
    """`known_faults` of the DeepSpeed that is installed."""
    return known_faults(version("deepspeed"))
