"""The documentation's commands run, its messages are the real ones, its links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from accelerate_poplar import cli_verify
from accelerate_poplar.cli import build_parser
from tests.core.report_run import write_run
from tests.core.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md")],
    key=lambda path: path.relative_to(ROOT).as_posix(),
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = ("accelerate", "python ", "torchrun ", "scripts/", "./scripts/", "pip ")
"""How a command begins in a block that does not say which language it is in."""
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")

ELSEWHERE = {
    r"accelerate launch .* -m accelerate_poplar\.cli verify": (
        "tests/distributed/test_verify.py",
        "test_it_runs_on_the_ranks_of_a_launcher_with_a_model_of_the_users_own",
    ),
    r"accelerate launch .*examples/": (
        "tests/distributed/test_examples.py",
        "test_the_example_trains_evaluates_and_resumes",
    ),
    r"accelerate-poplar launch ": (
        "tests/distributed/test_examples.py",
        "test_the_example_trains_evaluates_and_resumes",
    ),
    r"accelerate-poplar checkpoint to-even ": (
        "tests/core/test_state_checkpoint.py",
        "test_the_command_writes_equal_shares_and_keeps_the_rest",
    ),
    r"accelerate-poplar verify\b": (
        "tests/distributed/test_verify.py",
        "test_it_passes_on_this_machine_for_every_stage_and_model",
    ),
    r"torchrun ": ("tests/distributed/test_multi_host.py", "test_two_hosts_with_two_ranks_and_one"),
    r"(\./)?scripts/quickstart\.sh": (
        "tests/distributed/test_quickstart.py",
        "test_the_quick_start_compares_two_runs_of_the_same_training",
    ),
    r"python scripts/bench_throughput\.py": (
        "tests/distributed/test_bench_throughput_run.py",
        "test_ranks_that_share_a_core_are_compared_with_the_same_loss",
    ),
    r"python scripts/bench_state\.py": (
        "tests/distributed/test_bench_runs.py",
        "test_exchanges_of_the_state_are_timed_even_and_uneven",
    ),
    r"python scripts/bench_planner\.py": (
        "tests/core/test_bench_planner.py",
        "test_gains_over_every_rival_are_printed_by_stage",
    ),
    r"(\./)?scripts/(test|check)\.sh": (".ci/run", "scripts/test.sh"),
    r"python -m pip install|pip install|git clone|cd ": ("scripts/setup.sh", "pip install"),
}
"""Command -> the file that runs it (or its like, with sizes for a test), and words that prove it is there."""

HERE = re.compile(r"accelerate-poplar (plan|simulate|report)\b")
"""Commands that are run by this file, in a folder with a run's files."""


@dataclass(frozen=True)
class Command:
    """A command a reader would type."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:60]}"


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and content of a page's shell blocks."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(language, body) for language, body in found if language in ("sh", "bash", "")]


def commands() -> list[Command]:
    found = []
    for page in PAGES:
        for language, body in blocks(page):
            if body.startswith("#!"):
                continue
            for line in body.replace("\\\n", " ").splitlines():
                text = line.split(" #")[0].strip()
                if text.startswith(PROGRAMS) or (text and language and not text.startswith("#")):
                    found.append(Command(page.relative_to(ROOT).as_posix(), text))
    return found


COMMANDS = commands()


def test_there_are_commands_to_check() -> None:
    assert {command.page for command in COMMANDS} >= {"docs/how-it-works.md", "docs/multi-host.md", "docs/verify.md"}
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_is_run_by_a_test(command: Command) -> None:
    if HERE.match(command.text):
        return
    rules = [rule for pattern, rule in ELSEWHERE.items() if re.match(pattern, command.text)]
    assert rules, f"{command.page}: no test runs `{command.text}`; add a rule to ELSEWHERE and a test"
    file, words = rules[0]
    assert words in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_files_of_every_command_exist(command: Command) -> None:
    named = re.findall(r"(?<![\w/])((?:configs|examples|scripts)/[\w./-]+\.\w+)", command.text)
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("command", [c for c in COMMANDS if HERE.match(c.text)], ids=str)
def test_commands_on_a_runs_files(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    for folder in ("outputs/llama", "outputs/bert"):
        write_run(tmp_path / folder)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command.text)[1:]
    args = build_parser().parse_args(arguments)
    assert args.run(args) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if " verify" in c.text and "poplar" in c.text.split(" verify")[0]], ids=str
)
def test_the_options_of_verify_exist(command: Command) -> None:
    arguments = shlex.split(command.text.split("verify", 1)[1])
    assert build_parser().parse_args(["verify", *arguments]).run is cli_verify.run


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.text.startswith("torchrun")], ids=str)
def test_the_options_of_torchrun_exist(command: Command) -> None:
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(shlex.split(command.text)[1:])
    assert args.nnodes == "2"
    assert args.node_rank in (0, 1)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "bench_throughput" in c.text], ids=str)
def test_the_options_of_the_benchmark_exist(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(command.text)[1:])
    assert load_script("bench_throughput").parse_arguments().steps >= 1


def test_shell_scripts_in_the_pages_are_well_formed() -> None:
    scripts = [body for page in PAGES for _, body in blocks(page) if body.startswith("#!")]
    assert scripts
    for body in scripts:
        result = subprocess.run(["bash", "-n"], input=body, capture_output=True, text=True, check=False)
        assert result.stderr == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    targets = [t for t in LINK.findall(page.read_text(encoding="utf-8")) if not t.startswith("http")]
    assert [target for target in targets if not (page.parent / target).exists()] == []


# Messages


def messages() -> list[str]:
    """Every string of the package, with … for the values in it."""
    found = []
    for path in (ROOT / "accelerate_poplar").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


SHOWN = re.findall(
    r"^\| `(.+?)` \| ", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
)


def says(message: str, shown: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in shown.split("…"))
    return re.search(pattern, message, re.DOTALL) is not None


def test_there_are_messages_to_check() -> None:
    assert len(SHOWN) > 20
    assert not says("another text", SHOWN[0])


@pytest.mark.parametrize("shown", SHOWN)
def test_the_messages_are_the_real_ones(shown: str) -> None:
    assert any(says(message, shown) for message in messages())


def test_the_pictures_can_be_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["draw_docs.py", str(tmp_path)])
    assert load_script("draw_docs").main() == 0
    for picture in tmp_path.glob("*.svg"):
        assert (ROOT / "docs" / "images" / picture.name).is_file()
        assert "var(--" not in picture.read_text(encoding="utf-8")
