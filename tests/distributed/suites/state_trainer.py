"""PoplarTrainer with `state_shards`: same training as with even shares, state where it was asked to be, resume, auto."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from suites import common, loops
from suites.common import compare, compare_parameters, history, rows, run_cases, train

from accelerate_poplar import ConfigError, InsufficientMemoryError, Plan, PoplarConfig, PoplarTrainer
from accelerate_poplar.comm import connect
from accelerate_poplar.host import start_gloo_state
from accelerate_poplar.planning import plan_by_hand
from accelerate_poplar.state_shards import held_bytes

SHARES = (0.75, 0.25)
STEPS = 4
ADAM = {"optim": "adamw_torch", "learning_rate": 0.01, "max_steps": STEPS}


def by_hand(stage: int, state_shards: Any) -> dict[str, Any]:
    config = PoplarConfig(zero_stage=stage, per_rank_micro_batch_sizes=(3, 1), state_shards=state_shards, report=False)
    return {"poplar_config": config}


def shared_folder() -> str:
    ranks = connect(60.0)
    return ranks.broadcast(tempfile.mkdtemp() if ranks.rank == 0 else None)


def compare_runs(got: Any, want: Any, *, steps: int = STEPS) -> list[str]:
    """Differences in losses and final parameters; on two ranks without clipping there must be none at all."""
    return compare(
        "loss", history(got, "loss")[-steps:], history(want, "loss")[-steps:], rtol=0.0
    ) + compare_parameters(common.parameters(got), common.parameters(want), rtol=0.0)


def wrong_bytes(engine: Any, fractions: tuple[float, ...]) -> list[str]:
    """Where the ranks' optimizer state is not in the shares, within 2%."""
    held = held_bytes(engine)
    bytes_by_rank = connect(60.0).gather(held.master + held.moments)
    total = sum(bytes_by_rank)
    return [
        f"rank {rank} holds {count} of {total} bytes, wanted {share:.1%}"
        for rank, (count, share) in enumerate(zip(bytes_by_rank, fractions, strict=True))
        if abs(count - share * total) > 0.02 * share * total
    ]


def same_as_even(stage: int) -> list[str]:
    data = rows("llama", 40)
    accumulation = {"gradient_accumulation_steps": 2}
    even = train("llama", data, trainer_kwargs=by_hand(stage, "even"), **ADAM, **accumulation)
    folder = shared_folder()
    uneven = train("llama", data, trainer_kwargs=by_hand(stage, SHARES), output_dir=folder, **ADAM, **accumulation)
    problems = compare_runs(uneven, even) + wrong_bytes(uneven.model_wrapped, SHARES)
    if even.poplar.plan.state_fractions is not None:
        problems.append("the even run has shares")
    connect(60.0).gather(None)
    if Plan.load(folder).state_fractions != SHARES:
        problems.append("the plan in the output directory has no shares")
    return problems


def resume(stage: int) -> list[str]:
    """Save at step 2 of 4 and continue: as the run that went through."""
    data, folder = rows("llama", 40), shared_folder()
    settings = {**ADAM, "save_strategy": "steps", "save_steps": 2, "output_dir": folder}
    whole = train("llama", data, trainer_kwargs=by_hand(stage, SHARES), **settings)
    again = continued(data, f"{folder}/checkpoint-2", trainer_kwargs=by_hand(stage, SHARES), **settings)
    return compare_runs(again, whole, steps=2) + wrong_bytes(again.model_wrapped, SHARES)


