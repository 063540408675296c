#!/usr/bin/env bash
# Installs PyTorch TORCH_VERSION (a "+cpu" build) into VENV: from whatever pip is configured with,
# else from TORCH_INDEX_URL. TORCH_INDEX_ONLY=1 asks TORCH_INDEX_URL alone.
# Only torch itself: its dependencies are no different there and come with the rest.
set -euo pipefail

install() {
  "$VENV/bin/python" -m pip install -q --no-deps --disable-pip-version-check "$@" "torch==$TORCH_VERSION"
}

if "$VENV/bin/python" -m pip show -q torch 2>/dev/null \
  && [ "$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')" = "$TORCH_VERSION" ]; then
  exit 0
fi
echo "PyTorch $TORCH_VERSION (about 200 MB)"
if [ -z "${TORCH_INDEX_ONLY:-}" ] && install 2>/dev/null; then
  exit 0
fi
install --index-url "$TORCH_INDEX_URL"
