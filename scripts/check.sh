#!/usr/bin/env bash
# Every check, as CI runs them: format, lint, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-.venv/bin/python}"
"$python" -m ruff format --check .
"$python" -m ruff check .
# Types: the core and the launcher. The rest is written against torch, Trainer and DeepSpeed, which leave much untyped.
"$python" scripts/core_modules.py | xargs "$python" -m mypy accelerate_poplar/cli.py accelerate_poplar/launch.py
# Two at a time; tests that start ranks of their own are kept apart (tests/conftest.py).
exec "$python" -m pytest -n 2 --dist loadfile "$@"
