"""`accelerate-poplar report`: the page about a finished or running training, from its output directory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .errors import ConfigError

DESCRIPTION = """\
Write poplar_report.html into a run's output directory: one file, no network needed to read it.

It shows the cluster and every rank's share, the measured points and curves, memory against what the devices have, one
optimizer step with the even split above the plan, predicted against measured step time, re-plans, and what would help
next. Training writes it at its end (unless the setting `report` is false); this command makes it again, or for a run
that was stopped, from poplar_plan.json, profiles.json and poplar_history.jsonl."""

EXAMPLE = """\
example:
  accelerate-poplar report outputs/llama"""


def add_parsers(subparsers: Any) -> None:
    """Add the command `report`; it sets `run`, a function of the parsed arguments to an exit code."""
    parser = subparsers.add_parser(
        "report",
        help="write the HTML report of a run from its output directory",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "output_dir", metavar="OUTPUT_DIR", help="the output directory of a run, or a checkpoint in it"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: the page's path and what is missing"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path.

    Returns:
        0.

    Raises:
        ConfigError: There is no such directory, or nothing of a run is in it.
    """
    from .report_html import write_report
    from .run_files import read_run

    record = read_run(Path(args.output_dir))
    if record.empty:
        raise ConfigError(
            f"{args.output_dir}: none of poplar_plan.json, profiles.json and poplar_history.jsonl is here. Give the "
            "output directory of a run with PoplarTrainer."
        )
    path = write_report(args.output_dir)
    if args.json:
        print(
            json.dumps({"report": str(path), "emulated": record.emulated, "remarks": list(record.remarks)}, indent=2)
        )
        return 0
    print(path)
    for remark in record.remarks:
        print(f"- {remark}")
    return 0
