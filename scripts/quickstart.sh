#!/usr/bin/env bash
# What Poplar brings, on the CPU of one machine: set up .venv, then train a tiny Llama twice on two ranks, one of them
# emulated three times slower than the other: first an even split, then Poplar's. `--help` shows the options.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
exec .venv/bin/python scripts/quickstart.py "$@"
