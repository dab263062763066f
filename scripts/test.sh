#!/usr/bin/env bash
# Runs all tests: scripts/test.sh WORKERS [pytest arguments]. With arguments that choose tests, one run; else two.
# Whole training runs learn by what their processes get done in time: they have the machine to themselves, at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
workers=$1
shift
pytest=(.venv/bin/python -m pytest -rs --durations=10)
alone=tests/trainer/end_to_end

if (($# > 0)); then
  exec "${pytest[@]}" "$@"
fi
side=0
"${pytest[@]}" -n "$workers" --dist loadfile --ignore "$alone" || side=$?
"${pytest[@]}" "$alone"
exit "$side"
