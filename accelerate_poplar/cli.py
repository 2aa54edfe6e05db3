"""`accelerate-poplar`: one command, whose subcommands live beside what they do."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import cli_checkpoint, cli_doctor, cli_plan, cli_profile, cli_report, cli_verify, launch
from .errors import PoplarError

DESCRIPTION = """\
Train on unequal GPUs at the speed the whole cluster is worth.

Training needs no command of its own: use PoplarTrainer in place of Trainer and start the script as ever, with
`accelerate launch --config_file FILE train.py`. The commands below start a run whose Accelerate YAML has a
`poplar:` section, and answer what a mix of devices would give before anyone rents it."""

EPILOG = """\
`accelerate-poplar COMMAND --help` explains a command. Exit codes: 0 done, 1 the training script failed,
2 a setting, file or argument is wrong (the message says which, and what to change)."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; each subcommand sets `run`, a function of the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="accelerate-poplar",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error (give it before COMMAND)")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    launch.add_parser(subparsers)
    for commands in (cli_profile, cli_plan, cli_report, cli_verify, cli_doctor, cli_checkpoint):
        commands.add_parsers(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: The arguments without the program's name; None: those of this process.

    Returns:
        The exit code: 0 done, 1 the training script failed, 2 the user has something to correct.

    Raises:
        PoplarError: Only with `--debug`; otherwise its message goes to standard error.
    """
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output (`| head`) has seen enough; nothing more can be written, not even at exit.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return 0
    except PoplarError as error:
        if args.debug:
            raise
        print(f"accelerate-poplar {args.command}: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
