#!/usr/bin/env bash
# Make .venv with this package and what it needs, in the versions of constraints.txt; quick when it is there already.
#   scripts/setup.sh [EXTRA]     EXTRA: dev for the checks, trl for the examples with TRL
set -euo pipefail
cd "$(dirname "$0")/.."

extra="${1:-}"
wanted="$(cat pyproject.toml constraints.txt | cksum)"
# An environment with an extra serves where none is asked for.
for ready in ".venv/ready-$extra" ${extra:-.venv/ready-*}; do
    if [ -x .venv/bin/python ] && [ "$(cat "$ready" 2>/dev/null)" = "$wanted" ]; then
        exit 0
    fi
done

python=""
for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
if [ -z "$python" ]; then
    echo "setup: no Python of version 3.11 or newer; name one with PYTHON=/path/to/python." >&2
    exit 1
fi

echo "setup: installing into .venv (a few minutes the first time)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
# PyTorch comes first: DeepSpeed's build looks for it.
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${extra:+[$extra]}"
echo "$wanted" > ".venv/ready-$extra"