def continued(data: Any, checkpoint: str, **settings: Any) -> Any:
    """A new trainer that resumes from a checkpoint."""

    class Resumed(PoplarTrainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(resume_from_checkpoint=checkpoint)

    return train("llama", data, trainer_class=Resumed, **settings)


def other_shares_refused() -> list[str]:
    """Training state goes only where it was cut for, in either direction."""
    data, problems = rows("llama", 40), []
    for saved, asked in ((SHARES, "even"), ("even", SHARES), (SHARES, (0.6, 0.4))):
        folder = shared_folder()
        settings = {**ADAM, "max_steps": 1, "save_strategy": "steps", "save_steps": 1, "output_dir": folder}
        train("llama", data, trainer_kwargs=by_hand(2, saved), **settings)
        try:
            settings |= {"max_steps": 2, "trainer_kwargs": by_hand(2, asked)}
            continued(data, f"{folder}/checkpoint-1", **settings)
            problems.append(f"{saved} was loaded into {asked}")
        except ConfigError as error:
            problems += [] if "a rank would load another rank's state" in str(error) else [str(error)]
    return problems


def plain_loop() -> list[str]:
    """A PoplarAccelerator's engine is on the shares of its settings too, and so is what it saves."""
    import torch
    from torch.utils.data import DataLoader

    def run(state_shards: Any, folder: str) -> tuple[Any, dict[str, torch.Tensor]]:
        config = by_hand(2, state_shards)["poplar_config"]
        accelerator = loops.accelerator_for(2, poplar_config=config)
        model = common.new_model("llama")
        loader = DataLoader(rows("llama", 12), batch_size=2, collate_fn=common.collate)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        result = loops.parameters(accelerator, model)
        accelerator.save_state(folder)
        try:
            if state_shards == "even":
                accelerator.load_state(other)
                problems.append("other shares were loaded")
            else:
                accelerator.load_state(folder)
                problems.extend(compare_parameters(loops.parameters(accelerator, model), result, rtol=0.0))
        except ConfigError as error:
            problems.extend([] if "another rank's state" in str(error) else [str(error)])
        return model, result

    problems: list[str] = []
    other = shared_folder()
    engine, uneven = run(SHARES, other)
    problems += wrong_bytes(engine, SHARES)
    _, even = run("even", shared_folder())
    return problems + compare_parameters(uneven, even, rtol=0.0)


def automatic() -> list[str]:
    """Rank 1 has 13 bytes a parameter: even shares need 18 to sum gradients, a smaller share leaves room.

    The resumed run takes samples one by one there, so that gradients are summed beside those of earlier micro-steps.
    """
    model = functools.partial(common.tiny_llama, 64)
    parameters = sum(p.numel() for p in model().parameters())
    gib = 13 * parameters / 0.9 / 2**30
    data, folder = rows("llama", 40), shared_folder()

    def run(state_shards: str, resume: bool = False) -> Any:
        common.set_seed(3)
        config = PoplarConfig(
            zero_stage=2,
            global_batch_size=8,
            state_shards=state_shards,
            profile_budget_s=1.0,
            cache_dir=tempfile.mkdtemp(),
            reprofile=True,
            max_micro_batch_size=(2, 1) if resume else None,
        )
        settings = {
            "model": model(),
            "trainer_kwargs": {"poplar_config": config},
            "output_dir": folder,
            "max_steps": STEPS,
            "save_strategy": "steps",
            "save_steps": 2,
        }
        return continued(data, f"{folder}/checkpoint-2", **settings) if resume else train("llama", data, **settings)

    with mock.patch.dict(os.environ, {"POPLAR_EMULATE_MEMORY_GIB": f"{4 * gib},{gib}"}):
        try:
            run("even")
            return ["even shares were not refused"]
        except InsufficientMemoryError as error:
            problems = [] if "rank 1" in str(error) else [f"rank 1 is not named: {error}"]
        trainer = run("auto")
        again = run("auto", resume=True)
    plan = trainer.poplar.plan
    if plan.state_fractions is None or plan.state_fractions[1] > 0.4:
        return [*problems, f"shares {plan.state_fractions}"]
    connect(60.0).gather(None)
    if "training state, planned (GiB)" not in (Path(folder) / "poplar_report.html").read_text():
        problems.append("the report does not show the state")
    common.set_seed(3)
    want = common.reference("llama", data, 8, steps=STEPS, optimizer="sgd", model=model())
    problems += compare("loss", history(trainer, "loss"), want.losses)
    problems += compare("loss of the resumed run", history(again, "loss"), want.losses)
    if again.poplar.plan.state_fractions != plan.state_fractions:
        problems.append(f"resumed on shares {again.poplar.plan.state_fractions}, saved on {plan.state_fractions}")
    return problems + wrong_bytes(trainer.model_wrapped, plan.state_fractions)


def offload(stage: int) -> list[str]:
    """Rank 1 keeps its optimizer on the host, as a given plan says: the same training, also after a resume."""
    data, folder = rows("llama", 40), shared_folder()
    settings = {**ADAM, "save_strategy": "steps", "save_steps": 2, "output_dir": folder}
    plan = plan_by_hand((3, 1), accumulation=1, zero_stage=stage).with_state(SHARES, [1])
    given = {"poplar_plan": plan, "poplar_config": PoplarConfig(zero_stage=stage, report=False)}
    even = train("llama", data, trainer_kwargs=by_hand(stage, "even"), **ADAM)
    trainer = train("llama", data, trainer_kwargs=given, **settings)
    again = continued(data, f"{folder}/checkpoint-2", trainer_kwargs=given, **settings)
    problems = compare_runs(trainer, even) + compare_runs(again, even, steps=2)
    problems += wrong_bytes(trainer.model_wrapped, SHARES)
    return problems + wrong_offload(trainer, (False, True)) + wrong_offload(again, (False, True))


def wrong_offload(trainer: Any, wanted: tuple[bool, ...]) -> list[str]:
    """Where a rank's engine does not have its optimizer where the plan says."""
    by_rank = tuple(connect(60.0).gather(bool(trainer.model_wrapped.zero_cpu_offload())))
    return [] if by_rank == wanted else [f"the engines offload {by_rank}, expected {wanted}"]


def offload_automatic() -> list[str]:
    """Rank 1 has room for a tenth of the state, rank 0 for four fifths; without its optimizer rank 1 has enough."""
    model = functools.partial(common.tiny_llama, 64)
    parameters = sum(p.numel() for p in model().parameters())
    small, large = (bytes_each * parameters / 0.9 / 2**30 for bytes_each in (14.0, 28.0))
    data = rows("llama", 40)

    def run(state_offload: str) -> Any:
        common.set_seed(3)
        config = PoplarConfig(
            zero_stage=2,
            global_batch_size=8,
            state_shards="auto",
            state_offload=state_offload,
            profile_budget_s=1.0,
            cache_dir=tempfile.mkdtemp(),
        )
        return train("llama", data, model=model(), trainer_kwargs={"poplar_config": config}, **ADAM)

    with mock.patch.dict(os.environ, {"POPLAR_EMULATE_MEMORY_GIB": f"{large},{small}"}):
        try:
            run("off")
            return ["the state was not refused"]
        except InsufficientMemoryError as error:
            problems = [] if "state_offload: auto" in str(error) else [f"offload is not named: {error}"]
        trainer = run("auto")
    if trainer.poplar.plan.offloading_ranks != (1,):
        problems.append(f"ranks {trainer.poplar.plan.offloading_ranks} offload")
    common.set_seed(3)
    on_devices = {"poplar_plan": trainer.poplar.plan.with_state(None)}
    even = train("llama", data, model=model(), trainer_kwargs=on_devices, **ADAM)
    return problems + compare_runs(trainer, even) + wrong_offload(trainer, (False, True))


def zero_init() -> list[str]:
    """A model that `from_pretrained` has partitioned evenly is cut again; evaluation and `save_model` see it whole."""
    import transformers
    from safetensors.torch import load_file

    folder = shared_folder()

    def run(state_shards: Any) -> tuple[Any, float, dict[str, Any]]:
        common.reset_host()
        start_gloo_state()
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        settings = {
            **dict.fromkeys(keys, "auto"),
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
            "zero_allow_untested_optimizer": True,
        }
        args = common.arguments(folder, deepspeed=settings, accelerator_config={"use_configured_state": True}, **ADAM)
        model = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/base")
        if not all(hasattr(p, "ds_id") for p in model.parameters()):
            problems.append("the model was not partitioned")
        data = {"train_dataset": rows("llama", 40), "eval_dataset": rows("llama", 6), "data_collator": common.collate}
        trainer = PoplarTrainer(model=model, args=args, **data, **by_hand(3, state_shards))
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model(f"{folder}/{state_shards}")
        connect(60.0).gather(None)
        return trainer, loss, load_file(f"{folder}/{state_shards}/model.safetensors")

    problems: list[str] = []
    common.reset_host()
    if connect(60.0).rank == 0:
        common.new_model("llama").save_pretrained(f"{folder}/base")
    connect(60.0).gather(None)
    even, even_loss, even_weights = run("even")
    uneven, loss, weights = run(SHARES)
    problems += compare_runs(uneven, even) + wrong_bytes(uneven.model_wrapped, SHARES)
    problems += [] if loss == even_loss else [f"evaluated to {loss}, expected {even_loss}"]
    return problems + compare_parameters(weights, even_weights, rtol=0.0)


def table() -> dict[str, Callable[[], Any]]:
    from state_trainer_cases import CASES

    found: dict[str, Callable[[], Any]] = {
        **{f"same_as_even-zero{s}": functools.partial(same_as_even, s) for s in (1, 2, 3)},
        **{f"resume-zero{s}": functools.partial(resume, s) for s in (2, 3)},
        "other_shares_refused": other_shares_refused,
        "plain_loop": plain_loop,
        "automatic": automatic,
        "zero_init": zero_init,
        **{f"offload-zero{s}": functools.partial(offload, s) for s in (1, 3)},
        "offload_automatic": offload_automatic,
    }
    if set(CASES) != set(found):
        raise KeyError(f"state_trainer_cases.py and this suite differ: {sorted(set(CASES) ^ set(found))}")
    return found


if __name__ == "__main__":
    only = os.environ.get("POPLAR_TEST_ONLY")
    run_cases({name: case for name, case in table().items() if not only or only in name})
