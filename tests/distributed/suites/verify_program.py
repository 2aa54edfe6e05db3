"""The command `verify` alone, to be started by a launcher."""

from __future__ import annotations

import argparse
import sys

from accelerate_poplar import cli_verify

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    cli_verify.add_parsers(parser.add_subparsers(required=True))
    arguments = parser.parse_args()
    sys.exit(arguments.run(arguments))
