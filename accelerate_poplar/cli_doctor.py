"""`accelerate-poplar doctor`: what this machine has and what would go wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any


def add_parsers(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what this machine has, and what would go wrong",
        description="Look at versions, devices, the compiler, shared memory, the profile cache and the settings.\n"
        "Exit code 1 where training would fail.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings."""
    from .doctor import FAULT, examine

    findings = examine()
    failed = any(finding.kind == FAULT for finding in findings)
    if args.json:
        print(json.dumps({"ok": not failed, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    else:
        for finding in findings:
            print(f"{finding.kind:>6}: {finding.text}")
    return int(failed)
