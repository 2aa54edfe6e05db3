"""`accelerate-poplar launch`: Accelerate's launcher, which may find Poplar's settings in the same YAML.

Accelerate refuses a top-level key it does not know, so the `poplar:` section is checked and taken out, and the
processes are pointed at it through `POPLAR_CONFIG`. Everything else is Accelerate's own: its parser reads the
arguments and its launcher starts the processes.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from .config import CONFIG_VARIABLE, PoplarConfig, load_mapping
from .errors import ConfigError, raise_together

SECTION = "poplar"

USAGE = "accelerate-poplar launch [--config FILE] [ACCELERATE OPTIONS] SCRIPT [SCRIPT ARGUMENTS]"
DESCRIPTION = f"""\
usage: {USAGE}

Start a training script on all ranks: `accelerate launch`, plus Poplar's settings in the same YAML.

  --config FILE, --config_file FILE
                 Accelerate's YAML or JSON config. It may have a top-level `poplar:` section:

                     distributed_type: DEEPSPEED
                     num_processes: 2
                     deepspeed_config:
                       zero_stage: 2
                     poplar:
                       global_batch_size: 64
                       memory_fraction: [0.9, 0.8]

                 The section is checked before anything starts. Settings come from the first of: poplar_config in
                 the script, the file named by the environment variable POPLAR_CONFIG, this section, a "poplar"
                 object in the DeepSpeed JSON, the defaults.

All other options are Accelerate's and are passed on unchanged; `accelerate launch --help` lists them.
Without a `poplar:` section this is the same as `accelerate launch`."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    # No prefix character: every argument, also one that starts with a dash, is left for Accelerate's own parser.
    parser = subparsers.add_parser(
        "launch",
        prefix_chars="\0",
        add_help=False,
        help="start a training script; like `accelerate launch`, with a `poplar:` section in its YAML",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the training script and wait for it.

    Args:
        args: `arguments`, as given after `launch`.

    Returns:
        0; 1 when the script failed on any rank; 128 + its number when a signal ended the run.

    Raises:
        ConfigError: The config file is missing, broken or has unknown keys, or the script does not exist.
    """
    if args.arguments[:1] in (["-h"], ["--help"]):
        print(DESCRIPTION)
        return 0
    # Imported here because they import torch, which the other subcommands and the help do not need.
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parsed = _parse(args.arguments)
    with _prepared(parsed):
        if not (parsed.module or parsed.no_python) and not Path(parsed.training_script).is_file():
            raise ConfigError(f"{parsed.training_script}: no such training script.")
        try:
            launch_command(parsed)
        except (ValueError, ConnectionError) as problem:
            # Accelerate's own words for options that do not go together, or a port that is taken.
            raise ConfigError(str(problem)) from problem
        except (subprocess.CalledProcessError, ChildFailedError) as failure:
            print(f"accelerate-poplar launch: the training script failed.\n{failure}", file=sys.stderr)
            return 1
        except SignalException as stopped:
            return 128 + stopped.sigval
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.prog = "accelerate-poplar launch"
    parser.usage = USAGE
    parser.add_argument("--config", dest="config_file", default=None, help="The same as --config_file.")
    parsed: argparse.Namespace = parser.parse_args(arguments)
    return parsed


@contextlib.contextmanager
def _prepared(parsed: argparse.Namespace) -> Iterator[None]:
    """Check the config; give Accelerate the part it understands and the processes the way to the rest."""
    path = _config_file(parsed)
    if path is None:
        yield
        return
    data = load_mapping(path)
    has_section = SECTION in data
    section = data.pop(SECTION, None) or {}
    with tempfile.TemporaryDirectory(prefix="accelerate-poplar-") as folder:
        # `.yaml` whatever the original is: JSON's values are a part of YAML's.
        rest = Path(folder) / "accelerate.yaml"
        rest.write_text(yaml.safe_dump(data), encoding="utf-8")
        _check(path, rest, data, section, parsed.num_processes)
        if not has_section:
            yield
            return
        parsed.config_file = str(rest)
        with _handed_over(path):
            yield


def _config_file(parsed: argparse.Namespace) -> str | None:
    """The config Accelerate will read: the one named, else the user's default one, if there is any."""
    if parsed.config_file is not None or parsed.cpu:
        named: str | None = parsed.config_file
        return named
    from accelerate.commands.config import default_config_file

    return default_config_file if Path(default_config_file).is_file() else None


def _check(
    path: str, rest: Path, data: Mapping[str, Any], section: Mapping[str, Any], num_processes: int | None
) -> None:
    """Raise a `ConfigError` for everything that is wrong in the config file, before any process starts."""
    problems = _accelerate_problems(path, rest, data)
    try:
        config = PoplarConfig.from_dict(section, source=f"{path}, section `{SECTION}`")
    except ConfigError as error:
        problems.append(str(error))
    else:
        world_size = num_processes if num_processes is not None else data.get("num_processes")
        if isinstance(world_size, int) and world_size > 0:
            problems += [f"{path}, section `{SECTION}`: {text}" for text in config.check_world(world_size)]
    raise_together(problems)


def _accelerate_problems(path: str, rest: Path, data: Mapping[str, Any]) -> list[str]:
    from accelerate.commands.config import load_config_from_file
    from accelerate.commands.config.config_args import ClusterConfig

    try:
        load_config_from_file(str(rest))
    except (TypeError, ValueError) as problem:
        known = [*ClusterConfig.__dataclass_fields__, SECTION]
        close = {key: difflib.get_close_matches(str(key), known, n=1) for key in data if key not in known}
        hints = [f"Did you mean `{match[0]}` instead of `{key}`?" for key, match in close.items() if match]
        return [" ".join([f"{path}: {str(problem).replace(str(rest), path)}", *hints])]
    return []


@contextlib.contextmanager
def _handed_over(path: str) -> Iterator[None]:
    """Name the file to the processes, unless the user has named another one."""
    ours = str(Path(path).resolve())
    chosen = os.environ.setdefault(CONFIG_VARIABLE, ours)
    if chosen != ours:
        print(
            f"accelerate-poplar launch: {CONFIG_VARIABLE}={chosen} is set and comes first; the `{SECTION}:` section "
            f"of {path} is not used. Unset {CONFIG_VARIABLE} to use it.",
            file=sys.stderr,
        )
        yield
        return
    try:
        yield
    finally:
        del os.environ[CONFIG_VARIABLE]
