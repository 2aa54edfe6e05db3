"""`accelerate-poplar verify`: on these machines, do uneven plans compute what one process computes?

Here: what is asked for, how ranks are started, and what was found. What a rank does is in `verify_rank.py`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, RankError
from .text_table import format_table

BUILT_IN = {
    "llama": "Llama, causal LM",
    "bert_mlm": "BERT, masked LM",
    "bert_cls": "BERT, classification",
    "module": "plain module, own loss",
}
"""Model kinds built in code, and their names in the table."""
OWN = "own"
"""The kind of a model named by the user."""
STAGES = (0, 1, 2, 3)

ENTRY = ("-m", "accelerate_poplar.verify_rank")
"""What Python runs on every rank; the options' JSON and the result file's path follow."""

_IGNORED_VARIABLES = (
    "POPLAR_CONFIG",
    "POPLAR_EMULATE_SLOWDOWN",
    "POPLAR_EMULATE_MEMORY_GIB",
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_GRADIENT_CLIPPING",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_DEEPSPEED",
)
"""Settings of a run, which have no say here."""
_SHOWN_LOG = 4000
"""Characters of a failed rank's output that are shown."""
_SHOWN_PROBLEMS = 6
"""Differences of a case that the text names; the JSON form has all."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What to verify.

    Raises:
        ConfigError: A kind or stage is unknown, or a file is missing; all at once.
    """

    kinds: tuple[str, ...] = tuple(BUILT_IN)
    """Model kinds, of `BUILT_IN`; left aside where `model` is given."""
    zero_stages: tuple[int, ...] = STAGES
    """ZeRO stages."""
    model: str | None = None
    """Folder or hub name of a transformers model whose config is used, its weights not; None: the built-in kinds."""
    data: str | None = None
    """A text file to take the rows from; None: generated rows."""
    seq_len: int = 64
    """Tokens per row of the user's model or text, at least 4; at most what the model takes."""

    def __post_init__(self) -> None:
        problems = [
            f"--models: unknown kind {k!r}; known: {', '.join(BUILT_IN)}." for k in self.kinds if k not in BUILT_IN
        ]
        problems += [
            f"--zero-stages: {s} is not a ZeRO stage; give 0 to 3." for s in self.zero_stages if s not in STAGES
        ]
        if not self.kinds or not self.zero_stages:
            problems.append("there is nothing to verify: give at least one model and one ZeRO stage.")
        if self.data is not None and not Path(self.data).is_file():
            problems.append(f"--data {self.data}: no such file.")
        if self.seq_len < 4:
            problems.append(f"--seq-len is {self.seq_len}; it must be at least 4.")
        if problems:
            raise ConfigError(" ".join(problems))

    @property
    def chosen_kinds(self) -> tuple[str, ...]:
        """The kinds to run: the user's model alone, if there is one."""
        return (OWN,) if self.model is not None else self.kinds

    def to_json(self) -> str:
        """The JSON form, for the ranks."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> VerifyOptions:
        """Read what `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        return cls(**{**data, "kinds": tuple(data["kinds"]), "zero_stages": tuple(data["zero_stages"])})


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One model kind at one ZeRO stage."""

    kind: str
    """Model kind, or `own`."""
    zero_stage: int
    """ZeRO stage."""
    micro_batch_sizes: tuple[tuple[int, ...], ...]
    """The uneven plan: samples per micro-step, by rank."""
    largest_difference: float
    """Largest relative difference from one process over losses, gradient norms and parameters; may be infinite."""
    problems: tuple[str, ...]
    """What differs, on which rank; empty when nothing does."""
    seconds: float
    """How long it took."""

    @property
    def passed(self) -> bool:
        """True when nothing differs."""
        return not self.problems


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was found on all ranks."""

    ranks: tuple[str, ...]
    """Host and device of every rank."""
    model: str
    """Name of the user's model; empty for the built-in kinds."""
    steps: int
    """Optimizer steps that were compared."""
    tolerance: float
    """Relative difference up to which figures count as equal."""
    versions: Mapping[str, str]
    """Library -> version."""
    cases: tuple[CaseResult, ...]
    """In the order they ran."""

    @property
    def passed(self) -> bool:
        """True when every case passed."""
        return bool(self.cases) and all(case.passed for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form; `passed` included."""
        cases = []
        for case in self.cases:
            finite = case.largest_difference != float("inf")
            difference = case.largest_difference if finite else None
            cases.append({**dataclasses.asdict(case), "largest_difference": difference, "passed": case.passed})
        return {**dataclasses.asdict(self), "cases": cases, "passed": self.passed}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VerifyReport:
        """Read what `to_dict` made."""
        cases = tuple(
            CaseResult(
                kind=case["kind"],
                zero_stage=case["zero_stage"],
                micro_batch_sizes=tuple(tuple(sizes) for sizes in case["micro_batch_sizes"]),
                largest_difference=float("inf") if case["largest_difference"] is None else case["largest_difference"],
                problems=tuple(case["problems"]),
                seconds=case["seconds"],
            )
            for case in data["cases"]
        )
        return cls(
            ranks=tuple(data["ranks"]),
            model=data["model"],
            steps=data["steps"],
            tolerance=data["tolerance"],
            versions=data["versions"],
            cases=cases,
        )

    def to_text(self) -> str:
        """A table, a verdict, and what differs."""
        stages = sorted({case.zero_stage for case in self.cases})
        rows = []
        for kind in dict.fromkeys(case.kind for case in self.cases):
            cells = {case.zero_stage: _cell(case) for case in self.cases if case.kind == kind}
            name = self.model if kind == OWN else BUILT_IN[kind]
            rows.append((name, *(cells.get(stage, "") for stage in stages)))
        lines = [
            f"{len(self.ranks)} ranks: {', '.join(dict.fromkeys(self.ranks))}",
            f"uneven plans against one process, {self.steps} optimizer steps in fp32: loss, gradient norm, parameters",
            "",
            format_table(("largest relative difference", *(f"ZeRO {stage}" for stage in stages)), rows),
            "",
        ]
        failed = [case for case in self.cases if not case.passed]
        if failed:
            lines.append(f"FAILED: {len(failed)} of {len(self.cases)} differ by more than {self.tolerance:g}.")
            lines += [line for case in failed for line in _details(case, self.model)]
        else:
            seconds = sum(case.seconds for case in self.cases)
            lines.append(
                f"passed: all {len(self.cases)} are equal within {self.tolerance:g}, {seconds:.0f} s of training"
            )
        return "\n".join(lines)


def _cell(case: CaseResult) -> str:
    return f"{'' if case.passed else 'FAILED '}{case.largest_difference:.0e}"


def _details(case: CaseResult, model: str) -> list[str]:
    name = model if case.kind == OWN else BUILT_IN[case.kind]
    plan = ", ".join(f"rank {rank}: {list(sizes)}" for rank, sizes in enumerate(case.micro_batch_sizes))
    lines = [f"  {name}, ZeRO stage {case.zero_stage}, micro-batches {plan}"]
    lines += [f"    {problem}" for problem in case.problems[:_SHOWN_PROBLEMS]]
    if len(case.problems) > _SHOWN_PROBLEMS:
        lines.append(f"    and {len(case.problems) - _SHOWN_PROBLEMS} more (all of them with --json)")
    return lines


def launch(
    options: VerifyOptions, *, num_processes: int, cpu: bool, timeout_s: float, entry: Sequence[str] = ENTRY
) -> VerifyReport:
    """Start ranks on this machine and collect what they found.

    Args:
        options: What to verify.
        num_processes: Ranks to start; at least 2.
        cpu: Keep accelerators hidden from them.
        timeout_s: Seconds after which the ranks are ended.
        entry: What Python runs on each rank.

    Raises:
        ConfigError: A setting turned out to be wrong.
        RankError: A rank failed or the time is up; the message ends with the ranks' own output.
    """
    hidden = ("CUDA_VISIBLE_DEVICES=", "HIP_VISIBLE_DEVICES=") if cpu else ()
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}", "--no-python")
    command = (*hidden, "OMP_NUM_THREADS=1", sys.executable, *launcher, sys.executable, *entry)
    return _run(command, options, timeout_s, f"{num_processes} ranks on this machine")


def join(options: VerifyOptions, *, timeout_s: float, entry: Sequence[str] = ENTRY) -> VerifyReport:
    """As `launch`, on the ranks of the launcher that started this process; a collective call.

    The work is done in a process of its own, which is told where it belongs but not which DeepSpeed settings and dtype
    the launcher chose: they would stand in the way of trying every stage in fp32.
    """
    return _run((sys.executable, *entry), options, timeout_s, "this rank")


def _run(command: Sequence[str], options: VerifyOptions, timeout_s: float, who: str) -> VerifyReport:
    cleared = [part for name in _IGNORED_VARIABLES for part in ("-u", name)]
    with tempfile.TemporaryDirectory(prefix="accelerate-poplar-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        whole = ["env", *cleared, *command, options.to_json(), str(result)]
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(whole, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        if code != 0 or not result.is_file():
            how = f"exit code {code}" if code is not None else f"not done after {timeout_s:.0f} s"
            raise RankError(
                f"{who}: {how}. Its output ends with:\n{_own_words(log)}\n"
                "Look for the first error above; `accelerate-poplar doctor` checks the machine."
            )
        found = json.loads(result.read_text(encoding="utf-8"))
    if "error" in found:
        raise ConfigError(found["error"])
    return VerifyReport.from_dict(found)


def _own_words(log: Path) -> str:
    """What the ranks printed, without what torch's launcher says about their end."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return re.split(r"^[EW]\d{4} .*torch/distributed/elastic", text, maxsplit=1, flags=re.MULTILINE)[0][-_SHOWN_LOG:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
