#!/usr/bin/env bash
# Makes the virtual environment VENV with the first Python found that is 3.11 or newer.
set -euo pipefail

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  echo "No Python 3.11 or newer found: install one, or name it with PYTHON=/path/to/python" >&2
  return 1
}

python=$(find_python)
echo "Making $VENV with $("$python" --version)"
# Debian splits ensurepip off its Python; its pip can fill an environment made without.
if "$python" -c 'import ensurepip' 2>/dev/null; then
  "$python" -m venv "$VENV"
else
  "$python" -m venv --without-pip "$VENV"
  "$python" -m pip --python "$VENV/bin/python" install -q pip
fi
