"""What the trainer under the mixin asks for: its class of arguments, and batch rules that no plan can keep."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from transformers import TrainingArguments

from .arguments import PREFIX

_GROUPS = (
    "trains on groups of completions of one prompt (num_generations) and compares the rewards within each group; a plan "
    "hands out single samples and would tear the groups apart"
)
_UNSUPPORTED = {
    "GRPOTrainer": _GROUPS,
    "RLOOTrainer": _GROUPS,
    "KTOTrainer": "estimates one term of its loss from the micro-batches of all ranks, so its loss depends on how the batch "
    "is cut",
    "DistillationTrainer": "generates its own batches and counts their tokens over equal micro-batches of all ranks",
}
"""TRL trainers whose batches cannot follow a plan, and why."""


def trainer_conflicts(trainer_class: type, args: Any) -> list[str]:
    """Why a trainer's own batch rules contradict any plan; empty where they do not.

    Args:
        trainer_class: The class under `PoplarTrainerMixin`.
        args: Its arguments.
    """
    names = [base.__name__ for base in trainer_class.__mro__]
    found = next((name for name in names if name in _UNSUPPORTED), None)
    if found is None and getattr(args, "num_generations", None):
        found = next((base.__name__ for base in trainer_class.__mro__ if not base.__name__.startswith("Poplar")), "it")
    if found is None:
        return []
    return [
        f"{found} {_UNSUPPORTED.get(found, _GROUPS)}. Use {found} itself, without PoplarTrainerMixin, for an even split; "
        "SFTTrainer and DPOTrainer work under the mixin."
    ]


def reference_conflicts(trainer: Any) -> list[str]:
    """Why a trainer's reference model cannot be run by one rank alone; empty where it can.

    Args:
        trainer: Before it is profiled.
    """
    reference = getattr(trainer, "ref_model", None)
    if reference is None or not any(hasattr(parameter, "ds_id") for parameter in reference.parameters()):
        return []
    return [
        f"the reference model of {type(trainer).__name__} is spread over the ranks by ZeRO stage 3, so that no rank can run "
        "it alone, as profiling and unequal micro-batches need. Use an adapter (peft_config), "
        "precompute_ref_log_probs=True, or ZeRO stage 2 or lower."
    ]


def init_signature(trainer_class: type, after: type) -> inspect.Signature:
    """The parameters of the wrapped trainer's constructor, without `self`.

    A subclass that only says `*args, **kwargs` is looked through; keywords of its own are let pass.

    Args:
        trainer_class: The whole trainer.
        after: The class whose successors are the wrapped trainer.
    """
    bases = trainer_class.__mro__[trainer_class.__mro__.index(after) + 1 :]
    passes_on = False
    for base in bases:
        own = (
            list(inspect.signature(base.__dict__["__init__"]).parameters.values())[1:]
            if "__init__" in vars(base)
            else []
        )
        if any(p.name == "args" and p.kind is not p.VAR_POSITIONAL for p in own):
            if passes_on and own[-1].kind is not inspect.Parameter.VAR_KEYWORD:
                own.append(inspect.Parameter("more", inspect.Parameter.VAR_KEYWORD))
            return inspect.Signature(own)
        passes_on = passes_on or bool(own)
    return inspect.signature(trainer_class.__init__)


def wanted_arguments(signature: inspect.Signature) -> type[TrainingArguments]:
    """The class of arguments a trainer is annotated to take, for example `SFTConfig`; else `TrainingArguments`."""
    annotation = signature.parameters["args"].annotation if "args" in signature.parameters else None
    choices = (annotation, *typing.get_args(annotation))
    own = [kind for kind in choices if isinstance(kind, type) and issubclass(kind, TrainingArguments)]
    return next((kind for kind in own if kind is not TrainingArguments), TrainingArguments)


def as_wanted(args: TrainingArguments | None, wanted: type[TrainingArguments]) -> TrainingArguments:
    """Arguments in the class the trainer would make of them, so that what is set on them now is not lost.

    Args:
        args: As given; None: the defaults.
        wanted: See `wanted_arguments`.
    """
    if args is None:
        return wanted(output_dir="tmp_trainer")
    if isinstance(args, wanted):
        return args
    values = {name: value for name, value in args.to_dict().items() if not name.startswith(PREFIX)}
    return wanted(**{**values, "hub_token": args.hub_token})
