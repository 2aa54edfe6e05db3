#!/usr/bin/env bash
# Every check, as CI runs them: format, lint, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-.venv/bin/python}"
"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy
exec "$python" -m pytest "$@"
