#!/usr/bin/env bash
# Set up .venv if need be, then run every check. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh dev
exec scripts/check.sh "$@"
